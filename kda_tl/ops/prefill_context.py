"""A prefill op whose sequences other processes hold parts of: what `kda_tl.ops.context` asks of it."""

from __future__ import annotations

import torch
from torch import Tensor

from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.context import Turn
from kda_tl.ops.prefill_checks import Problem, check, check_on_device
from kda_tl.ops.prefill_states import load_states
from kda_tl.reference import beta_sigmoid, kda_gate, l2norm

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
    k, g, beta = _activated(problem, a)
    states = turn.initial_state(k, a.v.detach(), g, beta, initial)
    if states is not None and a.state_v_first:
        states = states.transpose(-1, -2)
    return a._replace(initial_state=states, has_initial_state=None)


def _activated(problem: Problem, a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """k, g [B, T, HV, K] and beta [B, T, HV] in float32, with norm, gate and sigmoid applied."""
    k, g, beta = a.k.detach().float(), a.g, a.beta
    if a.use_qk_l2norm_in_kernel:
        k = l2norm(k)
    if g is None:
        g = torch.zeros((1, 1, 1, problem.K), device=k.device)
    elif problem.rule.decay == "scalar":
        g = g.unsqueeze(-1)
    g = g.detach().float()
    if a.use_gate_in_kernel:
        bias = a.dt_bias
        if bias is not None and problem.rule.decay == "scalar":
            bias = bias.unsqueeze(-1)
        g = kda_gate(g, a.A_log, bias, a.lower_bound)
    if problem.rule.decay != "per_key":
        g = g.expand(problem.B, problem.T, problem.HV, problem.K)
    assert beta is not None
    beta = beta.detach().float()
    return k, g, beta_sigmoid(beta, a.allow_neg_eigval) if a.use_beta_sigmoid_in_kernel else beta
