"""chunk_gdn, also named chunk_gated_delta_rule: Gated DeltaNet over whole sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.compatibility import renamed
from kda_tl.ops.context import local_sequences
from kda_tl.ops.prefill_checks import CHUNK_SIZE, check_names
from kda_tl.ops.prefill_library import public
from kda_tl.specs.rules import Rule

__all__ = ["CHUNK_GDN", "chunk_gated_delta_rule", "chunk_gdn"]

CHUNK_GDN = Op("chunk_gdn", Rule("scalar", delta=True))


@public(CHUNK_GDN)
def chunk_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    return_intermediate_states: bool = False,
    chunk_size: int | None = CHUNK_SIZE,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int | None = None,
    intracard_segments: int | None = None,
    **kwargs: Any,
) -> Arguments:
    """Gated DeltaNet: KDA with one decay for all key channels of a head (arXiv 2412.06464).

    Names, order, shapes and defaults are those of flash-linear-attention 0.6. Arguments, results and errors that are not named
    here are those of `chunk_kda`. The definition is `kda_tl.reference.recurrent_kda` with g [B, T, HV].

    Args:
        g: [B, T, HV], natural-log decay (<= 0, no lower limit), or with `use_gate_in_kernel` the raw gate input.
        use_gate_in_kernel: g becomes -exp(A_log) softplus(g + dt_bias).
        A_log, dt_bias: [HV].
        chunk_indices: accepted for flash-linear-attention's sake; nothing here is indexed by chunk.
    """
    if "transpose_state_layout" in kwargs:
        state_v_first = renamed(kwargs, "transpose_state_layout", "state_v_first")
    cu_seqlens, cu_seqlens_cpu = local_sequences(cp_context, q, cu_seqlens, cu_seqlens_cpu)
    a = Arguments(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log if use_gate_in_kernel else None,
        dt_bias=dt_bias if use_gate_in_kernel else None,
        initial_state=initial_state,
        has_initial_state=has_initial_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        scale=scale,
        use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
        use_gate_in_kernel=bool(use_gate_in_kernel),
        use_beta_sigmoid_in_kernel=bool(use_beta_sigmoid_in_kernel),
        allow_neg_eigval=bool(allow_neg_eigval),
        state_v_first=bool(state_v_first),
        output_final_state=bool(output_final_state),
        return_intermediate_states=bool(return_intermediate_states),
        intracard_segments=intracard_segments,
        state_indices=state_indices,
        null_index=null_index,
    )
    check_names(CHUNK_GDN, kwargs, chunk_size)
    return a


chunk_gated_delta_rule = chunk_gdn
