"""The process that runs candidates. It may crash, hang or lose its CUDA context: the parent sees which candidate it was at.

The parent sends one `Job` after another. The child answers with `At` before it touches a candidate, `Found` for each candidate
that is finished, and `Done` when none is left. After an exception nothing on the device can be trusted, so the process ends.
Where it was no candidate's fault, it says `NotLoaded` or `NotMade` first.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from kda_tl.runtime.driver import driver_version
from kda_tl.runtime.errors import KdaTlError
from kda_tl.runtime.loader import KernelFunction, load_artifact
from kda_tl.specs.floors import Problem
from kda_tl.specs.kernels import spec_of_key
from kda_tl.tuning.problems import check_case, full_case
from kda_tl.tuning.problems_case import Case

__all__ = ["MAKING_TENSORS", "At", "Done", "Found", "Hello", "Job", "NotLoaded", "NotMade", "die_with_parent", "serve"]

ROUNDS = 12
FIRST_ROUNDS = 3
"""Before anybody is stopped."""
CLEARLY_SLOWER = 1.10
"""A median beyond this many times the best one, after the first rounds, is not going to win."""
SAMPLE_MS = 0.3
MOST_REPEATS = 200
PR_SET_PDEATHSIG = 1
MAKING_TENSORS = "making tensors"


@dataclass(frozen=True)
class Hello:
    device: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """Candidates of one spec for one problem: (number, artifact); `baseline` is the number of one of them, or None.
    best_ms: of candidates that were timed before."""

    spec: str
    problem: Mapping[str, int]
    candidates: tuple[tuple[int, str], ...]
    baseline: int | None
    best_ms: float | None


@dataclass(frozen=True)
class At:
    """What comes next: candidate `number`, or, without one, the problem's tensors."""

    number: int | None
    what: str


@dataclass(frozen=True)
class Found:
    number: int
    status: str
    time_ms: float | None = None
    error: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class NotLoaded:
    """Of this folder, or in this environment, candidates cannot be loaded."""

    reason: str


@dataclass(frozen=True)
class NotMade:
    """There is no memory for the problem's tensors, or they cannot be made for another reason: no candidate was touched."""

    reason: str


@dataclass(frozen=True)
class Done:
    pass


