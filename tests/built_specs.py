"""What tests build: the cpu's default set, and of the GPU archs about one program per kernel, since each takes seconds.

`test_compiler_everything.py` builds all of them, on request.
"""

from __future__ import annotations

from typing import Any

from kda_tl.specs.archs import ARCHS
from kda_tl.specs.decode import RecurrentDecodeSpec
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.deltalog import DeltaLogDecodeSpec, DeltaLogPrepSpec
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec

__all__ = ["CUDA_ARCHS", "built_specs", "may_spill"]


def may_spill(meta: dict[str, Any]) -> int:
    """Bytes that an artifact may store, and load again once: one register, outside of all loops.

    chunk_scan, V tile 128: one warpgroup holds all of a head's state. chunk_wy: where three or four blocks share the registers.
    """
    kernel, schedule = meta["spec"]["kernel"], meta["schedule"]
    if kernel == "chunk_wy":
        return 4 if schedule["min_blocks"] > 2 else 0
    return 4 if schedule.get("block_v") == 128 and kernel == "chunk_scan" else 0


CUDA_ARCHS = [name for name, row in ARCHS.items() if not row.is_cpu and row.measured]

ONE_PER_OP: list[KernelSpec] = [ChunkWySpec(), ChunkScanSpec(), RecurrentDecodeSpec(), DeltaLogDecodeSpec(one_token=True)]
MORE_FOR_SM_90: list[KernelSpec] = [
    IntracardPreScanSpec(),
    IntracardMergeSpec(),
    ChunkScanSpec(state_dtype="bfloat16"),
    RecurrentDecodeSpec(state_dtype="bfloat16"),
    DeltaLogPrepSpec(),
    DeltaLogDecodeSpec(),
    DeltaLogDecodeSpec(prepared=True),
]


def built_specs(arch: str) -> list[KernelSpec]:
    """The specs of the registry `built(arch)`; each is in the arch's default set."""
    if ARCHS[arch].is_cpu:
        return default_specs(arch)
    return ONE_PER_OP + (MORE_FOR_SM_90 if arch == "sm_90" else [])
