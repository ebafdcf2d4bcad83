"""What a call would launch, without launching it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kda_tl.ops.chunk_kda import chunk_kda, plan_chunk_kda
from kda_tl.ops.plan import Plan
from kda_tl.ops.recurrent_gdn import plan_recurrent_gdn, recurrent_gdn
from kda_tl.ops.recurrent_kda import plan_recurrent_kda, recurrent_kda

__all__ = ["explain"]

PLANNERS: dict[str, Callable[..., Plan]] = {
    chunk_kda.__name__: plan_chunk_kda,
    recurrent_kda.__name__: plan_recurrent_kda,
    recurrent_gdn.__name__: plan_recurrent_gdn,
}


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """The plan of `op(*args, **kwargs)`: problem, arch, artifacts, grids, and what is missing. `print` it.

    Raises:
        ValueError: op is not a public op, by name or itself; or an argument is not what the op takes.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in PLANNERS:
        raise ValueError(f"op must be one of {', '.join(PLANNERS)}, got {name!r}")
    return PLANNERS[name](*args, **kwargs)
