"""The rest of the family, one or a few tokens per request: RWKV6, and the rules with plainer decays or no delta correction."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_tl.ops.arguments import Op
from kda_tl.ops.decode import DecodeArguments, public, refuse_unknown
from kda_tl.specs.rules import RULES

__all__ = [
    "recurrent_delta_rule",
    "recurrent_gla",
    "recurrent_linear_attention",
    "recurrent_rwkv6",
    "recurrent_simple_gla",
]

RECURRENT_RWKV6 = Op("recurrent_rwkv6", RULES["rwkv6"], names={"q": "r", "g": "w", "bonus": "u"})
RECURRENT_GLA = Op("recurrent_gla", RULES["gla"], names={"g": "gk"})
RECURRENT_SIMPLE_GLA = Op("recurrent_simple_gla", RULES["simple_gla"])
RECURRENT_LINEAR_ATTENTION = Op("recurrent_linear_attention", RULES["linear_attention"])
RECURRENT_DELTA_RULE = Op("recurrent_delta_rule", RULES["delta_rule"])


@public(RECURRENT_RWKV6)
def recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
    null_index: int | None = None,
    has_initial_state: Tensor | None = None,
    inplace: bool = False,
    **kwargs: Any,
) -> DecodeArguments:
    """RWKV6 (arXiv 2404.05892): o = scale (S^T r + (sum r u k) v) reads first; then S = Diag(e^w) S + k v^T.

    Arguments, results and errors that are not named here are those of `recurrent_kda`.

    Args:
        r, k: [B, T, H, K]; v: [B, T, HV, V]; w: [B, T, HV, K], natural-log decay.
        u: [H, K], the bonus of the token at hand, one for all value heads of a head, as in `chunk_rwkv6`.
    """
    refuse_unknown(RECURRENT_RWKV6, kwargs)
    return DecodeArguments(
        r, k, v, w, bonus=u, scale=scale, initial_state=initial_state, output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, state_v_first=bool(state_v_first), state_indices=state_indices,
        null_index=null_index, has_initial_state=has_initial_state, inplace=bool(inplace),
    )  # fmt: skip


@public(RECURRENT_GLA)
def recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
    null_index: int | None = None,
    has_initial_state: Tensor | None = None,
    inplace: bool = False,
    **kwargs: Any,
) -> DecodeArguments:
    """Gated linear attention (arXiv 2312.06635): S = Diag(e^gk) S + k v^T, o = scale S^T q.

    Arguments, results and errors that are not named here are those of `recurrent_kda`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; gk: [B, T, HV, K], natural-log decay.
    """
    refuse_unknown(RECURRENT_GLA, kwargs)
    return DecodeArguments(
        q, k, v, gk, scale=scale, initial_state=initial_state, output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, state_v_first=bool(state_v_first), state_indices=state_indices,
        null_index=null_index, has_initial_state=has_initial_state, inplace=bool(inplace),
    )  # fmt: skip


@public(RECURRENT_SIMPLE_GLA)
def recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
    null_index: int | None = None,
    has_initial_state: Tensor | None = None,
    inplace: bool = False,
    **kwargs: Any,
) -> DecodeArguments:
    """One decay per head (RetNet, arXiv 2307.08621; Mamba-2, arXiv 2405.21060): S = e^g S + k v^T, o = scale S^T q.

    Arguments, results and errors that are not named here are those of `recurrent_kda`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV], natural-log decay.
    """
    refuse_unknown(RECURRENT_SIMPLE_GLA, kwargs)
    return DecodeArguments(
        q, k, v, g, scale=scale, initial_state=initial_state, output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, state_v_first=bool(state_v_first), state_indices=state_indices,
        null_index=null_index, has_initial_state=has_initial_state, inplace=bool(inplace),
    )  # fmt: skip


@public(RECURRENT_LINEAR_ATTENTION)
def recurrent_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
    null_index: int | None = None,
    has_initial_state: Tensor | None = None,
    inplace: bool = False,
    **kwargs: Any,
) -> DecodeArguments:
    """Linear attention (arXiv 2006.16236), not normalised: S = S + k v^T, o = scale S^T q.

    Arguments, results and errors that are not named here are those of `recurrent_kda`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V].
        initial_state: as `chunk_linear_attention(..., normalize=False)` leaves it.
    """
    refuse_unknown(RECURRENT_LINEAR_ATTENTION, kwargs)
    return DecodeArguments(
        q, k, v, scale=scale, initial_state=initial_state, output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, state_v_first=bool(state_v_first), state_indices=state_indices,
        null_index=null_index, has_initial_state=has_initial_state, inplace=bool(inplace),
    )  # fmt: skip


@public(RECURRENT_DELTA_RULE)
def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
    null_index: int | None = None,
    has_initial_state: Tensor | None = None,
    inplace: bool = False,
    **kwargs: Any,
) -> DecodeArguments:
    """DeltaNet (arXiv 2406.06484): u = beta (v - S^T k), S = S + k u^T, o = scale S^T q.

    Arguments, results and errors that are not named here are those of `recurrent_kda`.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; beta: [B, T, HV], write strength.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum x^2 + 1e-6).
    """
    refuse_unknown(RECURRENT_DELTA_RULE, kwargs)
    return DecodeArguments(
        q, k, v, beta=beta, scale=scale, initial_state=initial_state, output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, state_v_first=bool(state_v_first), state_indices=state_indices,
        null_index=null_index, has_initial_state=has_initial_state, inplace=bool(inplace),
        use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel),
    )  # fmt: skip
