"""chunk_scan alone on the cpu target, fed with a workspace that the reference filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_inputs import PACK, PROBLEMS, RULE_PROBLEMS, C, K, Problem, V, relative_error, true_workspace
from torch import Tensor

from kda_tl.ops.prefill_kernels import Pool, Segments, Workspace, launch_chunk_scan
from kda_tl.reference import recurrent_rule
from kda_tl.specs.kernels import ChunkScanSpec
from kda_tl.specs.rules import RULES
from kda_tl.specs.schedules import ChunkScanSchedule

LIMIT = 3e-6
SCALE = 0.3

Run = Callable[..., tuple[Tensor, Tensor]]


def filled(problem: Problem, x: dict[str, Tensor]) -> Workspace:
    """What the workspace holds beside the chunks is NaN."""
    workspace = problem.workspace()
    truth, chunks = true_workspace(problem, x)
    slots = [chunk.slot for chunk in chunks]
    for name, tensor in truth.items():
        getattr(workspace, name)[slots] = tensor.float()
    return workspace


@pytest.fixture(scope="module")
def run(kernel_of: Callable[..., Any]) -> Run:
    """run(problem, inputs): o and the final state, from buffers full of NaN."""

    def launch(
        problem: Problem,
        x: dict[str, Tensor],
        schedule: ChunkScanSchedule | None = None,
        with_state: bool = True,
        store: bool = True,
        workspace: Workspace | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        o, state = torch.full_like(x["v"], torch.nan).contiguous(), torch.full_like(x["initial_state"], torch.nan)
        launch_chunk_scan(
            kernel_of(problem.scan_spec, schedule), x["v"], workspace or filled(problem, x), o, SCALE, problem.cu_seqlens,
            x["initial_state"] if with_state else None, state if store else None, **options,
        )  # fmt: skip
        return o, state

    return launch


def check(problem: Problem, x: dict[str, Tensor], o: Tensor, state: Tensor) -> None:
    o_true, state_true = problem.recurrence(x, SCALE)
    if problem.offsets is not None:
        assert not o[:, problem.offsets[-1] :].any()
    for n, (b, span) in enumerate(problem.spans):
        assert relative_error(o[b, span], o_true[b, span]) < LIMIT, n
        for head in range(problem.HV):
            assert relative_error(state[n, head], state_true[n, head]) < LIMIT, (n, head)
        if span.start == span.stop:
            assert torch.equal(state[n], x["initial_state"][n])


@pytest.mark.parametrize("problem", PROBLEMS + RULE_PROBLEMS, ids=lambda problem: problem.name)
def test_outputs_and_states_against_the_recurrence(run: Run, problem: Problem) -> None:
    x = problem.inputs()
    check(problem, x, *run(problem, x))


@pytest.mark.parametrize("problem", [Problem(B=2, T=100, HV=2), Problem(lengths=PACK)], ids=lambda problem: problem.name)
def test_without_an_initial_state_it_is_not_read(run: Run, problem: Problem) -> None:
    x = problem.inputs()
    o, state = run(problem, x, with_state=False)
    x["initial_state"].zero_()
    check(problem, x, o, state)


@pytest.mark.parametrize("problem", [Problem(B=2, T=100), Problem(lengths=PACK)], ids=lambda problem: problem.name)
def test_a_state_that_is_not_asked_for_is_not_written(run: Run, problem: Problem) -> None:
    x = problem.inputs()
    o, state = run(problem, x, store=False)
    assert state.isnan().all() and torch.equal(o, run(problem, x)[0])


def test_strides_are_honoured_and_both_state_layouts_are_one_program(run: Run) -> None:
    problem = Problem(B=2, T=70, H=2, HV=4, gate="strong")
    x = problem.inputs()
    o, state = run(problem, x)
    buffer = torch.full((*(size + 3 for size in x["v"].shape[:3]), V), torch.nan)
    strided = {**x, "v": buffer[tuple(slice(1, 1 + size) for size in x["v"].shape[:3])].copy_(x["v"])}
    strided["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous().transpose(-1, -2)
    o_strided, state_strided = run(problem, strided, workspace=filled(problem, x))
    assert state_strided.stride(-1) != 1
    assert torch.equal(o_strided, o) and torch.equal(state_strided, state)


def test_results_do_not_depend_on_the_schedule(run: Run) -> None:
    problem = Problem(lengths=PACK, tail=20, HV=2)
    x = problem.inputs()
    other = run(problem, x, schedule=ChunkScanSchedule(block_v=32))
    assert all(torch.equal(a, b) for a, b in zip(other, run(problem, x)))


def test_a_long_sequence_keeps_its_decays(run: Run) -> None:
    """e^G_last acts on the state once per chunk: its rounding must not gather over many chunks."""
    problem = Problem(T=64 * 40, gate="weak")
    x = problem.inputs()
    x["beta"] *= 0.01
    check(problem, x, *run(problem, x))


def test_nan_stays_in_its_sequence_and_head(run: Run) -> None:
    problem = Problem(lengths=PACK, H=2, HV=4)
    x = problem.inputs()
    workspace = filled(problem, x)
    o, state = run(problem, x, workspace=workspace)
    start, head = sum(PACK[:5]), 2
    x["v"][0, start + 3, head] = torch.inf
    x["initial_state"][8, 0] = torch.nan
    o_bad, state_bad = run(problem, x, workspace=workspace)
    clean = torch.ones(o.shape[1:3], dtype=torch.bool)
    clean[start : start + 65, head] = False
    clean[sum(PACK[:8]) :, 0] = False
    assert torch.equal(o_bad[0, clean], o[0, clean])
    assert not o_bad[0, ~clean].isfinite().all()
    kept = torch.ones(state.shape[:2], dtype=torch.bool)
    kept[5, head] = kept[8, 0] = False
    assert torch.equal(state_bad[kept], state[kept])


# -- states before chunks, and segments ----------------------------------------------------------------------------------

CUT = [
    Problem(B=2, T=300, HV=2),
    Problem(lengths=(300, 0, 64, 65, 1, 130), tail=9, H=1, HV=2, gate="strong"),
    Problem(lengths=(200, 3), rule=RULES["rwkv6"]),
]


def before_every_chunk(problem: Problem) -> Tensor:
    return torch.full((problem.slots, problem.HV, K, V), torch.nan)


@pytest.mark.parametrize("problem", CUT, ids=lambda problem: problem.name)
def test_the_state_before_every_chunk(run: Run, problem: Problem) -> None:
    x = problem.inputs()
    workspace, states = filled(problem, x), before_every_chunk(problem)
    found = run(problem, x, workspace=workspace, states=states)
    assert all(torch.equal(a, b) for a, b in zip(found, run(problem, x, workspace=workspace)))
    _, chunks = true_workspace(problem, x)
    for chunk in chunks:
        assert relative_error(states[chunk.slot], chunk.state) < LIMIT
    untouched = sorted(set(range(problem.slots)) - {chunk.slot for chunk in chunks})
    assert states[untouched].isnan().all()


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("problem", CUT, ids=lambda problem: problem.name)
def test_segments(run: Run, problem: Problem, count: int) -> None:
    """Started from the states that the whole run passed through, segments are that run, bit for bit."""
    x = problem.inputs()
    workspace, states = filled(problem, x), before_every_chunk(problem)
    whole = run(problem, x, workspace=workspace, states=states)
    _, chunks = true_workspace(problem, x)
    per_segment = -(-max(span.stop - span.start for _, span in problem.spans) // C // count) + (count == 2)
    of_run = torch.full((problem.num_seqs, count, problem.HV, K, V), torch.nan)
    of_run[:, 0] = x["initial_state"]
    of_truth = of_run.clone()
    unread = {**x, "initial_state": torch.full_like(x["initial_state"], torch.nan)}
    cuts = 0
    for chunk in chunks:
        number, rest = divmod(chunk.slot - problem.slot(chunk.sequence, 0), per_segment)
        if number and not rest:
            of_run[chunk.sequence, number], of_truth[chunk.sequence, number] = states[chunk.slot], chunk.state.float()
            cuts += 1
    assert cuts >= problem.B
    found = run(problem, unread, workspace=workspace, segments=Segments(count, per_segment, of_run))
    assert all(torch.equal(a, b) for a, b in zip(found, whole))
    check(problem, x, *run(problem, unread, workspace=workspace, segments=Segments(count, per_segment, of_truth)))


# -- pools ---------------------------------------------------------------------------------------------------------------

POOLED = [Problem(B=5, T=70, HV=2), Problem(lengths=(70, 0, 1, 130, 64), tail=5, H=1, HV=2)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("null_index", [-1, 0])
@pytest.mark.parametrize("problem", POOLED, ids=lambda problem: problem.name)
def test_a_pool_in_place(run: Run, kernel_of, problem: Problem, null_index: int, masked: bool) -> None:
    """Sequences without a slot get zeros, and no slot but those that are named changes."""
    x = problem.inputs()
    slots, stride = 7, 3
    storage = torch.randn(slots, stride, problem.HV, V, K)
    before = storage.clone()
    pool = storage[:, 1].transpose(-1, -2)
    nulls = {1: null_index, 3: (slots if null_index else 2**31 - 1)}
    indices = [5, 0, 2, 0, 6]
    indices = [nulls.get(n, slot) for n, slot in enumerate(indices)]
    mask = torch.tensor([1, 1, 0, 1, 1], dtype=torch.uint8) if masked else None
    x["initial_state"] = torch.zeros_like(x["initial_state"])
    for n, slot in enumerate(indices):
        if n not in nulls and not (masked and n == 2):
            x["initial_state"][n] = pool[slot]
    o = torch.full_like(x["v"], torch.nan)
    launch_chunk_scan(
        kernel_of(problem.scan_spec), x["v"], filled(problem, x), o, SCALE, problem.cu_seqlens, pool, pool,
        pool=Pool(torch.tensor(indices, dtype=torch.int32), null_index, mask),
    )  # fmt: skip
    o_true, state_true = problem.recurrence(x, SCALE)
    for n, (b, span) in enumerate(problem.spans):
        if n in nulls:
            assert not o[b, span].any()
            continue
        assert relative_error(o[b, span], o_true[b, span]) < LIMIT
        assert relative_error(pool[indices[n]], state_true[n]) < LIMIT
    if problem.offsets is not None:
        assert not o[:, problem.offsets[-1] :].any()
    kept = [slot for slot in range(slots) if slot not in {indices[n] for n in range(5) if n not in nulls}]
    assert torch.equal(storage[kept], before[kept]) and torch.equal(storage[:, ::2], before[:, ::2])


def test_every_index_below_zero_and_beyond_the_pool(run: Run) -> None:
    problem = Problem(B=6, T=3)
    x = problem.inputs()
    indices = torch.tensor([-1, -7, -(2**31), 6, 2**31 - 1, 4], dtype=torch.int32)
    o, state = run(problem, x, pool=Pool(indices, null_index=4))
    assert not o.any() and state.isnan().all()


def test_states_in_float16(kernel_of) -> None:
    """Read as they are, rounded once."""
    problem = Problem(B=2, T=100, HV=2)
    x = problem.inputs()
    initial = x["initial_state"].half()
    final = torch.full_like(initial, torch.nan)
    o = torch.full_like(x["v"], torch.nan)
    spec = ChunkScanSpec(dtype="float32", state_dtype="float16")
    launch_chunk_scan(
        kernel_of(spec, ChunkScanSchedule()), x["v"], filled(problem, x), o, SCALE, None, initial, final,
        state_dtype=torch.float16,
    )  # fmt: skip
    o_true, state_true = recurrent_rule(**{**x, "initial_state": initial.float()}, scale=SCALE, **problem.rule.as_dict())
    assert relative_error(o, o_true) < LIMIT
    assert relative_error(final, state_true) < 2.0**-11
