"""Which states a call starts from and where they go: a tensor of its own, or slots of a pool; and the states between chunks.

Where no kernel ships for a pool, its slots are gathered and scattered here with torch operations. Nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kda_tl.ops.arguments import Arguments
from kda_tl.ops.prefill_checks import CHUNK_SIZE, Problem

__all__ = ["States", "active_sequences", "intermediate_states", "load_states", "silence", "store_states"]


class States(NamedTuple):
    """initial: [N, HV, K, V], or V first as the caller's, float32; None for zeros. active: [N] bool, None where all are."""

    initial: Tensor | None
    active: Tensor | None


def active_sequences(a: Arguments) -> Tensor | None:
    """[N] bool: which sequences have a slot of the caller's pool; None where states are in none."""
    if a.initial_state is None or a.state_indices is None:
        return None
    active = (a.state_indices >= 0) & (a.state_indices < a.initial_state.shape[0])
    if a.null_index is not None:
        active &= a.state_indices != a.null_index
    return active


def load_states(problem: Problem, a: Arguments) -> States:
    """A slot that is `null_index`, or not in the pool, is inactive: it reads nothing, its output is zero, nothing is stored."""
    state, active = a.initial_state, active_sequences(a)
    if state is None:
        return States(None, None)
    if a.state_indices is not None and active is not None:
        if state.shape[0] == 0:
            return States(None, active)
        state = state.index_select(0, a.state_indices.long().masked_fill(~active, 0))
    if state.dtype != torch.float32 or state.is_neg():
        state = state.to(torch.float32).resolve_neg()
    used = active if a.has_initial_state is None else a.has_initial_state if active is None else active & a.has_initial_state
    return States(state if used is None else state.masked_fill(~used[:, None, None, None], 0.0), active)


def store_states(a: Arguments, active: Tensor, final_state: Tensor) -> None:
    """Into the caller's pool, in place. Rows that are inactive repeat the store of one that is, or of what slot 0 holds."""
    pool, indices = a.initial_state, a.state_indices
    assert pool is not None and indices is not None
    if pool.shape[0] == 0 or indices.numel() == 0:
        return
    pool = pool.detach()
    chosen = active.long().argmax()
    row = torch.where(active, torch.arange(active.numel(), device=active.device), chosen)
    any_active = active.any()
    target = indices.long().index_select(0, row).masked_fill(~any_active, 0)
    values = final_state.index_select(0, row).to(pool.dtype)
    pool.index_copy_(0, target, torch.where(any_active, values, pool[:1]))


def silence(problem: Problem, a: Arguments, active: Tensor, o: Tensor) -> None:
    """Zero the outputs of inactive sequences."""
    if a.cu_seqlens is None:
        o.masked_fill_(~active[:, None, None, None], 0.0)
        return
    token = torch.arange(problem.T, device=o.device)
    sequence = torch.searchsorted(a.cu_seqlens.long()[1:].contiguous(), token, right=True)
    silent = torch.cat([~active, active.new_zeros(1)]).index_select(0, sequence)
    o.masked_fill_(silent[None, :, None, None], 0.0)


def intermediate_states(problem: Problem, a: Arguments, states: Tensor, active: Tensor | None) -> Tensor:
    """The state before every chunk: [B, chunks, HV, K, V] (V first as the caller's) float32, from chunk_scan's [slots, ...].

    A pack has B = 1 and its chunks lie sequence by sequence; rows past the last one are zero, and so are those of sequences
    without a slot in the pool, for which kernels that work in the pool write none. active: `active_sequences`.
    """
    if problem.packed:
        states = _sequence_by_sequence(problem, a, states, active)
    found = states.view(problem.B, problem.chunks, *states.shape[1:])
    if active is not None and not problem.packed:
        found.masked_fill_(~active[:, None, None, None, None], 0.0)
    return found.transpose(-1, -2).contiguous() if a.state_v_first else found


def _sequence_by_sequence(problem: Problem, a: Arguments, states: Tensor, active: Tensor | None) -> Tensor:
    assert a.cu_seqlens is not None
    if problem.N == 0 or problem.T == 0:
        return states.zero_()
    offsets = a.cu_seqlens.long()
    ends = ((offsets.diff() + CHUNK_SIZE - 1) // CHUNK_SIZE).cumsum(0)
    row = torch.arange(problem.chunks, device=states.device)
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=problem.N - 1)
    chunk = row - torch.where(sequence > 0, ends[sequence - 1], 0)
    slot = (offsets[sequence] // CHUNK_SIZE + sequence + chunk).clamp(max=problem.slots - 1)
    unused = row >= ends[-1]
    if active is not None:
        unused |= ~active[sequence]
    return states.index_select(0, slot).masked_fill_(unused[:, None, None, None], 0.0)
