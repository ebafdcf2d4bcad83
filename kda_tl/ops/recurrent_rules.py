"""The rest of the family, one or a few tokens per request: RWKV6, and the rules with plainer decays or no delta correction.

All take the arguments of `recurrent_kda` that they have a use for, and return the same.
"""

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
OPTIONS = ("state_v_first", "state_indices", "null_index", "has_initial_state", "inplace", "cu_seqlens_cpu")


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
    **options: Any,
) -> DecodeArguments:
    """RWKV6: o = scale (S^T r + (sum r u k) v) reads first; then S = Diag(e^w) S + k v^T.

    r, k [B, T, H, K]; v [B, T, HV, V]; w [B, T, HV, K] natural-log decay; u [H, K], the bonus of the token at hand,
    one for all value heads of a head, as in `chunk_rwkv6`; scale K ** -0.5 by default. Options: state_v_first, state_indices,
    null_index, has_initial_state, inplace, cu_seqlens_cpu.
    """
    return _arguments(
        RECURRENT_RWKV6, DecodeArguments(r, k, v, w, bonus=u), scale, initial_state, output_final_state, cu_seqlens, options
    )


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
    **options: Any,
) -> DecodeArguments:
    """Gated linear attention: S = Diag(e^gk) S + k v^T, o = scale S^T q. gk [B, T, HV, K]; options as `recurrent_rwkv6`."""
    a = DecodeArguments(q, k, v, gk)
    return _arguments(RECURRENT_GLA, a, scale, initial_state, output_final_state, cu_seqlens, options)


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
    **options: Any,
) -> DecodeArguments:
    """Scalar decay (RetNet, Mamba-2 form): S = e^g S + k v^T, o = scale S^T q. g [B, T, HV]; options as `recurrent_rwkv6`."""
    a = DecodeArguments(q, k, v, g)
    return _arguments(RECURRENT_SIMPLE_GLA, a, scale, initial_state, output_final_state, cu_seqlens, options)


@public(RECURRENT_LINEAR_ATTENTION)
def recurrent_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> DecodeArguments:
    """Linear attention, not normalised: S = S + k v^T, o = scale S^T q. Options as `recurrent_rwkv6`."""
    a = DecodeArguments(q, k, v)
    return _arguments(RECURRENT_LINEAR_ATTENTION, a, scale, initial_state, output_final_state, cu_seqlens, options)


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
    **options: Any,
) -> DecodeArguments:
    """DeltaNet: u = beta (v - S^T k), S = S + k u^T, o = scale S^T q. beta [B, T, HV]; options as `recurrent_rwkv6`."""
    a = DecodeArguments(q, k, v, beta=beta, use_qk_l2norm_in_kernel=bool(use_qk_l2norm_in_kernel))
    return _arguments(RECURRENT_DELTA_RULE, a, scale, initial_state, output_final_state, cu_seqlens, options)


def _arguments(
    op: Op, a: DecodeArguments, scale: float | None, initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor | None, options: dict[str, Any],
) -> DecodeArguments:  # fmt: skip
    refuse_unknown(op, options, OPTIONS)
    for name in ("state_v_first", "inplace"):
        if name in options:
            options[name] = bool(options[name])
    return a._replace(
        scale=scale, initial_state=initial_state, output_final_state=bool(output_final_state), cu_seqlens=cu_seqlens, **options
    )
