"""Both kernels with float16 operands, which are what the GPU archs use: the cpu target runs them too, rounding included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_inputs import GATES, PACK, Problem, relative_error

from kda_tl.reference import recurrent_kda
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec
from kda_tl.specs.schedules import ChunkScanSchedule, ChunkWySchedule

pytestmark = pytest.mark.tilelang

LIMIT = 2e-3  # four roundings to 11 bits
Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def run(compile_spec) -> Run:
    """run(problem, inputs): o and the final state of chunk_wy, then chunk_scan."""
    wy_spec, scan_spec = ChunkWySpec(dtype="float16"), ChunkScanSpec(dtype="float16")
    assert wy_spec.operand_dtype == scan_spec.operand_dtype == "float16"
    chunk_wy, chunk_scan = compile_spec(wy_spec, ChunkWySchedule()), compile_spec(scan_spec, ChunkScanSchedule())

    def both(problem: Problem, x: dict[str, torch.Tensor], scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        A_inv, P = problem.workspace().half(), problem.workspace().half()
        chunk_wy(x["q"], x["k"], x["g"], x["beta"], problem.cu_seqlens, A_inv, P, problem.uniform)
        o = torch.full_like(x["v"], torch.nan).contiguous()
        state = torch.full_like(x["initial_state"], torch.nan)
        chunk_scan(
            x["q"], x["k"], x["v"], x["g"], problem.cu_seqlens, A_inv, P, o, x["initial_state"], state,
            scale, problem.uniform, 1, 1,
        )  # fmt: skip
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
    o_true, state_true = recurrent_kda(**x, scale=1.0, cu_seqlens=problem.offsets)
    spans = (
        [(0, slice(a, b)) for a, b in zip(problem.offsets, problem.offsets[1:])]
        if pack
        else [(0, slice(None)), (1, slice(None))]
    )
    for n, (b, span) in enumerate(spans):
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
    o_true, state_true = recurrent_kda(**x, scale=scale)
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
