"""The measuring half on the cpu: real artifacts, and candidates that crash, hang or compute something else."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tuning_folders import MERGE, AddCandidate, read_records, statuses, with_candidates

from kda_tl.specs.intracard import IntracardMergeSchedule
from kda_tl.tuning.measure import MeasureError, append_record, measure
from kda_tl.tuning.problems_plan import PlanError, read_plan, write_plan

pytestmark = pytest.mark.tilelang

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    "spec", "schedule", "size", "problem", "status", "time_ms", "error", "reason", "device", "versions", "date", "baseline",
    "artifact",
}  # fmt: skip


def test_every_candidate_is_timed_on_every_problem(folder: Path) -> None:
    told: list[tuple[str, int, int]] = []
    summary = measure(folder, progress=lambda record, done, total: told.append((record["status"], done, total)))
    plan, records = read_plan(folder), read_records(folder / "timings.jsonl")
    spec = plan.specs[0]
    assert spec.spec == MERGE.key and summary.left == 0 and summary.device == "cpu"
    legal = [one for one in spec.candidates if one.artifact is not None]
    assert len(legal) > 2 and len(records) == len(legal) * len(spec.problems) == len(told)
    assert [done for _, done, _ in told] == list(range(1, len(records) + 1)) and {total for *_, total in told} == {len(records)}
    for record in records:
        assert set(record) >= FIELDS and record["spec"] == MERGE.key and record["device"] == "cpu"
        assert record["status"] in ("ok", "stopped") and record["time_ms"] > 0 and record["error"] < 1e-5
        assert {"kda_tl", "torch", "tilelang"} <= set(record["versions"])
    for problem in spec.problems:
        here = [record for record in records if record["size"] == problem.size]
        assert [record["schedule"] for record in here if record["baseline"]] == [dict(problem.baseline)]
        assert any(record["status"] == "ok" for record in here)


def test_a_bad_candidate_costs_its_own_turn_alone(folder: Path, add_candidate: AddCandidate) -> None:
    add_candidate(IntracardMergeSchedule(256, 16), "*(volatile int*)8 = 1;")
    add_candidate(IntracardMergeSchedule(256, 32), "for (volatile int i = 0;;) { i = i; }")
    add_candidate(IntracardMergeSchedule(256, 64), "return 0;")
    add_candidate(IntracardMergeSchedule(512, 32), "return 7;")
    plan = read_plan(folder)
    first = dataclasses.replace(plan.specs[0], problems=plan.specs[0].problems[:1])
    write_plan(folder, dataclasses.replace(plan, specs=(first,)))
    summary = measure(folder, patience_s=5.0)
    records = read_records(folder / "timings.jsonl")
    found = statuses(records)
    sizes = {problem.size for problem in first.problems}
    expected = {"fake-256-16": "crashed", "fake-256-32": "timeout", "fake-256-64": "wrong", "fake-512-32": "crashed"}
    for size in sizes:
        for artifact, status in expected.items():
            assert found.pop((artifact, size)) == status
    assert found and set(found.values()) <= {"ok", "stopped"}
    assert summary.left == 0 and summary.counts["crashed"] == 2 * len(sizes)
    reasons = {record["artifact"]: record["reason"] for record in records}
    assert "SIGSEGV" in reasons["fake-256-16"] and "no answer for 5 s" in reasons["fake-256-32"]
    assert "against the reference" in reasons["fake-256-64"] and "returned 7" in reasons["fake-512-32"]
    assert all(record["time_ms"] is None for record in records if record["status"] not in ("ok", "stopped"))


def test_a_candidate_that_is_right_on_the_small_problem_alone_is_wrong(folder: Path, add_candidate: AddCandidate) -> None:
    add_candidate(IntracardMergeSchedule(256, 64), "static int calls = 0; if (++calls > 1) return 0;")
    measure(folder)
    reasons = [r["reason"] for r in read_records(folder / "timings.jsonl") if r["artifact"] == "fake-256-64"]
    assert "full-size" in reasons[0]


def test_what_is_finished_is_not_timed_again(folder: Path) -> None:
    measure(folder)
    before = (folder / "timings.jsonl").read_bytes()
    summary = measure(folder, resume=True)
    assert summary.counts == {} and (folder / "timings.jsonl").read_bytes() == before

    lines = before.splitlines(keepends=True)
    (folder / "timings.jsonl").write_bytes(b"".join(lines[:-2]) + lines[-1][: len(lines[-1]) // 2])
    summary = measure(folder, resume=True)
    assert sum(summary.counts.values()) == 2
    assert len(statuses(read_records(folder / "timings.jsonl"))) == len(lines)


def test_without_resume_old_timings_are_kept_aside(folder: Path) -> None:
    append_record(folder / "timings.jsonl", {"device": "cpu", "status": "ok"})
    measure(folder, budget_s=0.0)
    assert json.loads((folder / "timings-1.jsonl").read_text()) == {"device": "cpu", "status": "ok"}


def test_the_budget_leaves_the_rest(folder: Path) -> None:
    summary = measure(folder, budget_s=0.0)
    legal = sum(one.artifact is not None for one in read_plan(folder).specs[0].candidates)
    assert summary.left == legal * len(read_plan(folder).specs[0].problems)
    assert measure(folder, resume=True, only={"chunk_wy[..]"}).counts == {}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_goes_on(folder: Path, add_candidate: AddCandidate, end: signal.Signals) -> None:
    """While a candidate hangs: what was told before is on disk, no process stays behind, and nothing runs twice."""
    add_candidate(IntracardMergeSchedule(256, 32), "for (volatile int i = 0;;) { i = i; }")
    add_candidate(IntracardMergeSchedule(256, 16), "*(volatile int*)8 = 1;")
    plan = read_plan(folder)
    # The crash comes first, so that a record is there when the hang begins.
    candidates = sorted(plan.specs[0].candidates, key=lambda one: one.artifact != "fake-256-16")
    write_plan(folder, with_candidates(plan, tuple(candidates)))
    code = (
        "import signal\nfrom pathlib import Path\nfrom kda_tl.tuning.measure import measure\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # tests in the background have it ignored
        f"measure(Path({str(folder)!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not read_records(folder / "timings.jsonl") and time.monotonic() < deadline:
        time.sleep(0.1)
    before = read_records(folder / "timings.jsonl")
    assert before
    time.sleep(1.0)
    process.send_signal(end)
    process.wait(60)
    deadline = time.monotonic() + 30
    while (left := children_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    measure(folder, resume=True, patience_s=5.0)
    records = read_records(folder / "timings.jsonl")
    assert records[: len(before)] == before
    assert {status for (artifact, _), status in statuses(records).items() if artifact == "fake-256-32"} == {"timeout"}


def children_of(folder: Path) -> list[str]:
    """Processes that have one of the folder's libraries open."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(folder) in maps.read_text():
                found.append(maps.parent.name)
        except OSError:
            continue
    return [pid for pid in found if pid != str(os.getpid())]


