"""chunk_scan alone on the cpu target, fed with the reference's A_inv and P."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_inputs
import pytest
import torch
from kernel_inputs import PACK, PROBLEMS, Problem, relative_error

from kda_tl.reference import chunk_kda, recurrent_kda
from kda_tl.registry import Registry
from kda_tl.runtime.loader import load
from kda_tl.specs.kernels import ChunkScanSpec
from kda_tl.specs.schedules import ChunkScanSchedule

LIMIT = 3e-6
SCALE = 0.3


@pytest.fixture(scope="module")
def chunk_scan(cpu_registry: Registry) -> Callable[..., Any]:
    key = ChunkScanSpec(dtype="float32").key
    path = cpu_registry.find("cpu", key)
    assert path is not None
    return load(cpu_registry, path, "cpu", key)


def run(chunk_scan, problem: Problem, x: dict[str, torch.Tensor], with_state: bool = True, store: bool = True):
    """o and the final state, from buffers full of NaN; what the workspace holds beside the chunks is NaN too."""
    given = {name: x[name].nan_to_num(0.0) for name in ("q", "k", "v", "g", "beta")}
    _, _, of_chunks = chunk_kda(**given, cu_seqlens=problem.offsets)
    A_inv, P = problem.workspace(), problem.workspace()
    first = problem.offsets or [0] * problem.B
    for index, (n, start) in enumerate(zip(of_chunks.sequence.tolist(), of_chunks.start.tolist())):
        slot = problem.slot(n, (start - first[n]) // kernel_inputs.C)
        A_inv[slot], P[slot] = of_chunks.A_inv[index], of_chunks.P[index]
    o = torch.full_like(x["v"], torch.nan).contiguous()
    state = torch.full_like(x["initial_state"], torch.nan)
    chunk_scan(
        x["q"], x["k"], x["v"], x["g"], problem.cu_seqlens, A_inv, P, o, x["initial_state"], state,
        SCALE, problem.uniform, int(with_state), int(store),
    )  # fmt: skip
    return o, state


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_outputs_and_states_against_the_recurrence(chunk_scan, problem: Problem) -> None:
    x = problem.inputs()
    o, state = run(chunk_scan, problem, x)
    o_true, state_true = recurrent_kda(**x, scale=SCALE, cu_seqlens=problem.offsets)
    spans = [(b, slice(None)) for b in range(problem.B)]
    if problem.offsets is not None:
        spans = [(0, slice(a, b)) for a, b in zip(problem.offsets, problem.offsets[1:])]
        assert not o[:, problem.offsets[-1] :].any()
    for n, (b, span) in enumerate(spans):
        assert relative_error(o[b, span], o_true[b, span]) < LIMIT, n
        for head in range(problem.HV):
            assert relative_error(state[n, head], state_true[n, head]) < LIMIT, (n, head)
        if problem.lengths is not None and problem.lengths[n] == 0:
            assert torch.equal(state[n], x["initial_state"][n])


@pytest.mark.parametrize("problem", [Problem(B=2, T=100, HV=2), Problem(lengths=PACK)], ids=lambda problem: problem.name)
def test_without_an_initial_state_it_is_not_read(chunk_scan, problem: Problem) -> None:
    x = problem.inputs()
    x["initial_state"].fill_(torch.nan)
    o, state = run(chunk_scan, problem, x, with_state=False)
    del x["initial_state"]
    o_true, state_true = recurrent_kda(**x, scale=SCALE, cu_seqlens=problem.offsets)
    assert relative_error(o, o_true) < LIMIT and relative_error(state, state_true) < LIMIT


@pytest.mark.parametrize("problem", [Problem(B=2, T=100), Problem(lengths=PACK)], ids=lambda problem: problem.name)
def test_a_state_that_is_not_asked_for_is_not_written(chunk_scan, problem: Problem) -> None:
    x = problem.inputs()
    o, state = run(chunk_scan, problem, x, store=False)
    o_true, _ = recurrent_kda(**x, scale=SCALE, cu_seqlens=problem.offsets)
    assert state.isnan().all()
    assert relative_error(o, o_true) < LIMIT


def test_strides_are_honoured_and_both_state_layouts_are_one_program(chunk_scan) -> None:
    problem = Problem(B=2, T=70, H=2, HV=4, gate="strong")
    x = problem.inputs()
    o, state = run(chunk_scan, problem, x)
    strided = {}
    for name, tensor in x.items():
        buffer = torch.full((*(size + 3 for size in tensor.shape[:3]), *tensor.shape[3:]), torch.nan)
        strided[name] = buffer[tuple(slice(1, 1 + size) for size in tensor.shape[:3])]
        strided[name].copy_(tensor)
    strided["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous().transpose(-1, -2)
    o_strided, state_strided = run(chunk_scan, problem, strided)
    assert state_strided.stride(-1) != 1
    assert torch.equal(o_strided, o) and torch.equal(state_strided, state)


@pytest.mark.parametrize("block_v", [32, 64])
def test_results_do_not_depend_on_the_schedule(chunk_scan, compile_spec, block_v: int) -> None:
    problem = Problem(lengths=PACK, tail=20, HV=2)
    x = problem.inputs()
    other = compile_spec(ChunkScanSpec(dtype="float32"), ChunkScanSchedule(block_v=block_v))
    assert all(torch.equal(a, b) for a, b in zip(run(other, problem, x), run(chunk_scan, problem, x)))


def test_a_long_sequence_keeps_its_decays(chunk_scan) -> None:
    """e^G_last acts on the state once per chunk: its rounding must not gather over many chunks."""
    problem = Problem(T=64 * 40, gate="weak")
    x = problem.inputs()
    x["beta"] *= 0.01
    o, state = run(chunk_scan, problem, x)
    o_true, state_true = recurrent_kda(**x, scale=SCALE)
    assert relative_error(state, state_true) < LIMIT and relative_error(o, o_true) < LIMIT


def test_nan_stays_in_its_sequence_and_head(chunk_scan) -> None:
    problem = Problem(lengths=PACK, H=2, HV=4)
    x = problem.inputs()
    o, state = run(chunk_scan, problem, x)
    start, head = sum(PACK[:5]), 2
    x["v"][0, start + 3, head] = torch.inf
    x["initial_state"][8, 0] = torch.nan
    o_bad, state_bad = run(chunk_scan, problem, x)
    clean = torch.ones(o.shape[1:3], dtype=torch.bool)
    clean[start : start + 65, head] = False
    clean[sum(PACK[:8]) :, 0] = False
    assert torch.equal(o_bad[0, clean], o[0, clean])
    assert not o_bad[0, ~clean].isfinite().all()
    kept = torch.ones(state.shape[:2], dtype=torch.bool)
    kept[5, head] = kept[8, 0] = False
    assert torch.equal(state_bad[kept], state[kept])
