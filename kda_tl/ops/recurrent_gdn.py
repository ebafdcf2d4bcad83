"""recurrent_gdn: Gated DeltaNet for one or a few tokens per request, the dense decode step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_tl.ops.decode import DecodeCall, bind, plan, refuse_unknown, run
from kda_tl.ops.plan import Plan

__all__ = ["plan_recurrent_gdn", "recurrent_gdn"]


def recurrent_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    null_index: int | None = None,
    has_initial_state: Tensor | None = None,
    inplace: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet token by token, in one launch; names as in flash-linear-attention's fused_recurrent_gated_delta_rule.

    As `recurrent_kda` (arguments, limits, results, errors), but with one decay per value head:

    Args:
        g: [B, T, HV], natural-log decay or with `use_gate_in_kernel` the raw gate input; no decay if left out.
        dt_bias: [HV].
    """
    return run(_call(locals()))


def plan_recurrent_gdn(*args: Any, **kwargs: Any) -> Plan:
    """What `recurrent_gdn` with these arguments will launch."""
    return plan(_call({"kwargs": {}, **bind(recurrent_gdn, args, kwargs)}))


def _call(arguments: dict[str, Any]) -> DecodeCall:
    arguments = refuse_unknown("recurrent_gdn", dict(arguments))
    if arguments["g"] is None and arguments["use_gate_in_kernel"]:
        raise ValueError("use_gate_in_kernel=True needs g")
    return DecodeCall("recurrent_gdn", g_axes="" if arguments["g"] is None else "h", **arguments)
