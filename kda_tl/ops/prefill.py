"""What all prefill ops share: check, plan, states, launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kda_tl.ops import prefill_launch
from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.plan import Plan, counted
from kda_tl.ops.prefill_checks import Problem, check, check_on_device, check_types
from kda_tl.ops.prefill_states import intermediate_states, load_states, silence, store_states

__all__ = ["Results", "allocate", "forward", "plan", "plan_problem"]

Results = tuple[Tensor, Tensor | None, Tensor | None]


def allocate(problem: Problem, a: Arguments) -> tuple[Tensor, Tensor | None]:
    """o in the kernels' dtype, and the final state where one is returned or stored."""
    o = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=problem.kernel_dtype, device=a.v.device)
    if not a.output_final_state and a.state_indices is None:
        return o, None
    shape = (problem.V, problem.K) if a.state_v_first else (problem.K, problem.V)
    return o, torch.empty((problem.N, problem.HV, *shape), dtype=torch.float32, device=a.v.device)


def forward(op: Op, a: Arguments) -> Results:
    """o, the final state [N, ...] and the states before every chunk, each where asked for. Pools are written in place."""
    problem = check(op, a)
    check_on_device(op, a, problem)
    initial, active = load_states(problem, a)
    o, final = allocate(problem, a)
    _launch(problem, a, o, initial, final)
    states = intermediate_states(problem, a, initial, _step) if a.return_intermediate_states else None
    if active is not None:
        assert final is not None
        silence(problem, a, active, o)
        store_states(a, active, final)
    return o if o.dtype == a.v.dtype else o.to(a.v.dtype), final, states


def _launch(problem: Problem, a: Arguments, o: Tensor, initial: Tensor | None, final: Tensor | None) -> None:
    if problem.N == 0 or problem.T == 0:
        o.zero_()
        if final is not None:
            final.zero_() if initial is None else final.copy_(initial)
        return
    if a.state_v_first:
        initial = None if initial is None else initial.transpose(-1, -2)
        final = None if final is None else final.transpose(-1, -2)
    prefill_launch.launch(problem, a, o, initial, final)


def _step(problem: Problem, a: Arguments, initial: Tensor | None, final: Tensor) -> None:
    o, _ = allocate(problem, a)
    _launch(problem, a, o, initial, final)


def plan(op: Op, a: Arguments) -> Plan:
    """What a call will launch. Raises what the call would raise for its types, sizes and names."""
    check_types(op, a)
    return plan_problem(op, check(op, a))


def plan_problem(op: Op, problem: Problem) -> Plan:
    """The plan of a call of these sizes: it depends on nothing else."""
    if problem.packed:
        batch = f"{counted(problem.N, 'packed sequence')}"
    else:
        batch = f"{counted(problem.N, 'sequence')} of {counted(problem.T, 'token')}"
    sizes = {"B": problem.B, "T": problem.T, "H": problem.H, "HV": problem.HV, "K": problem.K, "V": problem.V}
    return Plan(
        op=op.name,
        problem={**sizes, "batch": batch, "dtype": str(problem.kernel_dtype).removeprefix("torch.")},
        arch=problem.arch,
        launches=prefill_launch.launches(problem),
        workspace_bytes=prefill_launch.workspace_bytes(problem),
    )
