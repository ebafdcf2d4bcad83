"""Intracard parallelism: specs, schedules and default set of the two kernels that cut sequences into segments.

intracard_pre_scan gives the affine map of every segment, intracard_merge turns maps into the state before each of them; then
chunk_scan walks all segments at once (derivation: `kda_tl.reference.affine`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from kda_tl.specs.kernels import DTYPES, KERNEL_SPECS, KernelSpec, check_one_of
from kda_tl.specs.schedules import SCHEDULES, Schedule

__all__ = [
    "IntracardMergeSchedule",
    "IntracardMergeSpec",
    "IntracardPreScanSchedule",
    "IntracardPreScanSpec",
    "intracard_specs",
    "ships",
]


@dataclass(frozen=True)
class IntracardPreScanSpec(KernelSpec):
    """The map (M, B) of every segment but the last: S after the segment is M S + B for any S before it.

    Attributes:
        head_dim_k, head_dim_v: K, V.
        chunk_size: C, tokens per chunk.
        dtype: of v; the workspace is of `operand_dtype`, maps are float32.
        delta: M is [K, K]; without the delta correction it is diagonal, and kept as [1, K].
    """

    kernel: ClassVar[str] = "intracard_pre_scan"
    head_dim_k: int = 128
    head_dim_v: int = 128
    chunk_size: int = 64
    dtype: str = "bfloat16"
    delta: bool = True

    def __post_init__(self) -> None:
        check_one_of("head_dim_k", self.head_dim_k, (64, 128))
        check_one_of("head_dim_v", self.head_dim_v, (64, 128))
        check_one_of("chunk_size", self.chunk_size, (64,))
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("delta", self.delta, (True, False))


@dataclass(frozen=True)
class IntracardMergeSpec(KernelSpec):
    """From the maps of segments to the states before them, in float32 throughout.

    Attributes:
        head_dim_k, head_dim_v: K, V.
        chunk_size: C, in which segments are counted.
        dtype: of the initial states.
        delta: as in IntracardPreScanSpec.
    """

    kernel: ClassVar[str] = "intracard_merge"
    head_dim_k: int = 128
    head_dim_v: int = 128
    chunk_size: int = 64
    dtype: str = "float32"
    delta: bool = True

    def __post_init__(self) -> None:
        check_one_of("head_dim_k", self.head_dim_k, (64, 128))
        check_one_of("head_dim_v", self.head_dim_v, (64, 128))
        check_one_of("chunk_size", self.chunk_size, (64,))
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("delta", self.delta, (True, False))


@dataclass(frozen=True)
class IntracardPreScanSchedule(Schedule):
    """Attributes:
    variant: "plain" runs on every arch; "warp_specialized" has a role per warpgroup and runs on sm_90, for narrow dtypes.
    threads: per block of the plain variant; a multiple of 128 (warpgroups). The other one has 384.
    block: columns of M or of B that one block walks with.
    stages: warp_specialized: chunks in flight.
    state_registers, value_registers, load_registers: warp_specialized: per thread of each role; a multiple of 8, 504
        together at most.
    """

    kernel: ClassVar[str] = "intracard_pre_scan"
    variant: str = "plain"
    threads: int = 128
    block: int = 32
    stages: int = 3
    state_registers: int = 208
    value_registers: int = 208
    load_registers: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in ("plain", "warp_specialized"):
            raise ValueError(f"variant must be plain or warp_specialized, got {self.variant!r}")
        if self.block not in (16, 32, 64):
            raise ValueError(f"block must be 16, 32 or 64, a divisor of K and V, got {self.block}")
        if self.threads % 128:
            raise ValueError(f"threads must be a multiple of 128, got {self.threads}")
        registers = (self.state_registers, self.value_registers, self.load_registers)
        if sum(registers) > 504 or any(count % 8 or not 24 <= count <= 240 for count in registers):
            raise ValueError(f"registers must be multiples of 8 from 24 to 240, 504 together at most, got {registers}")


@dataclass(frozen=True)
class IntracardMergeSchedule(Schedule):
    """Attributes:
    threads: per block.
    block_v: columns of the state that one block holds, four to a thread.
    """

    kernel: ClassVar[str] = "intracard_merge"
    threads: int = 128
    block_v: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_v not in (8, 16, 32, 64):
            raise ValueError(f"block_v must be 8, 16, 32 or 64, a divisor of V, got {self.block_v}")
        if self.threads % 128 or self.threads > 16 * self.block_v:
            raise ValueError(f"threads must be a multiple of 128, at most 16 per column of block_v, got {self.threads}")


def intracard_specs(is_cpu: bool) -> list[KernelSpec]:
    """What ships: K = V = 128 for every rule, 64 for those with the delta correction; less of float32 on GPUs, where its
    products take long to compile. Other shapes are not cut."""
    narrow = ((128, True, "bfloat16"), (128, False, "bfloat16"), (64, True, "bfloat16"), (128, True, "float16"),
              (128, False, "float16"), (128, True, "float32"))  # fmt: skip
    wide = ((128, True, "float32"), (128, False, "float32"), (64, True, "float32"))
    return [
        *(IntracardPreScanSpec(size, size, 64, dtype, delta) for size, delta, dtype in (wide if is_cpu else narrow)),
        *(IntracardMergeSpec(size, size, delta=delta) for size, delta in ((128, True), (128, False), (64, True))),
    ]


@functools.cache
def _shipped(is_cpu: bool) -> frozenset[KernelSpec]:
    return frozenset(intracard_specs(is_cpu))


def ships(pre_scan: IntracardPreScanSpec, merge: IntracardMergeSpec, is_cpu: bool) -> bool:
    """Whether both are in the default set."""
    return {pre_scan, merge} <= _shipped(is_cpu)


KERNEL_SPECS.update({spec.kernel: spec for spec in (IntracardPreScanSpec, IntracardMergeSpec)})
SCHEDULES.update({schedule.kernel: schedule for schedule in (IntracardPreScanSchedule, IntracardMergeSchedule)})
