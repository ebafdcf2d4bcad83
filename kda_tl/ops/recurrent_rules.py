"""The rest of the family, one or a few tokens per request: RWKV6, and the rules with plainer decays or no delta correction.

All take the arguments of `recurrent_kda` that they have a use for, and return the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_tl.ops.decode import DecodeCall, run

__all__ = [
    "recurrent_delta_rule",
    "recurrent_gla",
    "recurrent_linear_attention",
    "recurrent_rwkv6",
    "recurrent_simple_gla",
]


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
) -> tuple[Tensor, Tensor | None]:
    """RWKV6: o = scale (S^T r + (sum r u k) v) reads first; then S = Diag(e^w) S + k v^T.

    r, k [B, T, H, K]; v [B, T, HV, V]; w [B, T, HV, K] natural-log decay; u [HV, K], the bonus of the token at hand; scale
    K ** -0.5 by default. Options: state_v_first, state_indices, null_index, has_initial_state, inplace, cu_seqlens_cpu.
    """
    return run(
        DecodeCall("recurrent_rwkv6", r, k, v, w, "hk", bonus=u, delta=False, read_first=True, q_name="r", g_name="w",
                   **_common("recurrent_rwkv6", options, scale, initial_state, output_final_state, cu_seqlens))
    )  # fmt: skip


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
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention: S = Diag(e^gk) S + k v^T, o = scale S^T q. gk [B, T, HV, K]; options as `recurrent_rwkv6`."""
    common = _common("recurrent_gla", options, scale, initial_state, output_final_state, cu_seqlens)
    return run(DecodeCall("recurrent_gla", q, k, v, gk, "hk", delta=False, g_name="gk", **common))


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
) -> tuple[Tensor, Tensor | None]:
    """Scalar decay (RetNet, Mamba-2 form): S = e^g S + k v^T, o = scale S^T q. g [B, T, HV]; options as `recurrent_rwkv6`."""
    common = _common("recurrent_simple_gla", options, scale, initial_state, output_final_state, cu_seqlens)
    return run(DecodeCall("recurrent_simple_gla", q, k, v, g, "h", delta=False, **common))


def recurrent_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention, not normalised: S = S + k v^T, o = scale S^T q. Options as `recurrent_rwkv6`."""
    common = _common("recurrent_linear_attention", options, scale, initial_state, output_final_state, cu_seqlens)
    return run(DecodeCall("recurrent_linear_attention", q, k, v, delta=False, **common))


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
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet: u = beta (v - S^T k), S = S + k u^T, o = scale S^T q. beta [B, T, HV]; options as `recurrent_rwkv6`."""
    common = _common("recurrent_delta_rule", options, scale, initial_state, output_final_state, cu_seqlens)
    return run(
        DecodeCall("recurrent_delta_rule", q, k, v, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **common)
    )


_OPTIONS = {"state_v_first", "state_indices", "null_index", "has_initial_state", "inplace", "cu_seqlens_cpu"}


def _common(
    op: str, options: dict[str, Any], scale: float | None, initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"{op} has no argument {min(unknown)!r}")
    given = {"scale": scale, "initial_state": initial_state, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
    return {**given, **options}
