"""DeltaLog: a recurrent state as a dense base and a short log of the writes that the base has not seen yet.

Entry j of the log holds what token j did to the state: its key k_j, its write u_j and its own log decay g_j. With the decay
that reached entry j since, and the one that reached the base,

    w_j = exp(g_{j+1} + ... + g_n),    w_base = exp(g_1 + ... + g_n),

the logical state is S = Diag(w_base) base + sum_j (k_j w_j) u_j^T, and a query reads it without building it:

    q^T S = (q w_base)^T base + sum_j ((k_j w_j) . q) u_j^T.

`merge` folds the log into the base; merging after every token is the dense recurrence.

Entries keep their own decay g_j rather than the sum L_j since the base was written. In L - L_j a mask's -1000 would cancel and
take the small decays with it; the sum from the newest entry outward never holds a decay that w_j does not.

Source: DeltaLog, arXiv 2608.15533. Rules: KDA (per-key decay, delta correction), GDN (the same with one decay for all
keys), RWKV6 (per-key decay, raw values, read before decay and write).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._inputs import check_inputs

__all__ = ["DeltaLogState", "deltalog_kda", "deltalog_rwkv6", "replay_weights"]


def replay_weights(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """(w [..., n, K] of the entries, w_base [..., K]) from the entries' own log decays [..., n, K], oldest first."""
    newer = log_decay.flip(-2).cumsum(-2).flip(-2)  # g_j + ... + g_n
    none = torch.zeros_like(log_decay[..., :1, :])
    after = torch.cat([newer[..., 1:, :], none], -2) if log_decay.shape[-2] else log_decay
    base = newer[..., 0, :] if log_decay.shape[-2] else none.sum(-2)
    return after.exp(), base.exp()


@dataclass(frozen=True)
class DeltaLogState:
    """base [..., K, V]; keys [..., n, K], writes [..., n, V], decays [..., n, K] (natural log, <= 0), oldest entry first.

    Immutable: every method returns a new one.
    """

    base: Tensor
    keys: Tensor
    writes: Tensor
    decays: Tensor

    @staticmethod
    def of(state: Tensor) -> DeltaLogState:
        """state [..., K, V] as a base with an empty log."""
        lead, (K, V) = state.shape[:-2], state.shape[-2:]
        return DeltaLogState(state, state.new_zeros(*lead, 0, K), state.new_zeros(*lead, 0, V), state.new_zeros(*lead, 0, K))

    @property
    def cursor(self) -> int:
        """Entries in the log."""
        return self.keys.shape[-2]

    def read(self, x: Tensor, g: Tensor | None = None) -> Tensor:
        """x^T S [..., V] for x [..., K], by replay; with g [..., K], of the state that decays by it first."""
        w, w_base = replay_weights(self.decays)
        x = x if g is None else x * g.exp()
        products = ((self.keys * w) * x.unsqueeze(-2)).sum(-1, keepdim=True)
        return ((x * w_base).unsqueeze(-2) @ self.base).squeeze(-2) + (products * self.writes).sum(-2)

    def append(self, k: Tensor, u: Tensor, g: Tensor) -> DeltaLogState:
        """The state decays by g [..., K] and then takes the write k u^T: k [..., K], u [..., V]."""
        return DeltaLogState(
            self.base,
            torch.cat([self.keys, k.unsqueeze(-2)], -2),
            torch.cat([self.writes, u.unsqueeze(-2)], -2),
            torch.cat([self.decays, g.unsqueeze(-2)], -2),
        )

    def logical(self) -> Tensor:
        """The state [..., K, V] that the base and the log stand for."""
        w, w_base = replay_weights(self.decays)
        return w_base.unsqueeze(-1) * self.base + (self.keys * w).transpose(-1, -2) @ self.writes

    def merge(self) -> DeltaLogState:
        """The log folded into the base."""
        return DeltaLogState.of(self.logical())

    def truncate(self, drop: int) -> DeltaLogState:
        """Without the newest `drop` entries: the state before those tokens. Raises ValueError where there are fewer."""
        if not 0 <= drop <= self.cursor:
            raise ValueError(f"drop must be from 0 to the cursor, {self.cursor}, got {drop}")
        keep = self.cursor - drop
        return DeltaLogState(self.base, self.keys[..., :keep, :], self.writes[..., :keep, :], self.decays[..., :keep, :])


def deltalog_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    merge_every: int = 8,
    first_window: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, DeltaLogState]:
    """KDA, or GDN where g is [B, T, HV], by output-only replay. Per token, against the state before it:

        u = beta (v - k^T (decayed S)),    o = scale (q^T (decayed S) + (q . k) u),    append (k, u, g)

    Args as for `recurrent_kda`. merge_every: entries at which the log is folded into the base; first_window: of the first
    fold, merge_every if left out.

    Returns:
        o [B, T, HV, V], and base and log [B, HV, ...] after the last token; `.logical()` is the final state.

    Raises:
        TypeError, ValueError: as `recurrent_kda`; an interval below 1.
    """
    x = check_inputs(q, k, v, g, beta, None, "per_key", True, False, scale, initial_state, None, False, dtype)
    window = _check_windows(merge_every, first_window)
    B, T = q.shape[:2]
    group = x.group
    queries, keys = (y.repeat_interleave(group, 1).unflatten(0, (B, T)) for y in (x.q, x.k))
    values, decays, betas = (y.unflatten(0, (B, T)) for y in (x.v, x.g, x.beta))
    state, outputs = DeltaLogState.of(x.state), []
    for t in range(T):
        q_t, k_t, g_t = queries[:, t], keys[:, t], decays[:, t]
        u = betas[:, t].unsqueeze(-1) * (values[:, t] - state.read(k_t, g_t))
        outputs.append(x.scale * (state.read(q_t, g_t) + (q_t * k_t).sum(-1, keepdim=True) * u))
        state = state.append(k_t, u, g_t)
        if state.cursor >= window:
            state, window = state.merge(), merge_every
    return (torch.stack(outputs, 1) if outputs else values), state


def deltalog_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    bonus: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    merge_every: int = 8,
    first_window: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, DeltaLogState]:
    """RWKV6 by output-only replay: o = scale (r^T S + (r . (bonus k)) v), then append (k, v, w).

    r, k [B, T, H, K]; v [B, T, HV, V]; w [B, T, HV, K] natural-log decay; bonus [H, K]. Otherwise as `deltalog_kda`.
    """
    x = check_inputs(r, k, v, w, None, bonus, "per_key", False, True, scale, initial_state, None, False, dtype)
    window = _check_windows(merge_every, first_window)
    B, T = r.shape[:2]
    reads, keys = (y.repeat_interleave(x.group, 1).unflatten(0, (B, T)) for y in (x.q, x.k))
    values, decays = (y.unflatten(0, (B, T)) for y in (x.v, x.g))
    state, outputs = DeltaLogState.of(x.state), []
    for t in range(T):
        now = (reads[:, t] * x.bonus * keys[:, t]).sum(-1, keepdim=True)
        outputs.append(x.scale * (state.read(reads[:, t]) + now * values[:, t]))
        state = state.append(keys[:, t], values[:, t], decays[:, t])
        if state.cursor >= window:
            state, window = state.merge(), merge_every
    return (torch.stack(outputs, 1) if outputs else values), state


def _check_windows(merge_every: int, first_window: int | None) -> int:
    """The first window. Raises ValueError for an interval below 1."""
    window = merge_every if first_window is None else first_window
    for name, value in (("merge_every", merge_every), ("first_window", window)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return window
