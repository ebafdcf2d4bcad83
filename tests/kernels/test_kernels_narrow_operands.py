"""Both kernels with float16 operands, which are what the GPU archs use: the cpu target runs them too, rounding included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from kernel_inputs import GATES, PACK, Problem, relative_error

from kda_tl.ops.prefill_kernels import GateOptions, launch_chunk_scan, launch_chunk_wy
from kda_tl.specs.schedules import ChunkScanSchedule, ChunkWySchedule

pytestmark = pytest.mark.tilelang

LIMIT = 2e-3  # four roundings to 11 bits
Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def run(compile_spec) -> Run:
    """run(problem, inputs): o and the final state of chunk_wy, then chunk_scan."""

    def both(problem: Problem, x: dict[str, torch.Tensor], scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        wy_spec, scan_spec = (dataclasses.replace(spec, dtype="float16") for spec in (problem.wy_spec, problem.scan_spec))
        assert wy_spec.operand_dtype == scan_spec.operand_dtype == "float16"
        chunk_wy, chunk_scan = compile_spec(wy_spec, ChunkWySchedule()), compile_spec(scan_spec, ChunkScanSchedule())
        workspace, offsets = problem.workspace(torch.float16), problem.cu_seqlens
        launch_chunk_wy(chunk_wy, x["q"], x["k"], x["g"], x["beta"], GateOptions(), offsets, workspace)
        o = torch.full_like(x["v"], torch.nan).contiguous()
        state = torch.full_like(x["initial_state"], torch.nan)
        launch_chunk_scan(chunk_scan, x["v"], workspace, o, scale, offsets, x["initial_state"], state)
        return o, state

    return both


def narrow_inputs(problem: Problem, values: float = 1.0, states: float = 1.0) -> dict[str, torch.Tensor]:
    x = problem.inputs()
    x["v"] *= values
    x["initial_state"] *= states
    return {name: tensor.half() if name in ("q", "k", "v") else tensor for name, tensor in x.items()}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("pack", [False, True])
def test_against_the_recurrence(run: Run, gate: str, pack: bool) -> None:
    problem = Problem(lengths=PACK, tail=9, gate=gate) if pack else Problem(B=2, T=150, H=1, HV=2, gate=gate)
    x = narrow_inputs(problem)
    o, state = run(problem, x)
    o_true, state_true = problem.recurrence(x)
    for n, (b, span) in enumerate(problem.spans):
        assert relative_error(o[b, span], o_true[b, span]) < LIMIT
        assert relative_error(state[n], state_true[n]) < LIMIT


@pytest.mark.parametrize(
    ("values", "states"),
    [(1e-3, 1e-3), (1e4, 1e4), (1.0, 1e-6), (1.0, 1e6), (1e-3, 1e12), (1.0, 0.0), (0.0, 1e-6), (0.0, 1e-30), (0.0, 1e30)],
)
def test_any_magnitude_of_values_and_states(run: Run, values: float, states: float) -> None:
    problem = Problem(T=100, gate="weak")
    x = narrow_inputs(problem, values, states)
    scale = 1 / max(values, states)  # o is float16 here, and stays about 1
    o, state = run(problem, x, scale)
    o_true, state_true = problem.recurrence(x, scale)
    assert relative_error(state, state_true) < LIMIT
    assert relative_error(o, o_true) < LIMIT


@pytest.mark.parametrize("factor", [0.0, -1.0, 100.0])
def test_outputs_do_not_depend_on_later_values(run: Run, factor: float) -> None:
    problem = Problem(T=64)
    x = narrow_inputs(problem)
    before, _ = run(problem, x)
    x["v"][:, 40:] *= factor
    after, _ = run(problem, x)
    assert torch.equal(before[:, :40], after[:, :40]) and not torch.equal(before[:, 40:], after[:, 40:])
