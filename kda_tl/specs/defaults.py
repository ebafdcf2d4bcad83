"""The default set: what `kda-tl build` compiles for an arch."""

from __future__ import annotations

from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec

__all__ = ["default_specs"]


def default_specs(arch: str) -> list[KernelSpec]:
    """Every spec that ships for `arch`. Raises ValueError for an unknown arch."""
    is_cpu = arch_row(arch).is_cpu
    dtype = "float32" if is_cpu else "bfloat16"
    sizes = (128, 64) if is_cpu else (128,)
    return [
        *(ChunkWySpec(K, dtype=dtype) for K in sizes),
        *(ChunkScanSpec(K, V, dtype=dtype) for K in sizes for V in sizes),
    ]
