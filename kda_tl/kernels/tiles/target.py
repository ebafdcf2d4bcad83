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

    @property
    def has_mma(self) -> bool:
        """Whether warps may multiply tiles of their own by NVIDIA's mma."""
        return self.arch.startswith("sm_")

    def shared(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A buffer that all threads of the block see."""
        return T.alloc_local(shape, dtype) if self.is_cpu else T.alloc_shared(shape, dtype)

    def fragment(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A buffer spread over the registers of the block's threads."""
        return T.alloc_local(shape, dtype) if self.is_cpu else T.alloc_fragment(shape, dtype)

    def column_pairs(self, rows: int, columns: int, dtype: str, parts: int) -> Any:
        """A tile [rows, columns] in registers, for a block of parts * columns / 2 threads. Index it with `at`.

        A thread holds two neighbouring columns of one part of the rows: what runs along rows needs no other thread, and every
        access of a tile in memory is two elements wide. (A fragment could have this layout, but a parallel loop may index a
        fragment in one way only, and running products need two.)
        """
        return T.alloc_local((parts, columns // 2, rows // parts, 2) if self.is_cpu else (rows // parts, 2), dtype)

    def at(self, part: Any, pair: Any, row: Any, column: Any) -> tuple[Any, ...]:
        """The index in a `column_pairs` tile: part of the rows, pair of columns, row of the part, column of the pair."""
        return (part, pair, row, column) if self.is_cpu else (row, column)

    def parallel(self, *extents: int) -> Any:
        """A loop nest whose iterations are independent."""
        if not self.is_cpu:
            return T.Parallel(*extents)
        return T.serial(extents[0]) if len(extents) == 1 else T.grid(*extents)

    def each_column_pair(self, columns: int, parts: int) -> Any:
        """The (part, pair) of `column_pairs` that the thread at hand holds, once; on the cpu, all of them in turn."""
        if self.is_cpu:
            return T.grid(parts, columns // 2)
        thread = T.get_thread_binding()
        return [(thread // (columns // 2), thread % (columns // 2))]

    def pair(self) -> Any:
        """A loop over two neighbouring elements, which one instruction handles.

        Never write x[j] = f(x[j]) with a function f in it and change x again after that: the CUDA code generator keeps the
        loaded pair under its text, and reads the old one again.
        """
        return T.serial(2) if self.is_cpu else T.vectorized(2)

    def reciprocal(self, x: Any) -> Any:
        """1 / x in float32, for x >= 1: on a GPU the hardware's own, which TileLang has no word for; 0 at infinity."""
        return T.float32(1.0) / x if self.is_cpu else T.call_extern("float32", "__fdividef", T.float32(1.0), x)

    def magnitude(self, x: Any) -> Any:
        """|x|: the C target knows no fabs."""
        return T.max(x, -x) if self.is_cpu else T.abs(x)


def run_time_strides(name: str, axes: str) -> tuple[Any, ...]:
    """A stride per letter of `axes`, 64 bits wide: an offset within one batch row or one pool of states may pass 2^31."""
    return tuple(T.dynamic(f"{name}_{axis}", "int64") for axis in axes)


@T.macro
def assume_multiples(strides, of):
    """Tells the compiler that the three run-time strides are multiples of `of`, for wide loads. The op makes it true."""
    T.assume(strides[0] % of == 0)
    T.assume(strides[1] % of == 0)
    T.assume(strides[2] % of == 0)


@T.macro
def barrier(t):
    """All threads of the block get here before any goes on. For programs that turn TileLang's own barriers off."""
    if not t.is_cpu:
        T.sync_threads()
