"""The measuring half: times a prepared folder's candidates on the device at hand. Needs no TileLang and no compiler.

Every candidate is held to the float64 reference on a small problem, and to the first candidate's outputs on the full-size one,
before its time counts. Times are medians over rounds in which all candidates of a problem take turns; clear losers drop out.
What a candidate came to is on disk before the next one is told about: whatever ends the run, nothing is measured twice.
"""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
import shlex
import signal
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kda_tl import __version__
from kda_tl.runtime.loader import has_support, is_whole
from kda_tl.specs.kernels import spec_of_key
from kda_tl.tuning.measure_child import MAKING_TENSORS, At, Done, Found, Hello, Job, NotLoaded, NotMade, serve
from kda_tl.tuning.measure_device import why_not
from kda_tl.tuning.problems_plan import TIMINGS, Plan, PlannedProblem, PlannedSpec, read_plan
from kda_tl.tuning.timings import Key, Timing, read_timings, timing_key

__all__ = ["MeasureError", "Summary", "append_record", "measure"]

Record = dict[str, Any]
START_SECONDS = 300.0
"""Until a child has torch, the driver and a context; and until it has a problem's tensors."""
TRIES = 2
"""To make a problem's tensors: what ends a process meanwhile, such as want of memory, need not be there the next time."""


class MeasureError(RuntimeError):
    """Nothing can be measured here. The message says what is missing."""


@dataclass(frozen=True)
class Summary:
    """counts: new records by status; left: candidates that are open still, because the budget did not reach them or their
    problem's tensors could not be made; not_made: those problems, and why."""

    device: str
    counts: Mapping[str, int]
    left: int
    seconds: float
    not_made: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Group:
    """Candidates of one spec and problem that are not finished."""

    spec: PlannedSpec
    problem: PlannedProblem
    open: tuple[int, ...]
    best_ms: float | None

    def job(self) -> Job:
        found = self.spec.candidates
        baselines = [n for n, one in enumerate(found) if one.schedule == self.problem.baseline]
        rows = tuple((n, str(found[n].artifact)) for n in self.open)
        return Job(self.spec.spec, self.problem.problem, rows, baselines[0] if baselines else None, self.best_ms)


