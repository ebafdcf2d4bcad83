"""One tile program, several targets: the few words that the C target spells differently.

TileLang's C target runs a block as serial code: it has no shared memory, no fragments and no threads. A program written
against `TileTarget` traces to the CUDA words or to their serial counterparts, so that one source serves every arch.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class TileTarget:
    """What a program is traced for. `arch` is a name of `kda_tl.specs.archs`."""

    arch: str

    @property
    def is_cpu(self) -> bool:
        return self.arch == "cpu"

    def shared(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A buffer that all threads of the block see."""
        return T.alloc_local(shape, dtype) if self.is_cpu else T.alloc_shared(shape, dtype)

    def fragment(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A buffer spread over the registers of the block's threads."""
        return T.alloc_local(shape, dtype) if self.is_cpu else T.alloc_fragment(shape, dtype)

    def parallel(self, *extents: int) -> Any:
        """A loop nest whose iterations are independent."""
        if not self.is_cpu:
            return T.Parallel(*extents)
        return T.serial(extents[0]) if len(extents) == 1 else T.grid(*extents)
