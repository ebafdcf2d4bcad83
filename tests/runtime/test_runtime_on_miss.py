"""KDA_TL_ON_MISS=build: what is built, when it may not be, and that cold processes agree."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cold_workers import call, call_cold, in_threads

import kda_tl
from kda_tl.registry import Registry
from kda_tl.runtime import build_on_miss, dispatcher
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SPEC = ChunkWySpec(dtype="float32")

# Stands in for `kda-tl build`: notes its words, then does what STUB_BUILDER says. Imports nothing heavy.
STUB = """
import os, shutil, sys
what, source = os.environ["STUB_BUILDER"].split(":", 1)
with open(os.environ["STUB_LOG"], "a") as log:
    log.write(" ".join(sys.argv[1:]) + f" on_miss={os.environ.get('KDA_TL_ON_MISS')}\\n")
if what == "fail":
    sys.exit("Error: nvcc says no")
if what == "copy":  # as a build does, what the manifest names before the manifest: others look meanwhile
    target = sys.argv[sys.argv.index("--registry") + 1]
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("manifest"), dirs_exist_ok=True)
    shutil.copytree(os.path.join(source, "manifest"), os.path.join(target, "manifest"), dirs_exist_ok=True)
"""


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], list[str]]]:
    """builder("copy", registry): a build takes what that registry has. Returns a function that gives the builds so far."""

    def install(what: str, source: Registry | None = None) -> Callable[[], list[str]]:
        folder, log = tmp_path / "stub", tmp_path / "stub.log"
        folder.mkdir()
        (folder / "stub_builder.py").write_text(STUB)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        monkeypatch.setenv("STUB_BUILDER", f"{what}:{source.root if source else ''}")
        monkeypatch.setenv("STUB_LOG", str(log))
        monkeypatch.setenv("KDA_TL_ON_MISS", "build")
        monkeypatch.setattr(build_on_miss, "MODULE", "stub_builder")
        return lambda: log.read_text().splitlines() if log.exists() else []

    return install


def test_a_miss_is_built_and_said(fresh, registry_root: Path, cpu_registry: Registry, builder, caplog) -> None:
    builds = builder("copy", cpu_registry)
    caplog.set_level(logging.INFO, "kda_tl")
    assert call(seed=3) < 1e-5
    (words,) = builds()  # the stub brought both kernels at once
    assert words == f"build --arch cpu --spec {SPEC.key} --registry {registry_root} --jobs 1 on_miss=None"
    assert kda_tl.counters() == kda_tl.Counters(hits=0, loads=2, misses=1, builds=1, fallbacks=0)
    lines = [record.getMessage() for record in caplog.records]
    assert "KDA_TL_ON_MISS=build: compiling" in lines[0] and SPEC.key in lines[0] and str(registry_root) in lines[0]
    assert "is ready after" in lines[1]
    assert caplog.records[0].levelno == logging.WARNING  # so that it shows where nobody configured logging


@pytest.mark.parametrize("value", [None, "", "error"])
def test_the_default_is_an_error(fresh, registry_root: Path, cpu_registry: Registry, builder, monkeypatch, value) -> None:
    builds = builder("copy", cpu_registry)
    monkeypatch.delenv("KDA_TL_ON_MISS") if value is None else monkeypatch.setenv("KDA_TL_ON_MISS", value)
    with pytest.raises(kda_tl.ArtifactMissing, match=r"`kda-tl build --arch cpu`.*KDA_TL_ON_MISS=build"):
        call(seed=0)
    assert not builds() and not registry_root.exists()


def test_an_unknown_value_is_refused_even_where_nothing_is_missing(fresh, cpu_kernels: Registry, monkeypatch) -> None:
    monkeypatch.setenv("KDA_TL_ON_MISS", "compile")
    with pytest.raises(ValueError, match="KDA_TL_ON_MISS must be error or build, got 'compile'"):
        dispatcher.kernel(SPEC, "cpu", CPU)


def test_never_while_a_graph_is_captured(fresh, registry_root: Path, cpu_registry: Registry, builder, monkeypatch) -> None:
    builds = builder("copy", cpu_registry)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(kda_tl.BuildOnMissFailed, match=r"while a CUDA graph is captured: call kda_tl\.warmup.*kda-tl build"):
        dispatcher.kernel(SPEC, "cpu", CPU)
    assert not builds()


def test_what_the_build_says_is_passed_on(fresh, registry_root: Path, builder) -> None:
    builder("fail")
    with pytest.raises(
        kda_tl.BuildOnMissFailed, match=r"`kda-tl build --arch cpu --spec .* failed with exit code 1: .*nvcc says no"
    ):
        dispatcher.kernel(SPEC, "cpu", CPU)
    assert kda_tl.counters().loads == 0


def test_a_build_that_brings_nothing(fresh, registry_root: Path, builder) -> None:
    builder("nothing")
    with pytest.raises(kda_tl.ArtifactMissing, match=r"was built, but is in none of .*kda-tl doctor"):
        dispatcher.kernel(SPEC, "cpu", CPU)


@pytest.mark.parametrize("file", ["lib.so", "meta.json"])
def test_a_damaged_artifact_is_quarantined_and_built_again(
    fresh, registry_root: Path, cpu_registry: Registry, builder, caplog, file: str
) -> None:
    builds = builder("copy", cpu_registry)
    registry = Registry(shutil.copytree(cpu_registry.root, registry_root))
    damaged = registry.find("cpu", SPEC.key) / file
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"??")
    assert call(seed=5) < 1e-5
    assert len(builds()) == 1 and len(list((registry_root / "quarantine").iterdir())) == 1
    assert (
        "is damaged" in caplog.records[0].getMessage() and str(registry_root / "quarantine") in caplog.records[0].getMessage()
    )


def test_threads_that_miss_build_once(fresh, registry_root: Path, cpu_registry: Registry, builder) -> None:
    builds = builder("copy", cpu_registry)
    kernels = in_threads(6, lambda number: dispatcher.kernel(ChunkWySpec(dtype="float32"), "cpu", CPU))
    assert all(kernel is kernels[0] for kernel in kernels) and len(builds()) == 1


def test_cold_processes_share_one_registry(tmp_path: Path, cpu_registry: Registry, builder) -> None:
    """Eight at once, none of which finds anything: one builds, all are right, and the state's alignment does not matter."""
    builds = builder("copy", cpu_registry)
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "STUB_BUILDER", "STUB_LOG", "KDA_TL_ON_MISS")}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kda_tl", "cold_workers"])  # imports torch once, loads no kernel
    tasks = [(environment, str(tmp_path / "shared"), "stub_builder", number) for number in range(8)]
    with context.Pool(8, maxtasksperchild=1) as pool:
        outcomes = pool.starmap(call_cold, tasks, chunksize=1)
    assert max(error for error, _, _ in outcomes) < 1e-5
    assert not any(compiler for _, _, compiler in outcomes)
    assert len(builds()) == 1 and sum(figures["builds"] for _, figures, _ in outcomes) == 1
    assert all(figures["loads"] == 2 for _, figures, _ in outcomes)


