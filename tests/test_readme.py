"""README.md holds: its tables are those of the code, its commands exist, and its examples run, one after another as there."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import kda_tl
from kda_tl.cli.main import cli
from kda_tl.compiler.errors import BuildError, ToolchainError
from kda_tl.ops.offered import dtype_table
from kda_tl.registry import BundleError, Registry
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.schedule_file import ScheduleFileError

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^    (kda-tl .*?)(?:  +#.*)?$", README, re.MULTILINE)


def test_the_dtype_table_is_that_of_the_ops() -> None:
    assert dtype_table() in README


def test_everything_public_is_named() -> None:
    errors = [error.__name__ for error in (BuildError, BundleError, ScheduleFileError, ToolchainError)]
    missing = [name for name in (*kda_tl.__all__, *errors) if not re.search(rf"\b{name}\b", README)]
    assert not missing, f"not in README.md: {', '.join(missing)}"


def test_every_arch_has_a_row() -> None:
    section = README.partition("\n## GPUs\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` ", section, re.MULTILINE)) == set(ARCHS)


def test_every_room_has_a_line() -> None:
    rooms = {path.parent.name for path in (ROOT / "kda_tl").glob("*/*.py")}
    assert set(re.findall(r"^  (\w+)/ +\S", README, re.MULTILINE)) == rooms


def test_every_command_is_named() -> None:
    assert {name for name in cli.commands if f"kda-tl {name}" not in README} == set()
    assert {name for name in re.findall(r"kda-tl ([a-z]+)", README)} <= set(cli.commands)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_and_their_options_exist(line: str) -> None:
    command: click.Command = cli
    words = shlex.split(line)[1:]
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= options
    archs = {value for name, value in itertools.pairwise(words) if name == "--arch"}
    assert archs <= set(ARCHS)


def test_files_and_sections_exist() -> None:
    for name in re.findall(r"\b(?:tools|tests|kda_tl|kernels|schedules)/[\w/]+\.(?:py|sh|json)\b", README):
        assert (ROOT / name).exists() or (ROOT / "kda_tl" / name).exists() or "ARCH" in name or "NAME" in name, name
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", README)) <= headings


def test_examples_run(cpu_kernels: Registry) -> None:
    """In the page's order and one namespace; shapes that its comments name are right."""
    names: dict[str, Any] = {}
    seen = set()
    for number, code in enumerate(code for code in EXAMPLES if "torchrun" not in code and "init_process_group" not in code):
        exec(compile(code, f"README.md, example {number + 1}", "exec"), names)
        seen |= set(re.findall(r"kda_tl\.(\w+)", code))
    assert {"chunk_kda", "recurrent_kda", "deltalog_decode_kda", "warmup"} <= seen
    device = torch.device(names["device"])
    assert names["state"].shape == (1, 8, 128, 128) and names["state"].device.type == device.type
    assert torch.isfinite(names["o"]).all() and torch.isfinite(names["x"].grad).all()
    assert names["pool"][[7, 3]].abs().amax() > 0 and names["pool"][0].abs().amax() == 0
    assert names["cache"].lengths([7, 3]).tolist() == [2, 4]


def test_the_example_for_several_processes_runs(cpu_kernels: Registry, tmp_path: Path) -> None:
    (code,) = (code for code in EXAMPLES if "init_process_group" in code)
    file = tmp_path / "example.py"
    file.write_text(code)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "(2, 4, 128, 128) (True, False)" in ran.stdout and "(1, 4, 128, 128) (True,)" in ran.stdout
