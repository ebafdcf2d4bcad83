"""What a call would launch, without launching it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kda_tl.ops import decode, deltalog_library, prefill
from kda_tl.ops.chunk_delta_rule import chunk_delta_rule
from kda_tl.ops.chunk_gdn import chunk_gated_delta_rule, chunk_gdn
from kda_tl.ops.chunk_gla import chunk_gla
from kda_tl.ops.chunk_kda import chunk_kda
from kda_tl.ops.chunk_linear_attention import chunk_linear_attention, chunk_linear_attn
from kda_tl.ops.chunk_rwkv6 import chunk_rwkv6
from kda_tl.ops.chunk_simple_gla import chunk_simple_gla
from kda_tl.ops.deltalog import deltalog_decode_gdn, deltalog_decode_kda, deltalog_decode_rwkv6
from kda_tl.ops.plan import Plan
from kda_tl.ops.recurrent_gdn import recurrent_gdn
from kda_tl.ops.recurrent_kda import recurrent_kda
from kda_tl.ops.recurrent_rules import (
    recurrent_delta_rule,
    recurrent_gla,
    recurrent_linear_attention,
    recurrent_rwkv6,
    recurrent_simple_gla,
)

__all__ = ["DECODE_OPS", "DELTALOG_OPS", "PLANNERS", "PREFILL_OPS", "explain", "workspace_bytes"]

PREFILL_OPS: dict[str, Any] = {
    "chunk_kda": chunk_kda,
    "chunk_gdn": chunk_gdn,
    "chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_delta_rule": chunk_delta_rule,
    "chunk_gla": chunk_gla,
    "chunk_simple_gla": chunk_simple_gla,
    "chunk_linear_attention": chunk_linear_attention,
    "chunk_linear_attn": chunk_linear_attn,
    "chunk_rwkv6": chunk_rwkv6,
}


DECODE_OPS: dict[str, Any] = {
    function.__name__: function
    for function in (
        recurrent_kda,
        recurrent_gdn,
        recurrent_delta_rule,
        recurrent_gla,
        recurrent_simple_gla,
        recurrent_linear_attention,
        recurrent_rwkv6,
    )
}

DELTALOG_OPS: dict[str, Any] = {
    function.__name__: function for function in (deltalog_decode_kda, deltalog_decode_gdn, deltalog_decode_rwkv6)
}


def _planner(plan: Callable[[Any, Any], Plan], function: Any) -> Callable[..., Plan]:
    return lambda *args, **kwargs: plan(function.op, function.arguments(*args, **kwargs))


PLANNERS: dict[str, Callable[..., Plan]] = {
    **{name: _planner(prefill.plan, function) for name, function in PREFILL_OPS.items()},
    **{name: _planner(decode.plan, function) for name, function in DECODE_OPS.items()},
    **{name: _planner(deltalog_library.plan, function) for name, function in DELTALOG_OPS.items()},
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


def workspace_bytes(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Bytes of device memory that `op(*args, **kwargs)` allocates for its kernels and frees again, results not included.

    Known before anything is launched, from types and shapes alone: no sync, no allocation, no kernel, no artifact needed.

    Raises:
        ValueError, TypeError: as `explain`.
    """
    return explain(op, *args, **kwargs).workspace_bytes
