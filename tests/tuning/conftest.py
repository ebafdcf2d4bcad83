"""A folder of candidates for the cpu, prepared once, and candidates that misbehave."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tuning_folders import MERGE, AddCandidate, with_candidates

from kda_tl.registry import Registry
from kda_tl.specs.intracard import IntracardMergeSchedule
from kda_tl.tuning.problems_plan import PlannedCandidate, read_plan, write_plan


@pytest.fixture(scope="session")
def prepared(shared_folder: Path, missing: Callable[[str], str | None]) -> Path:
    """One spec for the cpu: copy it, do not write into it."""
    from kda_tl.registry.locks import exclusive
    from kda_tl.tuning.prepare import prepare

    if reason := missing("tilelang"):
        pytest.skip(reason)
    folder = shared_folder / "tuning-cpu"
    with exclusive(shared_folder / "tuning-cpu.lock"):
        if not (folder / "plan.json").exists():
            prepare("cpu", folder, [MERGE], jobs=2)
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "tuning"))


@pytest.fixture
def add_candidate(folder: Path) -> AddCandidate:
    """add_candidate(schedule, statement): a candidate whose kernel begins with a C statement; it goes last."""
    from tilelang.env import TILELANG_TEMPLATE_PATH

    from kda_tl.compiler.toolchain import cxx_compiler

    def add(schedule: IntracardMergeSchedule, statement: str) -> None:
        registry, plan = Registry(folder), read_plan(folder)
        model = registry.root / "artifacts" / str(plan.specs[0].candidates[0].artifact)
        meta = {k: v for k, v in registry.load_meta(model).items() if k not in ("id", "files", "digest")}
        source = re.sub(r"(?m)^(int32_t \w+\([^)]*\) \{)", rf"\1 {statement}", (model / "kernel.c").read_text())
        assert statement in source
        (folder / "fake.cc").write_text(source)
        command = [cxx_compiler(), "-O1", "-std=c++17", "-w", "-shared", "-fPIC", f"-I{TILELANG_TEMPLATE_PATH}"]
        subprocess.run([*command, "-o", "fake.so", "fake.cc"], cwd=folder, check=True)
        id = f"fake-{schedule.threads}-{schedule.block_v}"
        registry.put("artifacts", id, {"lib.so": folder / "fake.so"}, meta)
        candidate = PlannedCandidate(schedule.as_dict(), id)
        write_plan(folder, with_candidates(plan, (*plan.specs[0].candidates, candidate)))

    return add
