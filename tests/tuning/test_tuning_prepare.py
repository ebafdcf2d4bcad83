"""The preparing half: who is timed for whom, and what a plan says of candidates that come to nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kda_tl.registry import Registry
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.decode import RecurrentDecodeSchedule, RecurrentDecodeSpec
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.intracard import IntracardMergeSpec
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec
from kda_tl.specs.schedules import Schedule, schedule_for
from kda_tl.tuning.problems import problems
from kda_tl.tuning.problems_plan import Plan, PlanError, PlannedCandidate, PlannedSpec, read_plan, write_plan

pytestmark = pytest.mark.tilelang
DECODE = RecurrentDecodeSpec()


@pytest.mark.parametrize("arch", ARCHS)
def test_every_spec_is_timed_has_a_sibling_that_is_or_a_reason(arch: str) -> None:
    from kda_tl.tuning.prepare import representative

    shipped = default_specs(arch)
    timed = {by for spec in shipped if not isinstance(by := representative(spec, arch), str)}
    assert timed and timed <= set(shipped)
    for spec in timed:
        assert representative(spec, arch) == spec and problems(spec, arch), spec.key
    for spec in shipped:
        by = representative(spec, arch)
        assert by in timed or (isinstance(by, str) and by)
        assert isinstance(by, str) or by.kernel == spec.kernel
    assert len(timed) <= 10, "ten minutes of a device are for all of them"


def test_siblings() -> None:
    from kda_tl.tuning.prepare import representative

    kda = ChunkWySpec(gate_dtype="bfloat16")
    assert representative(ChunkWySpec(dtype="float16", gate_dtype="float32"), "sm_90") == kda
    assert representative(ChunkWySpec(64, decay="per_key", delta=False, read_first=True), "sm_90") == kda
    assert representative(ChunkWySpec(decay="none"), "sm_90") == ChunkWySpec(gate_dtype="bfloat16", decay="scalar")
    assert representative(ChunkScanSpec(state_dtype="bfloat16", delta=False), "sm_90") == ChunkScanSpec()
    assert representative(ChunkScanSpec(64, 128), "sm_90") == ChunkScanSpec(64, 64)
    assert representative(RecurrentDecodeSpec(64, state_dtype="float16"), "sm_90") == RecurrentDecodeSpec(
        state_dtype="bfloat16"
    )
    assert "float32" in str(representative(ChunkWySpec(dtype="float32"), "sm_90"))
    assert representative(ChunkWySpec(dtype="float32", decay="none"), "cpu") == ChunkWySpec(dtype="float32", decay="scalar")


def artifact_of(schedule: Schedule) -> str:
    return "id-" + "-".join(str(value) for value in schedule.as_dict().values())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[Schedule]:
    """Stands for the compiler: lanes_k=16 does not compile, values=8 spills 400 bytes and one in force 600, others a few.

    No schedules file: what is in force is the default, whatever was measured since.
    """
    folder = tmp_path_factory.mktemp("schedules")
    monkeypatch.setattr("kda_tl.specs.schedules.schedules_folder", lambda: folder)
    from kda_tl.compiler.build import BuildResult
    from kda_tl.compiler.errors import BuildError
    from kda_tl.compiler.workers import Outcome

    seen: list[Schedule] = []

    def compile_each(arch: str, tasks: Sequence[tuple[KernelSpec, Schedule]], *_: object) -> Iterator[Outcome[Any, Any]]:
        for spec, schedule in tasks:
            seen.append(schedule)
            assert isinstance(schedule, RecurrentDecodeSchedule)
            if schedule.lanes_k == 16:
                yield Outcome((spec, schedule), None, BuildError("nvcc failed\nand more"))
            else:
                yield Outcome((spec, schedule), BuildResult(spec, artifact_of(schedule), 1.0, compiled=True), None)

    def load_meta(self: Registry, path: Path) -> dict[str, Any]:
        schedule = next(one for one in seen if artifact_of(one) == path.name)
        spilled = 200 if schedule.as_dict()["values"] == 8 else 300 if schedule == schedule_for(DECODE, "sm_90") else 4
        return {"schedule": schedule.as_dict(), "resources": [{"spill_stores": spilled, "spill_loads": spilled}]}

    monkeypatch.setattr("kda_tl.tuning.prepare.compile_each", compile_each)
    monkeypatch.setattr("kda_tl.tuning.prepare.compiler_versions", lambda arch: {"tilelang": "0"})
    monkeypatch.setattr(Registry, "load_meta", load_meta)
    return seen


def test_a_plan_says_what_became_of_every_candidate(compiled: list[Schedule], tmp_path: Path) -> None:
    from kda_tl.tuning.prepare import prepare

    told: list[str] = []
    plan = prepare("sm_90", tmp_path, [DECODE], progress=lambda spec, schedule, what, done, total: told.append(what))
    assert plan == read_plan(tmp_path) and [one.spec for one in plan.specs] == [DECODE.key]
    (spec,) = plan.specs
    assert RecurrentDecodeSpec(64).key in spec.inherits and RecurrentDecodeSpec(state_dtype="float16").key not in spec.inherits
    in_force = schedule_for(DECODE, "sm_90").as_dict()
    assert [dict(problem.baseline) for problem in spec.problems] == [in_force] * len(problems(DECODE, "sm_90"))
    assert len(told) == len(compiled) and {"compiled", "does not compile: nvcc failed"} <= set(told)
    for one in spec.candidates:
        if one.schedule == in_force:
            assert one.artifact is not None, "what is in force is timed whatever it spills"
        elif one.schedule in [schedule.as_dict() for schedule in compiled]:
            reason = {16: "does not compile: nvcc failed"}.get(one.schedule["lanes_k"])
            reason = reason or ("registers: spills 400 bytes" if one.schedule["values"] == 8 else None)
            assert (one.reason, one.artifact is None) == (reason, reason is not None)
        else:
            assert one.artifact is None and one.reason
        assert one.artifact is not None or one.serves == ()


def test_a_plan_keeps_its_other_specs(compiled: list[Schedule], tmp_path: Path) -> None:
    from kda_tl.tuning.prepare import prepare

    other = PlannedSpec(IntracardMergeSpec().key, (), (), ())
    write_plan(tmp_path, Plan("sm_90", {}, (other, PlannedSpec(DECODE.key, (), (), ()))))
    (tmp_path / "artifacts" / "nobody's").mkdir(parents=True)
    plan = prepare("sm_90", tmp_path, [DECODE])
    assert {one.spec for one in plan.specs} == {DECODE.key, other.spec}
    assert next(one for one in plan.specs if one.spec == DECODE.key).candidates
    assert not (tmp_path / "artifacts" / "nobody's").exists(), "the folder travels: it holds what is timed, and no more"
    with pytest.raises(PlanError, match="name another folder for sm_80"):
        prepare("sm_80", tmp_path, [DECODE])


def test_specs_of_another_version_are_dropped(compiled: list[Schedule], tmp_path: Path) -> None:
    from kda_tl.tuning.prepare import prepare

    merge, gone = IntracardMergeSpec(), IntracardMergeSpec().key.replace("chunk_size", "chunk")
    candidate = PlannedCandidate({}, "id", None, (gone, merge.key))
    kept = PlannedSpec(merge.key, (gone,), (), (candidate,))
    write_plan(tmp_path, Plan("sm_90", {}, (kept, PlannedSpec(gone, (), (), ()))))
    with pytest.raises(PlanError, match=r"no spec of this version .* prepare again with .*--arch sm_90 --prepare"):
        read_plan(tmp_path)
    assert {one.spec for one in prepare("sm_90", tmp_path, [DECODE]).specs} == {DECODE.key, merge.key}
    after = next(one for one in read_plan(tmp_path).specs if one.spec == merge.key)
    assert after == replace(kept, inherits=(), candidates=(replace(candidate, serves=(merge.key,)),))


def test_what_a_folder_holds_beside_candidates_is_not_removed(
    compiled: list[Schedule], cpu_registry: Registry, tmp_path: Path
) -> None:
    from kda_tl.tuning.prepare import prepare

    shutil.copytree(cpu_registry.root, tmp_path / "registry")
    with pytest.raises(PlanError, match=r"registry is a registry of built kernels: name a folder of its own"):
        prepare("sm_90", tmp_path / "registry", [DECODE])
    assert Registry(tmp_path / "registry").entries("cpu") and not (tmp_path / "registry" / "plan.json").exists()

    folder = tmp_path / "candidates"
    (folder / "artifacts" / "one").mkdir(parents=True)
    (folder / "plan.json").write_text('{"format": 99}')
    with pytest.raises(PlanError, match=r"its format is 99\): remove it and make one .*, or name another folder"):
        prepare("sm_90", folder, [DECODE])
    assert (folder / "artifacts" / "one").exists() and not compiled
