"""chunk_delta_rule: DeltaNet over whole sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.prefill_checks import CHUNK_SIZE, check_names
from kda_tl.ops.prefill_library import public
from kda_tl.specs.rules import Rule

__all__ = ["CHUNK_DELTA_RULE", "chunk_delta_rule"]

CHUNK_DELTA_RULE = Op("chunk_delta_rule", Rule("none", delta=True))


@public(CHUNK_DELTA_RULE)
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    return_intermediate_states: bool = False,
    chunk_size: int | None = CHUNK_SIZE,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int | None = None,
    intracard_segments: int | None = None,
    **kwargs: Any,
) -> Arguments:
    """DeltaNet: KDA without a decay (arXiv 2406.06484).

    The first ten arguments are those of flash-linear-attention 0.6, which has no others. Arguments, results and errors are
    those of `chunk_kda`. The definition is `kda_tl.reference.recurrent_kda` with g = 0.
    """
    a = Arguments(
        q=q,
        k=k,
        v=v,
        beta=beta,
        initial_state=initial_state,
        has_initial_state=has_initial_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        scale=scale,
        use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
        use_beta_sigmoid_in_kernel=bool(use_beta_sigmoid_in_kernel),
        allow_neg_eigval=bool(allow_neg_eigval),
        state_v_first=bool(state_v_first),
        output_final_state=bool(output_final_state),
        return_intermediate_states=bool(return_intermediate_states),
        intracard_segments=intracard_segments,
        state_indices=state_indices,
        null_index=null_index,
    )
    check_names(CHUNK_DELTA_RULE, kwargs, chunk_size)
    return a
