"""Which states a call starts from and where they go: a tensor of its own, or slots of a pool; and the states between chunks.

Gathered, scattered and stepped through here with torch operations, since the kernels know dense states alone. Nothing waits for
the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kda_tl.ops.arguments import Arguments
from kda_tl.ops.prefill_checks import CHUNK_SIZE, Problem

__all__ = ["States", "intermediate_states", "load_states", "silence", "store_states"]


class States(NamedTuple):
    """initial: [N, HV, K, V], or V first as the caller's, float32; None for zeros. active: [N] bool, None where all are."""

    initial: Tensor | None
    active: Tensor | None


def load_states(problem: Problem, a: Arguments) -> States:
    """A slot that is `null_index`, or not in the pool, is inactive: it reads nothing, its output is zero, nothing is stored."""
    state, active = a.initial_state, None
    if state is None:
        return States(None, None)
    if state.requires_grad:
        state = state.detach()
    if a.state_indices is not None:
        slots = state.shape[0]
        if slots == 0:
            return States(None, torch.zeros(problem.N, dtype=torch.bool, device=state.device))
        active = (a.state_indices >= 0) & (a.state_indices < slots)
        if a.null_index is not None:
            active &= a.state_indices != a.null_index
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


def intermediate_states(
    problem: Problem, a: Arguments, initial: Tensor | None, run: Callable[[Problem, Arguments, Tensor | None, Tensor], None]
) -> Tensor:
    """The state before every chunk: [B, chunks, HV, K, V] (V first as the caller's) float32.

    run(problem, a, initial, final) runs one chunk of every sequence. A pack has B = 1 and its chunks lie sequence by sequence;
    rows past the last one are zero.
    """
    N, chunks = problem.N, problem.chunks
    sizes = (problem.V, problem.K) if a.state_v_first else (problem.K, problem.V)
    device, dtype = a.q.device, torch.float32
    if N == 0 or problem.T == 0:
        return torch.zeros((problem.B, chunks, problem.HV, *sizes), dtype=dtype, device=device)
    state = torch.zeros((N, problem.HV, *sizes), dtype=dtype, device=device) if initial is None else initial
    one = dataclasses.replace(problem, B=N, T=CHUNK_SIZE, packed=False)
    if a.cu_seqlens is None:
        out = torch.empty((N, chunks, problem.HV, *sizes), dtype=dtype, device=device)
        for i in range(chunks):
            out[:, i] = state
            if i + 1 < chunks:
                tokens = slice(None), slice(i * CHUNK_SIZE, (i + 1) * CHUNK_SIZE)
                part = _of_tokens(a, tokens)
                state = _step(one, part, state, run)
        return out
    offsets = a.cu_seqlens.long()
    count = (offsets.diff() + CHUNK_SIZE - 1) // CHUNK_SIZE
    first = count.cumsum(0) - count
    out = torch.zeros((1, chunks + 1, problem.HV, *sizes), dtype=dtype, device=device)  # the last one takes what has no place
    row = torch.arange(CHUNK_SIZE, device=offsets.device)
    for i in range(-(-problem.T // CHUNK_SIZE)):
        place = torch.where(i < count, first + i, chunks)
        out[0].index_copy_(0, place, state)
        token = offsets[:-1, None] + i * CHUNK_SIZE + row
        token = torch.where(token < offsets[1:, None], token, 0)
        part = _of_tokens(a._replace(cu_seqlens=None, cu_seqlens_cpu=None), (0, token))
        state = _step(one, part, state, run)  # of no meaning past a sequence's last chunk, and not kept
    return out[:, :-1]


def _step(
    problem: Problem, a: Arguments, state: Tensor, run: Callable[[Problem, Arguments, Tensor | None, Tensor], None]
) -> Tensor:
    after = torch.empty(state.shape, dtype=torch.float32, device=state.device)
    run(problem, a, state, after)
    return after


def _of_tokens(a: Arguments, tokens: tuple[slice | int, slice | Tensor]) -> Arguments:
    q, k, v, g, beta = (None if x is None else x[tokens] for x in (a.q, a.k, a.v, a.g, a.beta))
    assert q is not None and k is not None and v is not None
    return a._replace(q=q, k=k, v=v, g=g, beta=beta)
