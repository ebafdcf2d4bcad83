"""The default set: what `kda-tl build` compiles for an arch."""

from __future__ import annotations

from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.decode import decode_specs
from kda_tl.specs.deltalog import deltalog_default_specs
from kda_tl.specs.kernels import KernelSpec
from kda_tl.specs.prefill import prefill_specs

__all__ = ["MAX_PROGRAMS", "default_specs"]

MAX_PROGRAMS = 120
"""Per arch: what two cores compile in about five minutes."""


def default_specs(arch: str) -> list[KernelSpec]:
    """Every spec that ships for `arch`. Raises ValueError for an unknown arch."""
    is_cpu = arch_row(arch).is_cpu
    return [*prefill_specs(is_cpu), *decode_specs(arch), *deltalog_default_specs(is_cpu)]
