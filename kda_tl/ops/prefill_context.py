"""A prefill op whose sequences other processes hold parts of: what `kda_tl.ops.context` asks of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kda_tl.ops import prefill_launch
from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.checks import host_offsets
from kda_tl.ops.context import SegmentMaps, Span, Turn
from kda_tl.ops.prefill_checks import Problem, check, check_on_device
from kda_tl.ops.prefill_decision import decide
from kda_tl.ops.prefill_kernels import Maps, launch_intracard_pre_scan
from kda_tl.ops.prefill_states import load_states
from kda_tl.reference import beta_sigmoid, compose, kda_gate, l2norm
from kda_tl.runtime import dispatcher

__all__ = ["maps_by_kernels", "receive"]


def receive(op: Op, a: Arguments, turn: Turn) -> Arguments:
    """The arguments with the true initial states. Collective; all that can be refused is refused before the others are met."""
    if a.state_indices is not None:
        raise NotImplementedError("state_indices must be None with cp_context: states of a pool are not exchanged")
    problem = check(op, a)
    check_on_device(op, a, problem)
    initial, _ = load_states(problem, a)
    if initial is not None and a.state_v_first:
        initial = initial.transpose(-1, -2)
    maps = maps_by_kernels(problem, a)
    if maps is None:
        k, g, beta = _activated(problem, a)
        states = turn.initial_state(k, a.v.detach(), g, beta, initial)
    else:
        assert a.g is not None and a.beta is not None
        states = turn.initial_state(a.k.detach(), a.v.detach(), a.g.detach(), a.beta.detach(), initial, maps)
    if states is not None and a.state_v_first:
        states = states.transpose(-1, -2)
    return a._replace(initial_state=states, has_initial_state=None)


def maps_by_kernels(problem: Problem, a: Arguments) -> SegmentMaps | None:
    """The maps of whole local sequences by intracard_pre_scan; None where no kernel of that shape ships.

    Segments as the call itself is cut, composed in float64, which no TF32 setting of the process rounds. chunk_wy runs twice,
    here and in the call: its workspace is larger than what it reads.
    """
    decision = decide(problem, a)
    scan = prefill_launch.only_scan(decision)
    if scan is None or a.g is None or problem.N == 0 or problem.T == 0:
        return None
    pre_scan, split = scan.pre_scan, decision.split
    HV, K, V, device = problem.HV, problem.K, problem.V, a.q.device
    host = None if a.cu_seqlens is None else host_offsets(a.cu_seqlens, a.cu_seqlens_cpu)
    if problem.packed and host is None:
        return None

    def maps(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        found = Maps.empty(problem.N, split.segments, HV, K, V, True, device)
        workspace, offsets = prefill_launch.run_chunk_wy(decision, a)
        v_kernel = prefill_launch.readable(a.v, problem.kernel_dtype)
        with dispatcher.device_guard(device):
            kernel = dispatcher.kernel(pre_scan, problem.arch, device, decision.sizes.intracard_pre_scan)
            launch_intracard_pre_scan(kernel, v_kernel, workspace, offsets, split.segment_chunks, found, every=True)
        M = torch.eye(K, dtype=torch.float64, device=device).repeat(len(spans), HV, 1, 1)
        B = torch.zeros((len(spans), HV, K, V), dtype=torch.float64, device=device)
        sequences = None if host is None else {bounds: n for n, bounds in enumerate(itertools.pairwise(host))}
        for row, (b, first, last) in enumerate(spans):
            n = b if sequences is None else sequences[first, last]
            for s in range(len(split.of_sequence(last - first))):
                transition = found.transitions[n, s].double().transpose(-1, -2)
                M[row], B[row] = compose((transition, found.biases[n, s].double()), (M[row], B[row]))
        return M.float(), B.float()

    return maps


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
