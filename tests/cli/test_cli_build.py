from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kda_tl.compiler.build import BuildResult
from kda_tl.compiler.errors import BuildError, ToolchainError
from kda_tl.registry import DamagedArtifact, Registry
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.deltalog import DeltaLogPrepSpec
from kda_tl.specs.kernels import ChunkWySpec, KernelSpec

FIGURES = {
    "launches": [{"name": "a", "shared_memory": 2048}, {"name": "b", "shared_memory": 1024}],
    "resources": [
        {"registers": 40, "spill_stores": 8, "spill_loads": 16},
        {"registers": 255, "spill_stores": 0, "spill_loads": 0},
    ],
}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Puts a compiler that compiles nothing in place: each spec takes 1.5 s; before the first one of `arch`, or after it,
    it raises what it is given."""

    def install(before: dict[str, BaseException] | None = None, after: dict[str, BaseException] | None = None) -> Any:
        calls: list[dict[str, Any]] = []

        def build(
            arch: str,
            specs: Sequence[KernelSpec],
            registry: Registry,
            jobs: int | None = None,
            progress: Callable[[BuildResult], None] | None = None,
            isolate: bool | None = None,
        ) -> list[BuildResult]:
            assert isolate, "a program may end its process"
            calls.append({"arch": arch, "specs": list(specs), "root": registry.root, "jobs": jobs})
            if before and arch in before:
                raise before[arch]
            for number, spec in enumerate(specs):
                id = f"{spec.kernel}-{number}"
                known = (registry.root / "artifacts" / id).is_dir()
                meta = {} if arch == "cpu" else FIGURES
                registry.put("artifacts", id, {"lib.so": bytes(1536)}, meta)
                assert progress is not None
                progress(BuildResult(spec, id, 0.0 if known else 1.5, compiled=not known))
                if after and arch in after:
                    raise after[arch]
            return []

        monkeypatch.setattr("kda_tl.compiler.build.build", build)
        return calls

    return install


def test_the_table_shows_what_each_artifact_takes(run, compiler, tmp_path: Path) -> None:
    compiler()
    result = run("build", "--arch", "sm_90", "--registry", tmp_path)
    assert result.exit_code == 0
    assert str(tmp_path) in result.stdout.splitlines()[0]
    rows = [line.split() for line in result.stdout.splitlines() if line.endswith("]")]
    assert [row[-1] for row in rows] == sorted(spec.key for spec in default_specs("sm_90"))
    for row in rows:
        assert " ".join(row[:-1]) == "1.5 s 2.0 KiB 255 24 B 1.5 KiB"
    assert f"Together {1.5 * len(rows)} KiB" in result.stdout and "R580" in result.stdout

    again = run("build", "--arch", "sm_90", "--registry", tmp_path).stdout.splitlines()
    assert all("already built" in line for line in again if line.endswith("]"))


def test_the_cpu_has_no_such_figures(run, compiler, tmp_path: Path) -> None:
    compiler()
    result = run("build", "--arch", "cpu", "--registry", tmp_path)
    assert [line.split()[2:5] for line in result.stdout.splitlines() if line.endswith("]")] == [["-", "-", "-"]] * len(
        default_specs("cpu")
    )
    assert "driver" not in result.stdout


def test_progress_names_every_spec(run, compiler, tmp_path: Path) -> None:
    compiler()
    result = run("build", "--arch", "cpu", "--registry", tmp_path)
    for number, spec in enumerate(default_specs("cpu"), 1):
        assert f"cpu {number}/{len(default_specs('cpu'))}  {spec.key}  " in result.output


def test_several_archs_each_once(run, compiler, tmp_path: Path) -> None:
    calls = compiler()
    words = [word for arch in ("sm_80", "cpu", "sm_80") for word in ("--arch", arch)]
    assert run("build", *words, "--jobs", 3, "--registry", tmp_path).exit_code == 0
    assert [(call["arch"], call["jobs"]) for call in calls] == [("sm_80", 3), ("cpu", 3)]
    assert calls[0]["specs"] == default_specs("sm_80")


def test_the_default_registry(run, compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compiler()
    monkeypatch.setenv("KDA_TL_REGISTRY", str(tmp_path / "mine"))
    assert run("build", "--arch", "cpu").exit_code == 0
    assert [call["root"] for call in calls] == [tmp_path / "mine"]


@pytest.mark.parametrize(
    "error",
    [
        BuildError("nvcc failed: error: no such thing"),
        ToolchainError("building needs TileLang: pip install it"),
        DamagedArtifact("the artifact is damaged"),
        PermissionError("cannot write there"),
    ],
)
def test_an_error_is_one_paragraph_and_the_other_archs_are_built(run, compiler, tmp_path: Path, error: Exception) -> None:
    calls = compiler(before={"sm_90": error})
    result = run("build", "--arch", "sm_90", "--arch", "cpu", "--registry", tmp_path)
    assert result.exit_code == 1
    assert [call["arch"] for call in calls] == [
        "sm_90",
        "cpu",
    ] and f"cpu: {len(default_specs('cpu'))} programs" in result.output
    last = result.output.strip().splitlines()[-1]
    assert last == f"Error: sm_90: {error}" and "Traceback" not in result.output


def test_a_failed_program_has_its_line(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(arch: str, specs: Sequence[KernelSpec], registry: Registry, progress: Any, **_: Any) -> None:
        good, bad = specs
        registry.put("artifacts", "good", {"lib.so": b"x"}, FIGURES)
        progress(BuildResult(bad, "", 0.0, compiled=False, error="no luck"))
        progress(BuildResult(good, "good", 1.5, compiled=True))
        raise BuildError("no luck")

    monkeypatch.setattr("kda_tl.compiler.build.build", build)
    specs = default_specs("sm_80")[:2]
    words = [word for spec in specs for word in ("--spec", spec.key)]
    result = run("build", "--arch", "sm_80", *words, "--registry", tmp_path)
    assert result.exit_code == 1
    assert f"sm_80 1/2  {specs[1].key}  FAILED" in result.output and "1 program in" in result.output
    assert ", 1 failed" in result.output and "; 1 of 2 spill registers" in result.output and "163.0 KiB" in result.output
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("  FAILED"))
    assert row.endswith(specs[1].key) and result.output.rstrip().endswith("no luck")


def test_single_programs(run, compiler, tmp_path: Path) -> None:
    calls = compiler()
    keys = ["chunk_wy[dtype=float16]", ChunkWySpec().key, ChunkWySpec().key]
    words = [word for key in keys for word in ("--spec", key)]
    assert run("build", "--arch", "sm_80", *words, "--registry", tmp_path).exit_code == 0
    assert calls[0]["specs"] == [ChunkWySpec(dtype="float16"), ChunkWySpec()]
    result = run("build", "--arch", "sm_80", "--spec", "chunk_wy[dtype=int3]", "--registry", tmp_path)
    assert result.exit_code == 2 and "--spec" in result.output and "dtype must be one of" in result.output


def test_an_arch_that_was_never_measured_says_so(run, compiler, tmp_path: Path) -> None:
    compiler()
    assert "KDA_TL_ARCH=sm_100" in run("build", "--arch", "sm_100", "--registry", tmp_path).output
    assert "KDA_TL_ARCH" not in run("build", "--arch", "sm_89", "--registry", tmp_path).output


def test_what_finished_before_an_error_is_shown(run, compiler, tmp_path: Path) -> None:
    compiler(after={"cpu": BuildError("no")})
    result = run("build", "--arch", "cpu", "--registry", tmp_path)
    assert result.exit_code == 1 and "cpu: 1 program in" in result.output


def test_interrupted(run, compiler, tmp_path: Path) -> None:
    calls = compiler(after={"sm_80": KeyboardInterrupt()})
    result = run("build", "--arch", "sm_80", "--arch", "cpu", "--registry", tmp_path)
    assert result.exit_code == 130
    assert len(calls) == 1 and "sm_80: 1 program in" in result.output and "is kept" in result.output


@pytest.mark.parametrize("words", [(), ("--arch", "sm_91"), ("--arch", "cpu", "--jobs", "0")])
def test_wrong_use(run, compiler, words: tuple[str, ...]) -> None:
    calls = compiler()
    result = run("build", *words)
    assert result.exit_code == 2 and not calls
    if "--jobs" not in words:
        assert "sm_80" in result.output and "--arch" in result.output


@pytest.mark.tilelang
def test_what_is_built_is_listed_and_verified(run, tmp_path: Path) -> None:
    key = DeltaLogPrepSpec(dtype="float32").key  # quickly built
    result = run("build", "--arch", "cpu", "--spec", key, "--jobs", 1, "--registry", tmp_path)
    assert result.exit_code == 0, result.output
    listed = json.loads(run("list", "--registry", tmp_path, "--json").stdout)
    assert [entry["spec"] for entry in listed] == [key]
    assert all(entry["bytes"] > 0 for entry in listed)
    assert run("verify", "--arch", "cpu", "--registry", tmp_path).exit_code == 0
