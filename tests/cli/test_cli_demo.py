from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kda_tl.cli import demo
from kda_tl.registry import Registry, install_command
from kda_tl.runtime import dispatcher


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_it_compares_and_tells(run, cpu_kernels: Registry) -> None:
    result = run("demo", "--tokens", 70, "--heads", 1, "--seed", 3)
    assert result.exit_code == 0, result.output
    errors = re.findall(r"^(?:o|final state) +(\S+)  \|\|", result.stdout, re.MULTILINE)
    assert len(errors) == 2 and all(0 < float(error) < 1e-5 for error in errors)
    for words in ("chunk_kda on cpu", "seed 3", "first call", "median of", "Right", str(cpu_kernels.root)):
        assert words in result.stdout


@pytest.mark.parametrize("value", [1.01, float("nan")])
def test_a_wrong_result_is_a_failure(run, cpu_kernels: Registry, monkeypatch, value: float) -> None:
    right = demo.chunk_kda
    monkeypatch.setattr(demo, "chunk_kda", lambda **x: (right(**x)[0] * value, right(**x)[1]))
    result = run("demo", "--tokens", 5, "--heads", 1)
    assert result.exit_code == 1 and "WRONG" in result.stdout


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "registry"
    monkeypatch.setattr(dispatcher, "search_path", lambda: [root])
    monkeypatch.setattr(demo, "default_root", lambda: root)
    return root


def test_without_kernels_and_tilelang(run, nothing_built: Path, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tilelang" else find(name, *rest))
    result = run("demo", "--tokens", 5)
    assert result.exit_code == 1 and install_command("build") in result.output and not nothing_built.exists()


@pytest.mark.tilelang
def test_what_is_missing_is_built_first(run, nothing_built: Path, cpu_registry: Registry, monkeypatch) -> None:
    commands = []

    def build(command: list[str], **options: object) -> SimpleNamespace:
        commands.append(command)
        nothing_built.symlink_to(cpu_registry.root)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", build)
    result = run("demo", "--tokens", 5, "--heads", 1)
    assert result.exit_code == 0, result.output
    ((_, _, module, *words),) = commands
    assert module == "kda_tl.cli.main" and words[:5] == ["build", "--arch", "cpu", "--registry", str(nothing_built)]
    assert words.count("--spec") == 2 and "Not built yet for cpu: chunk_wy and chunk_scan" in result.stderr


@pytest.mark.tilelang
def test_a_build_that_fails(run, nothing_built: Path, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **options: SimpleNamespace(returncode=1))
    result = run("demo", "--tokens", 5)
    assert result.exit_code == 1 and "kda-tl doctor" in result.output


@pytest.mark.parametrize("words", [("--device", "cuda"), ("--arch", "sm_80"), ("--tokens", "0"), ("--device", "tpu")])
def test_wrong_use(run, words: tuple[str, ...]) -> None:
    assert run("demo", *words).exit_code == 2
