"""Worker processes: outcomes of every task whatever becomes of its process, and nothing left after an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import worker_tasks

from kda_tl.compiler import workers
from kda_tl.compiler.errors import BuildError
from kda_tl.compiler.workers import WorkerDied, run_tasks

HERE = Path(__file__).parent


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_dead_worker_costs_one_task() -> None:
    tasks = [
        ("abort", None), ("return", 1), ("raise", "no luck"), ("kill", signal.SIGKILL), ("return", 2), ("exit", 7),
        ("raise strange", "odd"), ("return", 3),
    ]  # fmt: skip
    outcomes = list(run_tasks(worker_tasks.act, tasks, 2))
    assert sorted(map(repr, tasks)) == sorted(repr(outcome.task) for outcome in outcomes)
    by_task = {outcome.task: outcome for outcome in outcomes}
    pids = {by_task["return", value].result[0] for value in (1, 2, 3)}
    assert os.getpid() not in pids and [by_task["return", value].result[1] for value in (1, 2, 3)] == [1, 2, 3]
    messages = {task: str(outcome.error) for task, outcome in by_task.items() if outcome.error is not None}
    assert messages == {
        ("abort", None): "the compiling process was ended by SIGABRT",
        (
            "kill",
            signal.SIGKILL,
        ): "the compiling process was ended by SIGKILL: the machine may be short of memory, try fewer --jobs",
        ("exit", 7): "the compiling process ended with status 7",
        ("raise", "no luck"): "no luck",
        ("raise strange", "odd"): "Unpicklable: odd",
    }
    kinds = {task[0]: type(outcome.error) for task, outcome in by_task.items() if outcome.error is not None}
    assert kinds.pop("raise") is kinds.pop("raise strange") is BuildError and set(kinds.values()) == {WorkerDied}


def test_a_worker_that_dies_with_its_answer_given_costs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next task finds nobody at the other end of the pipe."""
    ready = workers.wait

    def late(pipes: list[Connection]) -> list[object]:
        found = ready(pipes)
        time.sleep(0.5)
        return found

    monkeypatch.setattr(workers, "wait", late)
    outcomes = list(run_tasks(worker_tasks.act, [("return and exit", 7), ("return", 1), ("return", 2)], 1))
    errors = {outcome.task: str(outcome.error) for outcome in outcomes if outcome.error is not None}
    assert len(outcomes) == 3 and errors == {("return", 1): "the compiling process ended with status 7"}


def test_leaving_early_stops_the_workers_and_cleans_up(tmp_path: Path) -> None:
    tasks = [("wait", str(tmp_path)), ("return", None), *[("wait", str(tmp_path))] * 3]
    outcomes = run_tasks(worker_tasks.act, tasks, 2)
    assert next(outcomes).task[0] == "return"
    assert eventually(lambda: len(list(tmp_path.glob("started-*"))) == 2)
    outcomes.close()
    started = list(tmp_path.glob("started-*"))
    assert not any(alive(int(file.name.removeprefix("started-"))) for file in started)
    assert not any(Path(file.read_text()).parent.exists() for file in started)


def heeding_sigint() -> None:
    """Tests in the background have it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c(tmp_path: Path) -> None:
    """As a terminal sends it: to the whole process group, twice."""
    parent = subprocess.Popen(
        [sys.executable, HERE / "worker_tasks.py", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heeding_sigint,
    )
    assert eventually(lambda: len(list(tmp_path.glob("started-*"))) == 2)
    os.killpg(parent.pid, signal.SIGINT)
    stdout, stderr = parent.communicate(timeout=60)
    assert (parent.returncode, stdout, stderr) == (130, "interrupted\n", "")
    started = list(tmp_path.glob("started-*"))
    assert len(started) == 2 and not any(alive(int(file.name.removeprefix("started-"))) for file in started)
    assert sorted(tmp_path.iterdir()) == sorted(started)


@pytest.mark.tilelang
def test_an_interrupted_build_leaves_nothing_half_written(tmp_path: Path) -> None:
    """The C++ compiler sits still when Ctrl-C comes."""
    compiler, temporary, registry = tmp_path / "c++", tmp_path / "tmp", tmp_path / "registry"
    temporary.mkdir()
    compiler.write_text(
        f"#!/bin/sh\n[ \"$1\" = --version ] && {{ echo 'still 1.0'; exit 0; }}\necho $$ >{tmp_path}/compiling\nexec sleep 600\n"
    )
    compiler.chmod(0o755)
    words = ["build", "--arch", "cpu", "--spec", "chunk_scan[dtype=float32]", "--registry", str(registry)]
    parent = subprocess.Popen(
        [sys.executable, "-m", "kda_tl.cli.main", *words],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "CXX": str(compiler), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heeding_sigint,
    )
    assert eventually(lambda: (tmp_path / "compiling").exists(), 120), parent.communicate()
    assert list(temporary.iterdir())
    os.killpg(parent.pid, signal.SIGINT)
    _, stderr = parent.communicate(timeout=60)
    assert parent.returncode == 130 and "Traceback" not in stderr and "the same command builds the rest" in stderr
    assert not alive(int((tmp_path / "compiling").read_text()))
    assert list(temporary.iterdir()) == []
    assert not registry.exists() or [path for path in registry.rglob("*") if path.is_file() and path.name != ".lock"] == []
