"""kda-tl autotune on the cpu, from candidates to a table."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from kda_tl.cli.autotune import RULE_OF_OP, TUNED_KERNELS, _changed, _selected
from kda_tl.registry import Registry
from kda_tl.specs.intracard import IntracardMergeSchedule, IntracardMergeSpec
from kda_tl.specs.kernels import KernelSpec
from kda_tl.specs.schedules import schedule_classes
from kda_tl.tuning.measure import Summary, append_record
from kda_tl.tuning.problems_plan import Plan, PlannedCandidate, PlannedProblem, PlannedSpec, write_plan

Run = Callable[..., Result]
SPEC, HEIR = IntracardMergeSpec(64, 64), IntracardMergeSpec(64, 64, delta=False)


@pytest.fixture
def schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of them; builds go to the registry beside it."""
    folder = tmp_path / "schedules"
    folder.mkdir()
    monkeypatch.setenv("KDA_TL_REGISTRY", str(tmp_path / "registry"))
    for module in ("kda_tl.specs.schedules", "kda_tl.tuning.apply"):
        monkeypatch.setattr(importlib.import_module(module), "schedules_folder", lambda: folder)
    return folder


@pytest.mark.tilelang
def test_the_whole_loop(run: Run, tmp_path: Path, schedules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, checked and timed, chosen, built: nothing of it is faked but the folders, and that one spec is all there is."""
    registry = Registry(tmp_path / "registry")
    monkeypatch.setattr("kda_tl.cli.autotune._selected", lambda *_: [SPEC])
    tuned = run("autotune", "--arch", "cpu", "--jobs", 2)
    assert tuned.exit_code == 0, tuned.output
    assert "compiled" in tuned.stderr and "intracard_merge(" in tuned.stderr and "min left" in tuned.stderr
    assert "cpu: " in tuned.output and " ok" in tuned.output and f"Built into {registry.root}" in tuned.output

    folder = registry.root / "tuning" / "cpu"
    lines = (folder / "timings.jsonl").read_text()
    chosen = json.loads((schedules / "cpu.json").read_text())["schedules"][SPEC.key]["classes"]
    assert {one["source"] for one in chosen} == {"measured"}
    built = [registry.load_meta(one.path)["schedule"] for one in registry.classes("cpu", SPEC.key)]
    assert built == [one.schedule.as_dict() for one in schedule_classes(SPEC, "cpu")] and len(built) == len(chosen)

    resumed = run("autotune", "--measure", folder, "--resume")
    assert resumed.exit_code == 0 and "nothing new" in resumed.output
    assert (folder / "timings.jsonl").read_text() == lines
    reported = run("autotune", "--report", folder)
    assert reported.exit_code == 0 and reported.output.count(SPEC.key) == 2 and "x" in reported.output
    again = run("autotune", "--apply", folder)
    assert again.exit_code == 0 and "0 entries changed" in again.output and " 0 compiled, " in again.output


def plan_of(folder: Path, inherits: tuple[str, ...] = ()) -> None:
    baseline, better = IntracardMergeSchedule(), IntracardMergeSchedule(block_v=32)
    problem = {"sequences": 1, "tokens": 8192, "H": 4, "HV": 4, "segments": 32, "V": 128}
    candidates = tuple(PlannedCandidate(one.as_dict(), f"id-{one.block_v}", None, inherits) for one in (baseline, better))
    spec = PlannedSpec(SPEC.key, inherits, (PlannedProblem(4, problem, baseline.as_dict()),), candidates)
    write_plan(folder, Plan("sm_90", {}, (spec,)))
    for one, ms in ((baseline, 0.5), (better, 0.25)):
        append_record(folder / "timings.jsonl", {
            "spec": SPEC.key, "schedule": one.as_dict(), "size": 4, "problem": problem, "status": "ok", "time_ms": ms,
            "error": 1e-7, "reason": None, "device": "a GPU", "artifact": f"id-{one.block_v}", "versions": {},
            "date": "2026-01-02T03:04:05+00:00", "baseline": one == baseline,
        })  # fmt: skip


def test_the_report_shows_gains_and_floors(run: Run, tmp_path: Path) -> None:
    plan_of(tmp_path)
    line = next(line for line in run("autotune", "--report", tmp_path).output.splitlines() if SPEC.key in line)
    assert {"0.5000", "0.2500", "2.00x"} <= set(line.split()) and "intracard_merge(block_v=32)" in line
    over_floor = float(line.split("2.00x")[1].split()[0])
    moved = 4 * (31 * 4 * 2 * 64 * 64 + 32 * 4 * 64 * 64 + 4 * 64 * 64)
    flops = 4 * 31 * 2 * 64**3
    floor_ms = 1e3 * max(moved / 4.3e12, flops / (132 * 256 * 1.98e9))
    assert over_floor == pytest.approx(0.25 / floor_ms, rel=0.01)


def test_the_report_goes_by_what_apply_goes_by(run: Run, tmp_path: Path) -> None:
    """The last record, of an artifact and a size that the plan has, of a schedule that was right everywhere."""
    plan_of(tmp_path)
    path = tmp_path / "timings.jsonl"
    baseline, better = map(json.loads, path.read_text().splitlines())
    stale = [
        {**better, "time_ms": 0.01, "artifact": "id-before"}, {**better, "time_ms": 0.01, "size": 5},
        {**better, "time_ms": 0.01, "spec": "chunk_before[head_dim_k=64]"},
    ]  # fmt: skip
    lines = [*stale, {**better, "time_ms": 0.02}, baseline, better]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run("autotune", "--report", tmp_path)
    (line,) = [line for line in result.output.splitlines() if SPEC.key in line]
    assert {"0.5000", "0.2500", "2.00x"} <= set(line.split()) and "3 stale records passed over" in result.output

    append_record(path, {**better, "status": "wrong", "time_ms": None})
    (line,) = [line for line in run("autotune", "--report", tmp_path).output.splitlines() if SPEC.key in line]
    assert {"0.5000", "1.00x"} <= set(line.split()) and "intracard_merge()" in line


def test_schedules_of_another_version_are_told_of(run: Run, tmp_path: Path) -> None:
    plan_of(tmp_path)
    for name in ("plan.json", "timings.jsonl"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace('"block_v": 32', '"block_v": 32, "warps": 4'))
    result = run("autotune", "--report", tmp_path)
    assert result.exit_code == 0 and "1 timings of schedules that this version does not have, unknown field" in result.output
    assert _changed(SPEC.key, {"block_v": 32, "warps": 4}) == "intracard_merge(block_v=32, warps=4)"


def test_measuring_what_is_for_another_machine(run: Run, tmp_path: Path) -> None:
    plan_of(tmp_path)
    ended = run("autotune", "--measure", tmp_path, "--resume")
    assert ended.exit_code == 1 and "sm_90" in ended.output
    assert run("autotune", "--arch", "cpu", "--report", tmp_path).exit_code == 1


def test_problems_that_could_not_be_made_are_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of(tmp_path)
    summary = Summary("a GPU", {"ok": 2}, 3, 1.0, (f"{SPEC.key}, size 4: ended by SIGKILL while making tensors, 2 times",))
    monkeypatch.setattr("kda_tl.tuning.measure.measure", lambda *_, **options: summary)
    ended = run("autotune", "--measure", tmp_path, "--resume")
    assert ended.exit_code == 1 and f"could not be made: {summary.not_made[0]}" in ended.output
    assert f"3 candidates are not timed yet: `kda-tl autotune --measure {tmp_path} --resume`" in ended.output


def test_measuring_what_the_folder_does_not_hold_leaves_its_timings(run: Run, tmp_path: Path) -> None:
    plan_of(tmp_path)
    ended = run("autotune", "--measure", tmp_path, "--kernel", "chunk_wy")
    assert ended.exit_code == 1 and "no candidates" in ended.output and "only of intracard_merge" in ended.output
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan.json", "timings.jsonl"]


@pytest.mark.parametrize(("step", "status"), [("apply", 1), ("report", 0)])
def test_before_anything_is_measured_the_command_is_named(run: Run, tmp_path: Path, step: str, status: int) -> None:
    plan_of(tmp_path)
    (tmp_path / "timings.jsonl").unlink()
    ended = run("autotune", f"--{step}", tmp_path)
    assert ended.exit_code == status and f"kda-tl autotune --measure {tmp_path}" in ended.output


@pytest.mark.tilelang
def test_an_apply_that_was_stopped_while_it_built_goes_on(
    run: Run, tmp_path: Path, schedules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kda_tl.compiler.build import BuildResult

    asked: list[list[str]] = []

    def build(arch: str, specs: list[KernelSpec], registry: Registry, **options: object) -> list[BuildResult]:
        asked.append([spec.key for spec in specs])
        if len(asked) == 1:
            raise KeyboardInterrupt
        return [BuildResult(spec, "id", 1.0, compiled=True) for spec in specs]

    monkeypatch.setattr("kda_tl.compiler.build.build", build)
    plan_of(tmp_path / "tuning", inherits=(HEIR.key,))
    stopped = run("autotune", "--apply", tmp_path / "tuning")
    assert stopped.exit_code == 130 and "the same command does the rest" in stopped.output
    chosen = (schedules / "sm_90.json").read_bytes()
    assert b"measured" in chosen
    again = run("autotune", "--apply", tmp_path / "tuning")
    assert again.exit_code == 0 and "0 entries changed" in again.output and "2 compiled, 0 were there" in again.output
    assert asked == [[SPEC.key, HEIR.key]] * 2 and (schedules / "sm_90.json").read_bytes() == chosen


@pytest.mark.parametrize(("step", "how"), [("prepare", " "), ("measure", " with --resume "), ("apply", " ")])
def test_the_command_that_goes_on_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, how: str
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"kda_tl.cli.autotune._{step}", stop)
    plan_of(tmp_path)
    stopped = run("autotune", "--arch", "sm_90", f"--{step}", tmp_path)
    assert stopped.exit_code == 130 and f"the same command{how}does the rest" in stopped.output


def test_wrong_options(run: Run, tmp_path: Path) -> None:
    assert run("autotune").exit_code == 2
    assert run("autotune", "--arch", "cpu", "--prepare", tmp_path, "--measure", tmp_path).exit_code == 2
    assert run("autotune", "--arch", "cpu", "--kernel", "no_such").exit_code == 2
    nothing = run("autotune", "--arch", "cpu", "--prepare", tmp_path, "--kernel", "chunk_scan", "--op", "recurrent_kda")
    assert nothing.exit_code == 2 and "no kernel chunk_scan of cpu serves --op recurrent_kda" in nothing.output
    assert run("autotune", "--measure", tmp_path, "--budget", "nan").exit_code == 2
    assert not list(tmp_path.iterdir())
    missing = run("autotune", "--measure", tmp_path)
    assert missing.exit_code == 1 and "--prepare" in missing.output


def test_an_op_names_its_kernels() -> None:
    kda = _selected("sm_90", [], "chunk_kda")
    assert {spec.kernel for spec in kda} == {"chunk_wy", "chunk_scan", "intracard_pre_scan", "intracard_merge"}
    assert {spec.as_dict()["decay"] for spec in kda if spec.kernel == "chunk_wy"} == {"per_key"}
    assert all(spec.as_dict().get("delta", True) for spec in kda)
    assert {spec.kernel for spec in _selected("sm_90", [], "recurrent_gdn")} == {"recurrent_decode"}
    assert {spec.kernel for spec in _selected("sm_90", ["chunk_wy"], "chunk_gdn")} == {"chunk_wy"}
    assert all(_selected("sm_90", [kernel], None) for kernel in TUNED_KERNELS)
    assert all(_selected("sm_90", [], op) for op in RULE_OF_OP)


def test_the_measuring_half_needs_no_compiler(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom kda_tl.tuning import measure, measure_child, measure_device, problems, problems_plan\n"
        "print(json.dumps(sorted({'tilelang', 'tvm'} & {name.partition('.')[0] for name in sys.modules})))"
    )
    ran = subprocess.run([sys.executable, "-c", "import json\n" + code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == []


@pytest.mark.parametrize(
    ("step", "option", "of"),
    [
        ("apply", "--kernel=chunk_wy", "--prepare and --measure"),
        ("report", "--op=chunk_kda", "--prepare and --measure"),
        ("prepare", "--resume", "--measure"),
        ("report", "--budget=3", "--measure"),
        ("measure", "--jobs=2", "--prepare and --apply"),
    ],
)
def test_an_option_of_another_step_is_refused(run: Run, tmp_path: Path, step: str, option: str, of: str) -> None:
    result = run("autotune", "--arch", "cpu", f"--{step}", tmp_path, option)
    name = option.partition("=")[0]
    assert result.exit_code == 2 and f"{name} is an option of {of}: it changes nothing with --{step}" in result.output