def test_a_folder_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--prepare"):
        measure(tmp_path)
    (tmp_path / "plan.json").write_text('{"format": 99}')
    with pytest.raises(PlanError, match="no plan of format 1"):
        measure(tmp_path)


def test_an_arch_that_is_not_here(folder: Path) -> None:
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"arch": "cpu"', '"arch": "sm_89"'))
    with pytest.raises(MeasureError, match="sm_89"):
        measure(folder)


def remove(artifact: Path) -> None:
    shutil.rmtree(artifact)


def remove_files(artifact: Path) -> None:
    for file in artifact.iterdir():
        file.unlink()


def cut_off(artifact: Path) -> None:
    os.truncate(artifact / "lib.so", 100)


@pytest.mark.parametrize("harm", [remove, remove_files, cut_off])
def test_an_artifact_that_is_not_there_as_it_was_built_is_no_crash(folder: Path, harm: Callable[[Path], None]) -> None:
    lost = str(next(one.artifact for one in read_plan(folder).specs[0].candidates if one.artifact is not None))
    shutil.copytree(folder / "artifacts" / lost, folder / "aside")
    harm(folder / "artifacts" / lost)
    words = rf"lacks 1 of the \d+ artifacts to be timed, {lost} for one .*: copy all .*--prepare \S+ --kernel intracard_merge"
    for _ in range(2):  # a damaged one is in quarantine the second time
        with pytest.raises(MeasureError, match=words):
            measure(folder)
    assert not (folder / "timings.jsonl").exists()
    assert measure(folder, only={"chunk_wy[..]"}).counts == {}  # nobody asks for it
    shutil.copytree(folder / "aside", folder / "artifacts" / lost)
    assert measure(folder, budget_s=0.0).left > 0


def test_a_folder_without_what_its_artifacts_load_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_tl.tuning.measure.why_not", lambda arch: None)
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"arch": "cpu"', '"arch": "sm_90"'))
    with pytest.raises(MeasureError, match="lacks the support libraries"):
        measure(folder)


def test_what_cannot_be_loaded_is_no_crash(folder: Path) -> None:
    """Artifacts of another kernel, as if another version had built them: whole, and refused by the loader."""
    plan = read_plan(folder)
    key = dataclasses.replace(MERGE, delta=False).key
    write_plan(folder, dataclasses.replace(plan, specs=(dataclasses.replace(plan.specs[0], spec=key),)))
    with pytest.raises(MeasureError, match=r"cannot be loaded here: .* is not format 1 of"):
        measure(folder)
    assert read_records(folder / "timings.jsonl") == []
