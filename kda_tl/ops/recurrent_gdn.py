"""recurrent_gdn: Gated DeltaNet for one or a few tokens per request, the dense decode step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_tl.ops.arguments import Op
from kda_tl.ops.decode import DecodeArguments, public, refuse_unknown
from kda_tl.specs.rules import RULES

__all__ = ["RECURRENT_GDN", "recurrent_gdn"]

RECURRENT_GDN = Op("recurrent_gdn", RULES["gdn"])


@public(RECURRENT_GDN)
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
) -> DecodeArguments:
    """Gated DeltaNet (arXiv 2412.06464) token by token, in one launch.

    Names are those of flash-linear-attention's fused_recurrent_gated_delta_rule.

    As `recurrent_kda` (arguments, limits, results, errors), but with one decay per value head:

    Args:
        g: [B, T, HV], natural-log decay or with `use_gate_in_kernel` the raw gate input; no decay if left out.
        dt_bias: [HV].
    """
    if kwargs:
        refuse_unknown(RECURRENT_GDN, kwargs, ("safe_gate",))
    return DecodeArguments(
        q, k, v, g, beta, None, A_log if use_gate_in_kernel else None, dt_bias if use_gate_in_kernel else None, initial_state,
        has_initial_state, cu_seqlens, cu_seqlens_cpu, state_indices, null_index, scale, lower_bound,
        bool(use_qk_l2norm_in_kernel), bool(use_gate_in_kernel), bool(use_beta_sigmoid_in_kernel), bool(allow_neg_eigval),
        bool(state_v_first), bool(output_final_state), bool(inplace),
    )  # fmt: skip
