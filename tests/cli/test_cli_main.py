from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch

from kda_tl import __version__
from kda_tl.cli.main import cli
from kda_tl.registry import Registry
from kda_tl.specs.kernels import ChunkWySpec

ROOT = Path(__file__).resolve().parents[2]


def test_version(run) -> None:
    result = run("--version")
    assert result.exit_code == 0 and __version__ in result.output


@pytest.mark.parametrize("command", ["", *sorted(cli.commands)])
def test_every_help_shows_examples_that_name_real_options(run, command: str) -> None:
    result = run(*filter(None, [command]), "-h")
    assert result.exit_code == 0
    examples = [line.split() for line in result.output.splitlines() if line.startswith("    kda-tl ")]
    assert examples
    for words in examples:
        named: click.Command = cli.commands[words[1]]
        if isinstance(named, click.Group):
            named = named.commands[words[2]]
        options = {name for parameter in named.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, " ".join(words)


@pytest.mark.parametrize(
    ("words", "at"),
    [
        (("autotune", "--report", "."), "kda_tl.cli.autotune._refuse_idle_options"),
        (("autotune", "--report", "."), "kda_tl.cli.shared.NamedPath.convert"),
        (("list",), "kda_tl.cli.list.registries"),
        (("bundle", "import", "x.tar"), "kda_tl.cli.shared.NamedPath.convert"),
    ],
)
def test_ctrl_c_is_130_wherever_it_comes(run, monkeypatch, words: tuple[str, ...], at: str) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(at, interrupted)
    result = run(*words)
    assert result.exit_code == 130 and result.output.strip() == "Stopped."


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in cli.commands.items():
        if isinstance(command, click.Group):
            yield from (((name, inner), one) for inner, one in command.commands.items())
        else:
            yield (name,), command


PATHS = [(words, one) for words, command in commands() for one in command.params if isinstance(one.type, click.Path)]


@pytest.mark.parametrize(("words", "one"), PATHS, ids=[" ".join((*words, str(one.name))) for words, one in PATHS])
def test_an_empty_path_is_not_the_current_folder(run, tmp_path: Path, monkeypatch, words, one: click.Parameter) -> None:
    monkeypatch.chdir(tmp_path)
    given = [""] if isinstance(one, click.Argument) else [one.opts[0], ""]
    needed = ["--arch", "cpu"] if words == ("build",) else ["x.tar"] if words[0] == "bundle" and one.name != "file" else []
    (tmp_path / "x.tar").touch()
    result = run(*words, *needed, *given)
    assert result.exit_code == 2 and "it is empty" in result.output
    assert list(tmp_path.iterdir()) == [tmp_path / "x.tar"]


@pytest.mark.parametrize("words", [("list",), ("list", "--json"), ("verify",), ("gc",), ("bundle", "export", "x.tar")])
def test_a_folder_that_cannot_be_looked_at_is_named(run, tmp_path: Path, words: tuple[str, ...]) -> None:
    folder = tmp_path / ("x" * 300)
    result = run(*words, "--registry", folder)
    assert result.exit_code == 1 and "File name too long" in result.output and str(folder) in result.output


@pytest.mark.parametrize("words", [("list",), ("doctor",), ("explain", "chunk_kda", "--tokens=9", "--heads=1")])
def test_artifacts_that_may_not_be_looked_at_are_named(run, roots, fill, monkeypatch, words: tuple[str, ...]) -> None:
    registry = fill(roots[0])
    registry.publish("cpu", {ChunkWySpec(dtype="float32").key: {"kernel": "chunk_wy", "id": "cpu-one"}})
    for function in ("stat", "is_dir"):
        allowed = getattr(Path, function)

        def refuse(path: Path, *args: object, allowed=allowed, **options: object) -> object:
            if path.parent == registry.root / "artifacts":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return allowed(path, *args, **options)

        monkeypatch.setattr(Path, function, refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*words)
    assert result.exit_code == 1 and "Permission denied" in result.output and str(registry.root / "artifacts") in result.output


def test_a_tilde_is_the_home_folder(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "a home"))
    result = run("list", "--registry", "~/artifacts")
    assert result.exit_code == 0 and f"Looked in\n  {tmp_path}/a home/artifacts\n" in result.output
    assert f"--registry '{tmp_path}/a home/artifacts'" in result.output


@pytest.mark.parametrize("module", ["kda_tl", "kda_tl.cli.main"])
def test_it_runs_as_a_module_without_loading_the_compiler(module: str) -> None:
    code = f"import sys, runpy; sys.argv[1:] = ['--help']\ntry:\n    runpy.run_module('{module}', run_name='__main__')\n"
    code += "finally:\n    print(sorted({'tilelang', 'tvm'} & {name.split('.')[0] for name in sys.modules}))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]" and "Commands:" in ran.stdout
    assert ran.stdout.startswith("Usage: kda-tl [OPTIONS]")


@pytest.mark.tilelang
def test_as_a_module_it_builds_in_worker_processes(tmp_path: Path) -> None:
    """Which import the main module again, and must not run the command again."""
    words = ["build", "--arch", "cpu", "--jobs", "2", "--registry", tmp_path]
    words += [word for dim in (64, 128) for word in ("--spec", f"intracard_merge[head_dim_k={dim},head_dim_v={dim}]")]
    ran = subprocess.run([sys.executable, "-m", "kda_tl", *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "cpu: 2 programs in" in ran.stdout and ran.stdout.count("Registry ") == 1
    assert len(Registry(tmp_path).entries("cpu")) == 2
