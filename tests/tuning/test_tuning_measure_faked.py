"""The measuring half with a process that is played: what it does where no candidate is to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tuning_folders import MERGE, read_records, write_merge_plan

from kda_tl.tuning import measure as measuring
from kda_tl.tuning.measure import MeasureError, Summary, measure
from kda_tl.tuning.measure_child import MAKING_TENSORS, At, Done, Found, Hello, Job, NotMade

Answers = Callable[[Job], Iterator[Any]]
KILLED = measuring._Ended("crashed", "ended by SIGKILL")


def timed(job: Job) -> Iterator[Any]:
    yield At(None, MAKING_TENSORS)
    for number, _ in job.candidates:
        yield At(number, "check")
        yield Found(number, "ok", 1.0 + number, 1e-7)
    yield Done()


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Summary]:
    """play(answers): measures a plan of two candidates on two sizes; answers[n] to the n-th job, and then `timed`."""
    write_merge_plan(tmp_path)
    monkeypatch.setattr(measuring, "_find_artifacts", lambda *_: None)

    def run(answers: list[Answers], resume: bool = False) -> Summary:
        class Child(measuring._Child):
            def start(self) -> Hello:
                return Hello("cpu", {"torch": "0"})

            def ask(self, job: Job, patience_s: float) -> Iterator[Any]:
                yield from (one for one in (answers.pop(0) if answers else timed)(job) if not isinstance(one, Done))

        monkeypatch.setattr(measuring, "_Child", Child)
        return measure(tmp_path, resume=resume)

    return run


def killed(job: Job) -> Iterator[Any]:
    yield At(None, MAKING_TENSORS)
    yield KILLED


def no_memory(job: Job) -> Iterator[Any]:
    yield At(None, MAKING_TENSORS)
    yield NotMade("OutOfMemoryError: CUDA out of memory")
    yield measuring._Ended("crashed", "ended with status 1")


def killed_in_the_second(job: Job) -> Iterator[Any]:
    (first, _), (second, _) = job.candidates
    yield At(None, MAKING_TENSORS)
    yield At(first, "check")
    yield At(second, "check")
    yield KILLED


@pytest.mark.parametrize(
    ("end", "why"), [(killed, "ended by SIGKILL while making tensors"), (no_memory, "OutOfMemoryError: CUDA out of memory")]
)
def test_candidates_that_never_ran_have_no_record(play: Callable[..., Summary], tmp_path: Path, end: Answers, why: str) -> None:
    once = play([end])
    assert (once.left, once.not_made, once.counts) == (0, (), {"ok": 4})

    twice = play([end, end])
    assert twice.left == 2 and twice.not_made == (f"{MERGE.key}, size 4: {why}, 2 times",)
    assert [record["size"] for record in read_records(tmp_path / "timings.jsonl")] == [8, 8]
    rest = play([], resume=True)
    assert rest.left == 0 and rest.counts == {"ok": 2}
    assert [record["size"] for record in read_records(tmp_path / "timings.jsonl")] == [8, 8, 4, 4]


def test_a_candidate_that_ended_the_process_leaves_the_others_two_tries(play: Callable[..., Summary], tmp_path: Path) -> None:
    summary = play([killed, killed_in_the_second, killed])
    assert summary.left == 0 and summary.counts == {"ok": 3, "crashed": 1}
    reasons = [(record["status"], record["reason"]) for record in read_records(tmp_path / "timings.jsonl")]
    assert reasons[0] == ("crashed", "ended by SIGKILL in its check") and {status for status, _ in reasons[1:]} == {"ok"}


def test_a_folder_is_measured_by_one_process_at_a_time(play: Callable[..., Summary], tmp_path: Path) -> None:
    refused: list[str] = []

    def meanwhile(job: Job) -> Iterator[Any]:
        for resume in (False, True):
            with pytest.raises(MeasureError, match="is being measured by another process") as raised:
                measure(tmp_path, resume=resume)
            refused.append(str(raised.value))
        yield from timed(job)

    assert play([timed, meanwhile]).counts == {"ok": 4} and len(refused) == 2 and str(tmp_path) in refused[0]
    assert [file.name for file in tmp_path.glob("timings*")] == ["timings.jsonl"]
    assert play([]).counts == {"ok": 4}  # it is over
