"""The token recurrence: the definition that every other form of an op is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from ._inputs import CumulativeLengths, Lockstep, check_inputs


def recurrent_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    bonus: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
    *,
    decay: str,
    delta: bool,
    read_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Any rule of the family, token by token. Per value head, with the state S [K, V]:

        S <- Diag(exp(g_t)) S                    decay, unless `decay` is "none"
        u  = beta_t (v_t - S^T k_t)              residual against the decayed state; without `delta`, u = v_t
        S <- S + k_t u^T                         write
        o_t = scale S^T q_t                      read after the write

    With `read_first` the read comes before the decay and the write, and the token itself enters through its bonus:

        o_t = scale (S^T q_t + (sum_c q_tc bonus_c k_tc) v_t)

    Args:
        q, k: [B, T, H, K]. Value head hv reads the q/k head hv // (HV // H). No norm is applied (see `l2norm`).
        v: [B, T, HV, V], HV % H == 0.
        g: natural-log decay, <= 0 (see `kda_gate`, `gdn_gate`; not the decay itself, which is exp(g)); exactly 0 keeps the
            state, -inf clears it. [B, T, HV, K] for decay "per_key", or [B, T, HV] for one decay of all K key channels;
            [B, T, HV] for decay "scalar". Left out, nothing decays.
        beta: [B, T, HV] write strength (see `beta_sigmoid`) of a rule with `delta`; 1 if left out.
        bonus: [H, K], of a rule with `read_first`; zero if left out.
        scale: of the output, K^-0.5 if left out.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with `state_v_first`; zero if left out. N is B, or the
            number of packed sequences.
        cu_seqlens: [N + 1] integers, or an int32 or int64 tensor: sequence n of the pack (B = 1) is the tokens
            cu_seqlens[n] to cu_seqlens[n + 1] - 1. Sequences may be empty; outputs past cu_seqlens[-1] are zero.
        state_v_first: layout of both states.
        dtype: of the computation and of both results, torch.float64 or torch.float32.
        decay, delta, read_first: the rule, as in `kda_tl.specs.rules.Rule`.

    Returns:
        o [B, T, HV, V] and the final state of every sequence, in the layout of initial_state. An empty sequence keeps
        its initial state. Both are differentiable in every tensor argument.

    Raises:
        TypeError: an argument that is not a floating-point tensor.
        ValueError: any other wrong shape, device, dtype or cu_seqlens; g, beta or bonus for a rule that has none.
    """
    x = check_inputs(q, k, v, g, beta, bonus, decay, delta, read_first, scale, initial_state, cu_seqlens, state_v_first, dtype)
    walk = Lockstep.of(x.starts, x.lengths, q.device)

    # Row vectors for q, k and v, a column for the decay, so that every step is a product of matrices.
    queries = walk.split(x.q.repeat_interleave(x.group, 1).unsqueeze(-2))
    keys = walk.split(x.k.repeat_interleave(x.group, 1).unsqueeze(-2))
    values = walk.split(x.v.unsqueeze(-2))
    decays = walk.split(x.g.unsqueeze(-1))
    betas = walk.split(x.beta[..., None, None])
    outputs: list[Tensor] = []

    def step(state: Tensor, i: int) -> Tensor:
        if read_first:
            own = (queries[i] * x.bonus.unsqueeze(-2) * keys[i]).sum(-1, keepdim=True)
            outputs.append((queries[i] @ state + own * values[i]).squeeze(-2))
        state = decays[i].exp() * state
        u = betas[i] * (values[i] - keys[i] @ state) if delta else values[i]
        state = state + keys[i].transpose(-1, -2) * u
        if not read_first:
            outputs.append((queries[i] @ state).squeeze(-2))
        return state

    final_state = walk.scan(x.state, step)
    o = x.scale * walk.join(outputs, torch.zeros_like(x.v))
    return o.reshape(v.shape), (final_state.transpose(-1, -2) if state_v_first else final_state).contiguous()


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention: per-key decay, delta correction. Arguments, results and errors of `recurrent_rule`.

    Per value head, with the state S [K, V]:

        S <- Diag(exp(g_t)) S                    decay
        u  = beta_t (v_t - S^T k_t)              residual against the decayed state
        S <- S + k_t u^T                         write
        o_t = scale S^T q_t                      read after the write

    Source: Kimi Linear, arXiv 2510.26692.
    """
    return recurrent_rule(
        q, k, v, g, beta, None, scale, initial_state, cu_seqlens, state_v_first, dtype, decay="per_key", delta=True
    )


def recurrent_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet: one decay g [B, T, HV] for all key channels, delta correction. Otherwise as `recurrent_rule`.

    Source: Gated Delta Networks, arXiv 2412.06464.
    """
    return recurrent_rule(
        q, k, v, g, beta, None, scale, initial_state, cu_seqlens, state_v_first, dtype, decay="scalar", delta=True
    )


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """DeltaNet: no decay, delta correction. Otherwise as `recurrent_rule`.

    Source: Parallelizing Linear Transformers with the Delta Rule, arXiv 2406.06484.
    """
    return recurrent_rule(
        q, k, v, None, beta, None, scale, initial_state, cu_seqlens, state_v_first, dtype, decay="none", delta=True
    )


def recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention: per-key decay g [B, T, HV, K], no correction. Otherwise as `recurrent_rule`.

    Source: Gated Linear Attention Transformers, arXiv 2312.06635.
    """
    return recurrent_rule(
        q, k, v, g, None, None, scale, initial_state, cu_seqlens, state_v_first, dtype, decay="per_key", delta=False
    )


def recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """One decay g [B, T, HV] for all key channels, no correction. RetNet has a g that is constant in time; Mamba-2 is this
    with its step size multiplied into v. Otherwise as `recurrent_rule`.

    Source: RetNet, arXiv 2307.08621; Mamba-2, arXiv 2405.21060.
    """
    return recurrent_rule(
        q, k, v, g, None, None, scale, initial_state, cu_seqlens, state_v_first, dtype, decay="scalar", delta=False
    )


def recurrent_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Causal linear attention: no decay, no correction, no normaliser. Otherwise as `recurrent_rule`.

    Source: Transformers are RNNs, arXiv 2006.16236.
    """
    return recurrent_rule(
        q, k, v, None, None, None, scale, initial_state, cu_seqlens, state_v_first, dtype, decay="none", delta=False
    )


def recurrent_rwkv6(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    bonus: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """RWKV6: per-key decay, no correction; reads before the decay and the write, plus the token's bonus [H, K]. q is its
    receptance r and g its log decay w. Otherwise as `recurrent_rule`.

    Source: Eagle and Finch, arXiv 2404.05892.
    """
    return recurrent_rule(
        q, k, v, g, None, bonus, scale, initial_state, cu_seqlens, state_v_first, dtype,
        decay="per_key", delta=False, read_first=True,
    )  # fmt: skip
