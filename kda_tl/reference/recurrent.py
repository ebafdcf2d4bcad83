"""The token recurrence: the definition that every other form of an op is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from ._inputs import CumulativeLengths, Lockstep, check_inputs


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention, token by token. Per value head, with the state S [K, V]:

        S <- Diag(exp(g_t)) S                    decay
        u  = beta_t (v_t - S^T k_t)              residual against the decayed state
        S <- S + k_t u^T                         write
        o_t = scale S^T q_t                      read after the write

    Args:
        q, k: [B, T, H, K]. Value head hv reads the q/k head hv // (HV // H). No norm is applied (see `l2norm`).
        v: [B, T, HV, V], HV % H == 0.
        g: [B, T, HV, K] natural-log decay, <= 0 (see `kda_gate`); exactly 0 keeps the state, -inf clears it.
            [B, T, HV] is one decay for all K key channels: Gated DeltaNet.
        beta: [B, T, HV] write strength (see `beta_sigmoid`).
        scale: of the output, K^-0.5 if left out.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with `state_v_first`; zero if left out. N is B, or the
            number of packed sequences.
        cu_seqlens: [N + 1] integers, or an int32 or int64 tensor: sequence n of the pack (B = 1) is the tokens
            cu_seqlens[n] to cu_seqlens[n + 1] - 1. Sequences may be empty; outputs past cu_seqlens[-1] are zero.
        state_v_first: layout of both states.
        dtype: of the computation and of both results, torch.float64 or torch.float32.

    Returns:
        o [B, T, HV, V] and the final state of every sequence, in the layout of initial_state. An empty sequence keeps
        its initial state. Both are differentiable in every tensor argument.

    Raises:
        TypeError: an argument that is not a floating-point tensor.
        ValueError: any other wrong shape, device, dtype or cu_seqlens.

    Source: Kimi Linear, arXiv 2510.26692; with one decay for all channels, Gated Delta Networks, arXiv 2412.06464.
    """
    x = check_inputs(q, k, v, g, beta, scale, initial_state, cu_seqlens, state_v_first, dtype)
    walk = Lockstep.of(x.starts, x.lengths, q.device)

    # Row vectors for q, k and v, a column for the decay, so that every step is a product of matrices.
    queries = walk.split(x.q.repeat_interleave(x.group, 1).unsqueeze(-2))
    keys = walk.split(x.k.repeat_interleave(x.group, 1).unsqueeze(-2))
    values = walk.split(x.v.unsqueeze(-2))
    decays = walk.split(x.g.unsqueeze(-1))
    betas = walk.split(x.beta[..., None, None])
    outputs: list[Tensor] = []

    def step(state: Tensor, i: int) -> Tensor:
        state = decays[i].exp() * state
        u = betas[i] * (values[i] - keys[i] @ state)
        state = state + keys[i].transpose(-1, -2) * u
        outputs.append((queries[i] @ state).squeeze(-2))
        return state

    final_state = walk.scan(x.state, step)
    o = x.scale * walk.join(outputs, torch.zeros_like(x.v))
    return o.reshape(v.shape), (final_state.transpose(-1, -2) if state_v_first else final_state).contiguous()
