"""Context parallelism over gloo: what five processes got, against the float64 recurrence of the whole sequences."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chunk_kda_cases import relative_error
from context_cases import CASES, TOKENS, WORLD, Case, chunk_gdn, chunk_kda, work

from kda_tl.distributed import ContextParallel, Layout
from kda_tl.reference import recurrent_kda

LIMIT = 1e-5
Seen = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, cpu_kernels: object) -> Iterator[Seen]:
    """Per rank: case -> what its op returned or raised."""
    folder = tmp_path_factory.mktemp("context")
    start = multiprocessing.get_context("forkserver")  # the five share one import of torch
    start.set_forkserver_preload(["torch", "torch.distributed", "context_cases"])
    processes = [start.Process(target=work, args=(rank, str(folder)), daemon=True) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * WORLD, f"exit codes {codes}; None is a process that hangs"
    yield [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def states_at_cuts(case: Case, x: dict[str, torch.Tensor]) -> dict[tuple[int, int], torch.Tensor]:
    """(sequence, end of a piece) -> the state there, one process having walked all that precedes."""
    cuts = sorted({(p.sequence, p.end) for pieces in case.layout.pieces for p in pieces})
    bounds = case.cu_seqlens
    rows = [(0, bounds[n], bounds[n] + end) if bounds else (n, 0, end) for n, end in cuts]
    runs = {name: torch.cat([x[name][b : b + 1, first:last] for b, first, last in rows], 1) for name in TOKENS if rows}
    if not rows:
        return {}
    offsets = [0, *itertools.accumulate(last - first for _, first, last in rows)]
    initial = torch.stack([x["initial_state"][n] for n, _ in cuts]) if "initial_state" in x else None
    return dict(zip(cuts, recurrent_kda(**runs, initial_state=initial, cu_seqlens=offsets)[1]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_gets_what_one_process_would(case: Case, seen: Seen) -> None:
    x = case.inputs()
    o, _ = recurrent_kda(**x, cu_seqlens=case.cu_seqlens)
    states = states_at_cuts(case, x)
    for rank, pieces in enumerate(case.layout.pieces):
        got = seen[rank][case.name]
        assert "error" not in got, f"rank {rank}: {got}"
        at = 0
        assert len(got["state"]) == len(pieces)
        for n, piece in enumerate(pieces):
            where = f"rank {rank}, {piece}"
            if case.cu_seqlens:
                first = case.cu_seqlens[piece.sequence] + piece.start
                mine, truth = got["o"][0, at : at + piece.length], o[0, first : first + piece.length]
            else:
                mine, truth = got["o"][n], o[piece.sequence, piece.start : piece.end]
            assert relative_error(mine, truth) < LIMIT, f"o of {where}"
            at += piece.length
            state = got["state"][n].mT if case.options.get("state_v_first") else got["state"][n]
            assert relative_error(state, states[piece.sequence, piece.end]) < LIMIT, f"state of {where}"
        if case.layout.is_packed:
            assert not got["o"][:, at:].any(), f"rank {rank} past its pack"


FAILURES = {
    "bad shape": (1, "ValueError", "v must have shape"),
    "too few tokens": (2, "ValueError", "T of at least 86"),
    "kernel": (1, "RuntimeError", "the kernel did not launch"),
    "missing argument": (0, "TypeError", "'beta'"),
    "unknown argument": (2, "TypeError", "'gamma'"),
    "wrong maps": (1, "ValueError", "transition must have shape [S, HV, K, K]"),
    "gradient": (0, "NotImplementedError", "k requires a gradient"),
    "global offsets": (1, "ValueError", "cu_seqlens must be left out, or be the local offsets"),
    "hasty": (1, "RuntimeError", "hasty_op returned before"),
    "field": (1, "ValueError", "pre_num_ranks and post_num_ranks must be numbers"),
    "memory": (2, "RuntimeError", "memory"),
    "long text": (0, "ValueError", "\u2713\u2713\u2713"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_that_fails_is_named_to_the_others(name: str, seen: Seen) -> None:
    where, error, text = FAILURES[name]
    for rank in range(3):
        failures = seen[rank + 2]["failures"]
        got = failures[name]
        assert text in got["text"], f"rank {rank}: {got}"
        if rank == where:
            assert got["error"] == error
        else:
            assert got["error"] == "ContextParallelError" and got["ranks"] == (where,)
            assert f"rank {where} of the context (global rank {where + 2}) failed: {error}" in got["text"]
        assert "error" not in failures[f"{name}, then"], "the group must stay usable"


@pytest.mark.parametrize(
    ("name", "where", "text"),
    [
        ("head count", 1, "same (HV, K, V), got [2, 16, 24] on rank 0"),
        ("other op", 2, "same op, got plain_op on rank 0"),
        ("layout", 1, "same layout of tokens"),
    ],
)
def test_ranks_that_disagree_all_say_so(name: str, where: int, text: str, seen: Seen) -> None:
    for rank in range(2, 5):
        got = seen[rank]["failures"][name]
        assert got["error"] == "ContextParallelError" and got["ranks"] == (0, where) and text in got["text"], got
        assert "error" not in seen[rank]["failures"][f"{name}, then"]


def test_several_failures_are_all_named(seen: Seen) -> None:
    got = [seen[rank]["failures"]["two ranks"] for rank in range(2, 5)]
    assert got[0]["error"] == "ContextParallelError" and got[0]["ranks"] == (1, 2)
    assert got[1]["error"] == got[2]["error"] == "ValueError"


def test_what_is_no_context(seen: Seen) -> None:
    for rank in range(2, 5):
        got = seen[rank]["failures"]["nothing of the kind"]
        assert got["error"] == "TypeError" and "cp_context must be" in got["text"] and "got str" in got["text"]
    assert [seen[rank]["not a member"].get("error") for rank in range(WORLD)] == [None, *["ValueError"] * 4]


def test_from_local_with_bad_arguments(seen: Seen) -> None:
    got = [seen[rank]["failures"]["from_local"] for rank in range(2, 5)]
    assert got[2]["error"] == "ValueError" and "cu_seqlens must not decrease" in got[2]["text"]
    assert all(g["error"] == "ContextParallelError" and g["ranks"] == (2,) for g in got[:2])
    for rank in range(2, 5):
        text = seen[rank]["failures"]["from_local, whole"]["text"]
        assert "tokens 6 to 6 of sequence 0 are on no rank" in text


def test_even_cuts_of_the_default_group(seen: Seen) -> None:
    text = seen[4]["default"]["text"]
    assert "context of 5 ranks: 1 packed sequences, 12 tokens; this is rank 4" in text
    assert "rank 2         3 tokens  -> seq 0 [4:7] ->" in text
    assert "-> seq 0 [8:11]   -> seq 1 [8:11]" in text and "2 maps (M, B) per rank" in text


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ContextParallel(Layout.dense(1, [0, 1]))


def test_the_kernels_run_here() -> None:
    assert {case.ranks for case in CASES if case.op is chunk_kda} == {2, 3, 5}
    assert {case.ranks for case in CASES if case.op is chunk_gdn} == {3}
    assert {case.ranks for case in CASES} == {1, 2, 3, 5}