def die_with_parent() -> None:
    """However that ends: a process that nobody reads would hold the device for nobody."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(pipe: Connection, folder: str, arch: str) -> None:
    """Until the parent closes the pipe."""
    # Not a part of the parent's group, which Ctrl-C reaches as a whole; and gone when the parent is.
    os.setpgid(0, 0)
    die_with_parent()
    device = torch.device("cpu" if arch == "cpu" else "cuda")
    if device.type == "cpu":
        torch.set_num_threads(1)
    worker = _Worker(pipe, Path(folder), arch, device)
    pipe.send(Hello(device_name(device), _versions(device)))
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        with torch.no_grad():
            worker.run(job)
        pipe.send(Done())
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _versions(device: torch.device) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), "driver": driver_version() or "unknown"}
    return found


@dataclass
class _Runner:
    """A candidate that passed: what one sample runs, how many passes these are, and the samples so far."""

    number: int
    sample: Callable[[], float]
    error: float
    times: list[float]

    @property
    def ms(self) -> float:
        return median(self.times)


class _Worker:
    def __init__(self, pipe: Connection, folder: Path, arch: str, device: torch.device) -> None:
        self.pipe, self.folder, self.arch, self.device = pipe, folder, arch, device
        self.checks: dict[str, Case] = {}  # of the spec at hand

    def run(self, job: Job) -> None:
        self.pipe.send(At(None, MAKING_TENSORS))
        spec = spec_of_key(job.spec)
        try:
            if job.spec not in self.checks:
                self.checks = {job.spec: check_case(spec, self.device)}
            check, full = self.checks[job.spec], full_case(spec, Problem(**job.problem), self.device)
            self.wait()
        except Exception as problem:
            self.pipe.send(NotMade(_text(problem)))
            os._exit(1)
        runners: list[_Runner] = []
        agreed: dict[str, Tensor] = {}
        for number, artifact in sorted(job.candidates, key=lambda one: one[0] != job.baseline):
            self.pipe.send(At(number, "check"))
            try:
                function = load_artifact(self.folder, artifact, self.arch, spec.key)
                error, reason = self.check(function, check, full, agreed)
                if reason is None:
                    sample = self.sampler(function, full)
            except (KdaTlError, ImportError) as problem:
                self.pipe.send(NotLoaded(str(problem)))
                os._exit(1)
            except Exception as problem:
                self.pipe.send(Found(number, "crashed", reason=_text(problem)))
                os._exit(1)
            if reason is not None:
                self.pipe.send(Found(number, "wrong", error=error, reason=reason))
            else:
                runners.append(_Runner(number, sample, error, []))
        agreed.clear()
        self.race(runners, job)

    def check(self, function: KernelFunction, check: Case, full: Case, agreed: dict[str, Tensor]) -> tuple[float, str | None]:
        """(error, what is wrong). `agreed`: outputs of the first candidate that passed, which the others have to repeat."""
        self.one_pass(function, check)
        assert check.truth is not None
        error = check.error(check.truth)
        if not error < check.tolerance:
            return error, f"error {error:.1e} against the reference is over {check.tolerance:.0e}"
        self.one_pass(function, full)
        if agreed:
            apart = full.error(agreed)
            if not apart < full.tolerance:
                return apart, f"differs by {apart:.1e} from the first candidate on the full-size problem"
        elif not all(bool(tensor.isfinite().all()) for tensor in full.outputs.values()):
            return error, "outputs of the full-size problem are not finite"
        else:
            agreed.update({name: tensor.clone() for name, tensor in full.outputs.items()})
        return error, None

    def one_pass(self, function: KernelFunction, case: Case) -> None:
        case.reset()
        for arguments in case.calls:
            function(*arguments)
        self.wait()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def sampler(self, function: KernelFunction, case: Case) -> Callable[[], float]:
        """Milliseconds per launch, over as many passes as make a sample that events can time."""

        def run(passes: int) -> None:
            for _ in range(passes):
                for arguments in case.calls:
                    function(*arguments)

        if self.device.type == "cpu":
            time_ms, launches = partial(_cpu_ms, partial(run, 1)), len(case.calls)
        else:
            once = _cuda_ms(partial(run, 1))
            passes = max(1, min(MOST_REPEATS // len(case.calls), round(SAMPLE_MS / max(once, 1e-3))))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run(passes)
            graph.replay()
            self.wait()
            time_ms, launches = partial(_cuda_ms, graph.replay), passes * len(case.calls)

        return lambda: time_ms() / launches

    def race(self, runners: list[_Runner], job: Job) -> None:
        """Round after round over all that are left, so that a device that slows down slows all of them."""
        for turn in range(ROUNDS):
            for runner in runners:
                self.pipe.send(At(runner.number, "timing"))
                try:
                    runner.times.append(runner.sample())
                except Exception as problem:
                    self.pipe.send(Found(runner.number, "crashed", reason=_text(problem)))
                    os._exit(1)
            if turn + 1 >= FIRST_ROUNDS:
                best = min((runner.ms for runner in runners), default=0.0)
                best = min(best, best if job.best_ms is None else job.best_ms)
                for runner in [r for r in runners if r.ms > CLEARLY_SLOWER * best and r.number != job.baseline]:
                    runners.remove(runner)
                    slower = f"{runner.ms / best:.2f} times the best after {turn + 1} rounds"
                    self.pipe.send(Found(runner.number, "stopped", runner.ms, runner.error, slower))
        for runner in runners:
            self.pipe.send(Found(runner.number, "ok", runner.ms, runner.error))


def _cuda_ms(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _cpu_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