@pytest.mark.tilelang
def test_it_compiles_for_real(fresh, registry_root: Path, monkeypatch) -> None:
    monkeypatch.setenv("KDA_TL_ON_MISS", "build")
    spec = ChunkScanSpec(dtype="float32")
    dispatcher.kernel(spec, "cpu", CPU)
    assert [entry.spec_key for entry in Registry(registry_root).entries()] == [spec.key]
    assert kda_tl.counters().builds == 1


@pytest.mark.tilelang
def test_never_with_another_tilelang(fresh, registry_root: Path, tmp_path: Path, monkeypatch) -> None:
    info = tmp_path / "older" / "tilelang-0.1.14.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tilelang\nVersion: 0.1.14\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(info.parent), str(ROOT)]))
    monkeypatch.setenv("KDA_TL_ON_MISS", "build")
    with pytest.raises(kda_tl.BuildOnMissFailed, match=r"needs tilelang 0\.1\.15, found 0\.1\.14"):
        dispatcher.kernel(SPEC, "cpu", CPU)
    assert not list(registry_root.glob("artifacts/*"))


def test_the_command_for_a_spec_outside_the_default_set() -> None:
    assert build_on_miss.build_command(SPEC, "cpu") == "kda-tl build --arch cpu"
    other = ChunkWySpec(dtype="float16")
    assert build_on_miss.build_command(other, "cpu") == f"kda-tl build --arch cpu --spec '{other.key}'"


def test_the_child_finds_the_package_of_a_checkout() -> None:
    environment = build_on_miss.child_environment()
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert sys.executable and "KDA_TL_ON_MISS" not in environment
