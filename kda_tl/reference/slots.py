"""States in a slot-indexed pool: what serving reads before a call and writes after it.

The pool [slots, HV, K, V] (or [slots, HV, V, K] with `state_v_first`) may have any strides and any floating-point dtype. A slot
equal to `null_index`, or outside the pool, is padding: it reads as zero and nothing is written for it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def read_slots(pool: Tensor, state_indices: Tensor, has_initial_state: Tensor | None = None, null_index: int = -1) -> Tensor:
    """The state of every sequence, [N, ...] in the pool's layout and dtype.

    state_indices [N] int32 or int64; has_initial_state [N] bool: a sequence without starts from zero, whatever its slot
    holds, NaN included. Differentiable in the pool.
    """
    live = _live(pool, state_indices, null_index)
    if has_initial_state is not None:
        if has_initial_state.shape != state_indices.shape or has_initial_state.dtype != torch.bool:
            raise ValueError(
                f"has_initial_state must be bool [N] = {tuple(state_indices.shape)}, got {has_initial_state.dtype} "
                f"{tuple(has_initial_state.shape)}"
            )
        live = live & has_initial_state
    states = pool.new_zeros(len(live), *pool.shape[1:])
    return states.index_put((live.nonzero().squeeze(-1),), pool[state_indices[live].long()])


def write_slots(pool: Tensor, state_indices: Tensor, states: Tensor, null_index: int = -1) -> None:
    """Put states [N, ...] into the pool, in place, rounded to its dtype. No other slot is touched.

    Raises ValueError where two sequences name one slot: which of them stays would be chance.
    """
    live = _live(pool, state_indices, null_index)
    slots = state_indices[live].long()
    if states.shape != (len(live), *pool.shape[1:]):
        raise ValueError(f"states must be {(len(live), *pool.shape[1:])}, got {tuple(states.shape)}")
    if len(slots.unique()) != len(slots):
        raise ValueError(f"state_indices must not name a slot twice, got {state_indices.tolist()}")
    pool[slots] = states[live].to(pool.dtype)


def _live(pool: Tensor, state_indices: Tensor, null_index: int) -> Tensor:
    if state_indices.dim() != 1 or state_indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"state_indices must be a one-dimensional int32 or int64 tensor, got {state_indices.dtype} "
            f"of shape {tuple(state_indices.shape)}"
        )
    return (state_indices >= 0) & (state_indices < pool.shape[0]) & (state_indices != null_index)
