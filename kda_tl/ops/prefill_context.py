"""A prefill op whose sequences other processes hold parts of: what `kda_tl.ops.context` asks of it."""

from __future__ import annotations

from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.context import Turn
from kda_tl.ops.prefill_checks import check, check_on_device
from kda_tl.ops.prefill_launch import activated
from kda_tl.ops.prefill_states import load_states

__all__ = ["receive"]


def receive(op: Op, a: Arguments, turn: Turn) -> Arguments:
    """The arguments with the true initial states. Collective; all that can be refused is refused before the others are met."""
    if a.state_indices is not None:
        raise NotImplementedError("state_indices must be None with cp_context: states of a pool are not exchanged")
    problem = check(op, a)
    check_on_device(op, a, problem)
    initial, _ = load_states(problem, a)
    if initial is not None and a.state_v_first:
        initial = initial.transpose(-1, -2)
    _, k, g, beta = activated(problem, a)
    states = turn.initial_state(k, a.v.detach(), g, beta, initial)
    if states is not None and a.state_v_first:
        states = states.transpose(-1, -2)
    return a._replace(initial_state=states, has_initial_state=None)
