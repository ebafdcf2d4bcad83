"""Tasks in worker processes that may die without taking the others along.

TVM ends its process on some errors, a compiler can run out of memory, and a pool of concurrent.futures gives up as a whole when
one of its processes is gone. Here a worker holds one task at a time, so a dead one costs that task and is replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from kda_tl.compiler.errors import BuildError

__all__ = ["Outcome", "WorkerDied", "run_tasks"]

Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerDied(BuildError):
    """The process of a task ended before its result came. The message says how."""


@dataclass(frozen=True)
class Outcome(Generic[Task, Result]):
    """Of one task: its result, or what it raised."""

    task: Task
    result: Result | None
    error: Exception | None


@dataclass
class _Worker(Generic[Task]):
    process: BaseProcess
    pipe: Connection
    task: Task


def run_tasks(
    function: Callable[[Task], Result], tasks: Sequence[Task], jobs: int
) -> Generator[Outcome[Task, Result], None, None]:
    """`function` of each task in at most `jobs` spawned processes; outcomes come in the order in which they finish.

    Tasks start in the order given. Function, tasks and results travel pickled. When the caller stops early, by an interrupt or
    by closing the generator, the workers are killed at once, with whatever they had started, and their temporary files removed.
    """
    # spawn: TileLang and torch start threads, which a fork would not survive.
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(tasks))
    busy: list[_Worker[Task]] = []

    def start() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(function, theirs, scratch), daemon=True)
        # Ctrl-C reaches the whole process group, which a worker is a part of until it makes its own.
        with _uninterrupted():
            process.start()
            task = waiting.pop()
            busy.append(_Worker(process, ours, task))
        theirs.close()
        _send(ours, task)

    with tempfile.TemporaryDirectory(prefix="kda-tl-", ignore_cleanup_errors=True) as scratch:
        try:
            while waiting and len(busy) < jobs:
                start()
            while busy:
                ready = wait([worker.pipe for worker in busy])
                for worker in [worker for worker in busy if worker.pipe in ready]:
                    task = worker.task
                    try:
                        result, error = worker.pipe.recv()
                    except (EOFError, OSError):
                        busy.remove(worker)
                        _stop([worker])  # what it had started may still run
                        result, error = None, WorkerDied(_how(worker.process.exitcode))
                        if waiting:
                            start()
                    else:
                        if waiting:
                            worker.task = waiting.pop()
                            _send(worker.pipe, worker.task)
                        else:
                            busy.remove(worker)
                            worker.pipe.close()
                            worker.process.join()
                    yield Outcome(task, result, error)
        finally:
            _stop(busy)


def _send(pipe: Connection, task: Any) -> None:
    """A worker that has died meanwhile, out of memory, is found out where its answer is awaited."""
    with suppress(BrokenPipeError, ConnectionResetError):
        pipe.send(task)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits, here and in processes that start meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(workers: Sequence[_Worker[Any]]) -> None:
    """Not by a request: a pass of TileLang does not look at signals while it runs, nor does the thread that gets one always."""
    with _uninterrupted():
        for worker in workers:
            assert worker.process.pid is not None
            with suppress(ProcessLookupError, PermissionError):  # it may not have made its group yet
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


def _serve(function: Callable[[Any], Any], pipe: Connection, scratch: str) -> None:
    os.setpgid(0, 0)
    tempfile.tempdir = os.environ["TMPDIR"] = scratch
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):  # the parent is done, or dead
            return
        answer: tuple[Any, BuildError | None]
        try:
            answer = (function(task), None)
        except Exception as error:
            # TVM's errors do not survive pickling between processes: only their text goes on.
            answer = (None, error if isinstance(error, BuildError) else BuildError(f"{type(error).__name__}: {error}"))
        try:
            pipe.send(answer)
        except BrokenPipeError:
            return


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = ": the machine may be short of memory, try fewer --jobs" if name == "SIGKILL" else ""
        return f"the compiling process was ended by {name}{hint}"
    return f"the compiling process ended with status {code}"
