"""What all prefill ops share: check, plan, states, launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kda_tl.ops import prefill_launch
from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.checks import mark_written
from kda_tl.ops.plan import Plan, counted
from kda_tl.ops.prefill_checks import Problem, check, check_on_device, check_options, check_types
from kda_tl.ops.prefill_decision import Decision, decide
from kda_tl.ops.prefill_states import active_sequences, intermediate_states, load_states, silence, store_states
from kda_tl.ops.repeated import Candidate

__all__ = ["Results", "allocate", "carry_out", "decided", "plan", "plan_problem"]

Results = tuple[Tensor, Tensor | None, Tensor | None]


def allocate(problem: Problem, a: Arguments, pooled: bool) -> tuple[Tensor, Tensor | None]:
    """o in the kernels' dtype, and the final state where one is returned or stored. pooled: it goes straight to the pool."""
    o = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=problem.kernel_dtype, device=a.v.device)
    if pooled or not (a.output_final_state or a.state_indices is not None):
        return o, None
    shape = (problem.V, problem.K) if a.state_v_first else (problem.K, problem.V)
    return o, torch.empty((problem.N, problem.HV, *shape), dtype=torch.float32, device=a.v.device)


def decided(op: Op, a: Arguments) -> Decision:
    """The checked call, and what it will do."""
    problem = check(op, a)
    check_on_device(op, a, problem)
    return decide(problem, a)


def carry_out(d: Decision, a: Arguments, watch: Candidate | None = None) -> Results:
    """o, the final state [N, ...] and the states before every chunk, each where asked for. Pools are written in place."""
    problem = d.problem
    o, final = allocate(problem, a, d.pooled)
    states = _workspace_of_states(problem, a) if a.return_intermediate_states else None
    if d.pooled:
        pool = a.initial_state
        assert pool is not None
        _launch(d, a, o, pool, pool, states, watch)
        mark_written(pool)
        active = None if states is None else active_sequences(a)
    else:
        initial, active = load_states(problem, a)
        _launch(d, a, o, initial, final, states, watch)
        if active is not None:
            assert final is not None
            silence(problem, a, active, o)
            store_states(a, active, final)
    rows = None if states is None else intermediate_states(problem, a, states, active)
    if watch is not None and (d.pooled or a.state_indices is None):
        watch.whole(o, final, a.initial_state if d.pooled else None)
    return o if o.dtype == a.v.dtype else o.to(a.v.dtype), final, rows


def _launch(
    d: Decision, a: Arguments, o: Tensor, initial: Tensor | None, final: Tensor | None, states: Tensor | None,
    watch: Candidate | None,
) -> None:  # fmt: skip
    if d.problem.N == 0 or d.problem.T == 0:
        o.zero_()
        if final is not None:
            final.zero_() if initial is None else final.copy_(initial)
        return
    if a.state_v_first:
        pooled = final is initial  # and then stays one tensor
        initial = None if initial is None else initial.transpose(-1, -2)
        final = initial if pooled else None if final is None else final.transpose(-1, -2)
    prefill_launch.launch(d, a, o, initial, final, states, watch)


def _workspace_of_states(problem: Problem, a: Arguments) -> Tensor:
    return torch.empty((problem.slots, problem.HV, problem.K, problem.V), dtype=torch.float32, device=a.v.device)


def plan(op: Op, a: Arguments) -> Plan:
    """What a call will launch. Raises what the call would raise for its types, sizes and names."""
    check_options(op, a)
    check_types(op, a)
    return plan_problem(op, check(op, a), a)


def plan_problem(op: Op, problem: Problem, a: Arguments | None = None) -> Plan:
    """The plan of a call of these sizes, with the dtypes of `a` or float32 gates and states: it depends on nothing else."""
    if problem.packed:
        batch = f"{counted(problem.N, 'packed sequence')}"
    else:
        batch = f"{counted(problem.N, 'sequence')} of {counted(problem.T, 'token')}"
    decision = decide(problem, a)
    sizes = {"B": problem.B, "T": problem.T, "H": problem.H, "HV": problem.HV, "K": problem.K, "V": problem.V}
    return Plan(
        op=op.name,
        problem={**sizes, "batch": batch, "dtype": str(problem.kernel_dtype).removeprefix("torch.")},
        arch=problem.arch,
        launches=prefill_launch.launches(problem, decision),
        workspace_bytes=prefill_launch.workspace_bytes(decision),
        split=decision.split,
    )
