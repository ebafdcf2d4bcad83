"""chunk_gla: gated linear attention over whole sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.prefill_checks import CHUNK_SIZE, check_names
from kda_tl.ops.prefill_library import public
from kda_tl.specs.rules import Rule

__all__ = ["CHUNK_GLA", "chunk_gla"]

CHUNK_GLA = Op("chunk_gla", Rule("per_key", delta=False))


@public(CHUNK_GLA)
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    return_intermediate_states: bool = False,
    chunk_size: int | None = CHUNK_SIZE,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int | None = None,
    intracard_segments: int | None = None,
    **kwargs: Any,
) -> Arguments:
    """Gated linear attention: S <- Diag(exp(g)) S + k v^T, o = scale S^T q (arXiv 2312.06635).

    The first ten arguments are those of flash-linear-attention 0.6, which has no others and HV = H. Arguments, results and
    errors are those of `chunk_kda`.
    """
    a = Arguments(
        q=q,
        k=k,
        v=v,
        g=g,
        initial_state=initial_state,
        has_initial_state=has_initial_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        scale=scale,
        state_v_first=bool(state_v_first),
        output_final_state=bool(output_final_state),
        return_intermediate_states=bool(return_intermediate_states),
        intracard_segments=intracard_segments,
        state_indices=state_indices,
        null_index=null_index,
    )
    check_names(CHUNK_GLA, kwargs, chunk_size)
    return a
