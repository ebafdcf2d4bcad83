"""chunk_simple_gla: linear attention with one decay per head, the form of RetNet and Mamba-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.checks import check_dtype, check_shape, check_tensors
from kda_tl.ops.offered import DTYPES
from kda_tl.ops.prefill_checks import CHUNK_SIZE, check_names
from kda_tl.ops.prefill_library import public
from kda_tl.specs.rules import Rule

__all__ = ["CHUNK_SIMPLE_GLA", "chunk_simple_gla"]

CHUNK_SIMPLE_GLA = Op("chunk_simple_gla", Rule("scalar", delta=False))


@public(CHUNK_SIMPLE_GLA)
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
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
    """Linear attention with a scalar decay: S <- exp(g) S + k v^T, o = scale S^T q.

    The first eleven arguments are those of flash-linear-attention 0.6, which has HV = H. Arguments, results and errors that are
    not named here are those of `chunk_kda`.

    Args:
        g: [B, T, HV], natural-log decay <= 0.
        g_gamma: [HV], the same for every token (RetNet). One of the two; neither is no decay.
    """
    if g_gamma is not None and g is not None:
        raise ValueError("g and g_gamma exclude each other: pass one of them")
    if g is None:
        check_tensors(q=q, k=k, v=v)
        if v.dim() != 4:
            raise ValueError(f"v must have shape [B, T, HV, V], got {list(v.shape)}")
        if g_gamma is None:
            g = torch.zeros((), device=v.device).expand(v.shape[:3])
        else:
            check_tensors(v=v, g_gamma=g_gamma)
            check_dtype("g_gamma", g_gamma, DTYPES["g"])
            check_shape("g_gamma", g_gamma, "[HV]", v.shape[2:3])
            g = g_gamma.expand(v.shape[:3])
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
    check_names(CHUNK_SIMPLE_GLA, kwargs, chunk_size)
    return a
