"""The default set: what `kda-tl build` compiles for an arch."""

from __future__ import annotations

from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.deltalog import deltalog_default_specs
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec

__all__ = ["default_specs"]


def default_specs(arch: str) -> list[KernelSpec]:
    """Every spec that ships for `arch`. Raises ValueError for an unknown arch."""
    dtype = "float32" if arch_row(arch).is_cpu else "bfloat16"
    return [ChunkWySpec(dtype=dtype), ChunkScanSpec(dtype=dtype), *deltalog_default_specs(arch_row(arch).is_cpu)]