def append_record(path: Path, record: Record) -> None:
    """On disk when it returns; after what is left of a line that was cut off, on a line of its own.

    Raises:
        MeasureError: it cannot be written. What had been is kept.
    """
    try:
        with open(path, "a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            else:
                torn = False
            file.write(b"\n" * torn + json.dumps(record, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        again = f"`kda-tl autotune --measure {shlex.quote(str(path.parent))} --resume`"
        raise MeasureError(f"{path} cannot be written ({error.strerror}): mend that; then {again} goes on") from None


def measure(
    folder: Path,
    *,
    resume: bool = False,
    budget_s: float | None = None,
    patience_s: float = 30.0,
    only: Container[str] | None = None,
    progress: Callable[[Record, int, int], None] | None = None,
) -> Summary:
    """Times the candidates of `folder` and appends a record for each to its timings.jsonl.

    Args:
        resume: go on with the records that are there: what is finished for this device and artifact is not run again. Without
            it they are moved aside, to timings-1.jsonl and so on.
        budget_s: seconds after which no further problem is begun; None for no limit.
        patience_s: seconds that a candidate may take for one step, be it a check or a sample; then its process is ended.
        only: keys of specs; those that stand for none of them are left out. Default: all of the plan.
        progress: called with each new record, and how many of how many candidates are done.

    Raises:
        PlanError: the folder has no plan.
        MeasureError: this machine has no device of the plan's arch; another process measures in the folder; artifacts of the
            plan, or what they load with, are not in the folder as they were built; the child process does not start, or can
            load nothing; records cannot be written.
        RegistryError: the folder cannot be read.
    """
    began = time.monotonic()
    plan = read_plan(folder)
    if only is not None:
        plan = replace(plan, specs=tuple(one for one in plan.specs if any(key in only for key in (one.spec, *one.inherits))))
    if (reason := why_not(plan.arch)) is not None:
        raise MeasureError(reason)
    _find_artifacts(folder, plan)
    path = folder / TIMINGS
    counts: dict[str, int] = {}
    not_made: list[str] = []
    with _alone(folder), _Child(folder, plan.arch) as child:
        told = read_timings(path) if resume and path.exists() else []
        hello = child.start()
        if not resume and path.exists():  # only now: where there is no device, nothing has happened
            _move_aside(path)
        records = [record for record in told if record.device == hello.device]
        groups = list(_groups(plan, records))
        total, done = sum(len(group.open) for group in groups), 0

        def keep(spec: PlannedSpec, problem: PlannedProblem | None, number: int, found: Found) -> None:
            one = spec.candidates[number]
            error = found.error if found.error is not None and math.isfinite(found.error) else None
            record = {
                "spec": spec.spec, "schedule": dict(one.schedule), "size": problem.size if problem else 0,
                "problem": dict(problem.problem) if problem else {}, "status": found.status, "time_ms": found.time_ms,
                "error": error, "reason": found.reason, "device": hello.device, "artifact": one.artifact,
                "versions": {**plan.versions, **hello.versions, "kda_tl": __version__},
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "baseline": problem is not None and one.schedule == problem.baseline,
            }  # fmt: skip
            append_record(path, record)
            counts[found.status] = counts.get(found.status, 0) + 1
            if progress is not None and problem is not None:
                progress(record, done, total)

        for spec, number in _rejected(plan, records):
            keep(spec, None, number, Found(number, "rejected", reason=spec.candidates[number].reason))
        for group in groups:
            if budget_s is not None and time.monotonic() - began > budget_s:
                break
            for found in _run(child, group, patience_s):
                if isinstance(found, NotMade):
                    not_made.append(f"{group.spec.spec}, size {group.problem.size}: {found.reason}")
                    continue
                done += 1
                keep(group.spec, group.problem, found.number, found)
    return Summary(hello.device, counts, total - done, time.monotonic() - began, tuple(not_made))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two processes would time each other, and everything twice. The kernel drops the lock when its holder dies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MeasureError(f"{folder} is being measured by another process: let it end, or stop it first") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def _find_artifacts(folder: Path, plan: Plan) -> None:
    """Before anything is timed: a candidate that is not there as it was built has not crashed, and must not be kept as one
    that has."""
    kernels = {one.artifact: spec_of_key(spec.spec).kernel for spec in plan.specs for one in spec.candidates if one.artifact}
    missing = [id for id in sorted(kernels) if not is_whole(folder, id)]
    if missing:
        options = " ".join(f"--kernel {kernel}" for kernel in sorted({kernels[id] for id in missing}))
        again = f"kda-tl autotune --arch {plan.arch} --prepare {shlex.quote(str(folder))} {options}"
        raise MeasureError(
            f"{folder} lacks {len(missing)} of the {len(kernels)} artifacts to be timed, {missing[0]} for one (damaged ones go "
            f"to quarantine/): copy all of the folder, or compile what is not there with `{again}`"
        )
    if kernels and not has_support(folder, plan.arch):
        raise MeasureError(f"{folder} lacks the support libraries that its artifacts load with: copy all of the folder")


def _move_aside(path: Path) -> None:
    n = 1
    while (aside := path.with_name(f"{path.stem}-{n}{path.suffix}")).exists():
        n += 1
    os.rename(path, aside)


def _groups(plan: Plan, records: Sequence[Timing]) -> Iterator[_Group]:
    finished = {record.key: record for record in records}
    for spec in plan.specs:
        for problem in spec.problems:
            left, best = [], None
            for number, one in enumerate(spec.candidates):
                if one.artifact is None:
                    continue
                record = finished.get(timing_key(spec.spec, problem.size, one.artifact, one.schedule, problem.problem))
                if record is None:
                    left.append(number)
                elif record.status == "ok" and record.time_ms is not None:
                    best = min(record.time_ms, record.time_ms if best is None else best)
            if left:
                yield _Group(spec, problem, tuple(left), best)


def _rejected(plan: Plan, records: Sequence[Timing]) -> Iterator[tuple[PlannedSpec, int]]:
    told: set[Key] = {record.key for record in records if record.status == "rejected"}
    for spec in plan.specs:
        for number, one in enumerate(spec.candidates):
            if one.artifact is None and timing_key(spec.spec, 0, None, one.schedule, {}) not in told:
                yield spec, number


def _run(child: _Child, group: _Group, patience_s: float) -> Iterator[Found | NotMade]:
    """Every open candidate's result; one that takes its process along is a result too, and the others go on in a new one.

    Where the process ends, or says that it cannot, before any candidate is touched, the problem is tried once more. After that
    `NotMade` comes last, and what is open stays open.
    """
    left, tries = list(group.open), TRIES
    while left:
        job = _Group(group.spec, group.problem, tuple(left), group.best_ms).job()
        at: At = At(None, MAKING_TENSORS)
        reason = None
        for message in child.ask(job, patience_s):
            if isinstance(message, At):
                at = message
            elif isinstance(message, Found):
                left.remove(message.number)
                yield message
            elif isinstance(message, NotLoaded):
                raise MeasureError(f"candidates cannot be loaded here: {message.reason}")
            elif isinstance(message, NotMade):
                reason = message.reason
            elif isinstance(message, _Ended) and at.number in left:
                left.remove(at.number)
                yield Found(at.number, message.status, reason=f"{message.how} in its {at.what}")
            elif isinstance(message, _Ended) and reason is None:
                reason = f"{message.how} while {at.what}"
        tries = TRIES if at.number is not None else tries - 1
        if not tries:
            yield NotMade(f"{reason}, {TRIES} times")
            return


@dataclass(frozen=True)
class _Ended:
    """The child is gone, or had to be."""

    status: str
    how: str


class _Child:
    """The process that runs candidates, started again when it is gone."""

    def __init__(self, folder: Path, arch: str) -> None:
        self.folder, self.arch = folder, arch
        self.process: BaseProcess | None = None
        self.pipe: Connection | None = None

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Hello:
        """Raises MeasureError where the process does not come up."""
        context = multiprocessing.get_context("spawn")  # a fork would not survive CUDA
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(self.folder), self.arch), daemon=True)
        self.process.start()
        theirs.close()
        for message in self.messages(START_SECONDS):
            if isinstance(message, Hello):
                return message
            if isinstance(message, _Ended):
                raise MeasureError(f"the measuring process does not start: {message.how}")
        raise MeasureError("the measuring process said nothing")

    def stop(self) -> None:
        if self.process is None or self.process.pid is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        if self.pipe is not None:
            self.pipe.close()
        self.process, self.pipe = None, None

    def ask(self, job: Job, patience_s: float) -> Iterator[At | Found | NotLoaded | NotMade | _Ended]:
        """Until the job is done, or the process gone."""
        if self.process is None:
            self.start()
        assert self.pipe is not None
        with suppress(OSError):  # it is gone: the first message says so
            self.pipe.send(job)
        for message in self.messages(patience_s):
            if isinstance(message, Done):
                return
            if isinstance(message, At | Found | NotLoaded | NotMade | _Ended):
                yield message

    def messages(self, patience_s: float) -> Iterator[Any]:
        """What the child sends; as the last one `_Ended`, where it is silent for so long or gone.

        Tensors are made by torch and the reference, which load libraries at their first use: they have the time of a start.
        """
        assert self.pipe is not None and self.process is not None
        limit = patience_s
        while True:
            try:
                if not self.pipe.poll(limit):
                    self.stop()
                    yield _Ended("timeout", f"no answer for {limit:.0f} s")
                    return
                message = self.pipe.recv()
                limit = START_SECONDS if message == At(None, MAKING_TENSORS) else patience_s
            except (EOFError, OSError):
                process = self.process
                process.join(5)
                how = _how(process.exitcode)
                self.stop()
                yield _Ended("crashed", how)
                return
            yield message


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"
