"""chunk_rwkv6: RWKV6 over whole sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.prefill_checks import CHUNK_SIZE, check_names
from kda_tl.ops.prefill_library import public
from kda_tl.specs.rules import Rule

__all__ = ["CHUNK_RWKV6", "chunk_rwkv6"]

CHUNK_RWKV6 = Op("chunk_rwkv6", Rule("per_key", delta=False, read_first=True), names={"q": "r", "g": "w", "bonus": "u"})


@public(CHUNK_RWKV6)
def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    state_v_first: bool = False,
    return_intermediate_states: bool = False,
    chunk_size: int | None = CHUNK_SIZE,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int | None = None,
    intracard_segments: int | None = None,
    **kwargs: Any,
) -> Arguments:
    """RWKV6: o = scale (S^T r + (r . u k) v), then S <- Diag(exp(w)) S + k v^T (arXiv 2404.05892).

    The first ten arguments are those of flash-linear-attention 0.6, which has HV = H. Arguments, results and errors that are
    not named here are those of `chunk_kda`.

    Args:
        r: [B, T, H, K], the receptance: q of the other ops.
        w: [B, T, HV, K], natural-log decay <= 0: g of the other ops.
        u: [H, K], the bonus of the current token.
    """
    a = Arguments(
        q=r,
        k=k,
        v=v,
        g=w,
        bonus=u,
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
    check_names(CHUNK_RWKV6, kwargs, chunk_size)
    return a
