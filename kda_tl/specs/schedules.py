"""How a kernel is built: one frozen dataclass per kernel, and which of them an arch uses for problems of which size.

What an artifact computes never depends on its schedule. The choices are in schedules/ARCH.json: `kda_tl.specs.schedule_file`.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from kda_tl.specs.kernels import KernelSpec

__all__ = [
    "SCHEDULES",
    "ChunkScanSchedule",
    "ChunkWySchedule",
    "Measured",
    "Schedule",
    "SizeClass",
    "schedule_classes",
    "schedule_for",
    "schedules_folder",
]

log = logging.getLogger("kda_tl")


@dataclass(frozen=True)
class Schedule:
    """Base of all schedules."""

    kernel: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "variant" and (type(value) is not int or value < 1):
                raise ValueError(f"{f.name} must be a positive integer, got {value!r}")

    def as_dict(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class ChunkWySchedule(Schedule):
    """Attributes:
    parts: into how many parts the rows of a chunk are split over threads; a block has parts * head_dim_k / 2 of them.
    min_blocks: blocks per multiprocessor that the compiler keeps registers free for.
    """

    kernel: ClassVar[str] = "chunk_wy"
    parts: int = 4
    min_blocks: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts not in (2, 4, 8):
            raise ValueError(f"parts must be 2, 4 or 8, got {self.parts}")


@dataclass(frozen=True)
class ChunkScanSchedule(Schedule):
    """How the state is split over blocks, and which program walks the chunks.

    Attributes:
        variant: "plain" runs on every arch; "warp_specialized" has a role per warpgroup and runs on sm_90.
        threads: per block of the plain variant; a multiple of 128 (warpgroups). The other one has 512.
        block_v: columns of the state that one block holds.
        stages: warp_specialized: chunks in flight.
        state_registers, value_registers, output_registers, load_registers: warp_specialized: per thread of each role; a
            multiple of 8, 512 together at most.
    """

    kernel: ClassVar[str] = "chunk_scan"
    variant: str = "plain"
    threads: int = 128
    block_v: int = 64
    stages: int = 2
    state_registers: int = 208
    value_registers: int = 120
    output_registers: int = 112
    load_registers: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in ("plain", "warp_specialized"):
            raise ValueError(f"variant must be plain or warp_specialized, got {self.variant!r}")
        if self.block_v not in (16, 32, 64, 128):
            raise ValueError(f"block_v must be 16, 32, 64 or 128, a divisor of V, got {self.block_v}")
        if self.threads % 128:
            raise ValueError(f"threads must be a multiple of 128, got {self.threads}")
        registers = (self.state_registers, self.value_registers, self.output_registers, self.load_registers)
        if sum(registers) > 512 or any(count % 8 or not 24 <= count <= 240 for count in registers):
            raise ValueError(f"registers must be multiples of 8 from 24 to 240, 512 together at most, got {registers}")


SCHEDULES: dict[str, type[Schedule]] = {s.kernel: s for s in (ChunkWySchedule, ChunkScanSchedule)}


@dataclass(frozen=True)
class Measured:
    """Where the choice of a class comes from.

    Attributes:
        device: its name.
        size: the largest measured problem of the class (`kda_tl.specs.sizes`); times are those of it.
        time_ms: of the schedule, in milliseconds.
        versions: (package or compiler, version) pairs, sorted.
        date: ISO, of the measurement.
        runner_up: the next best schedule and its milliseconds; None where nothing else ran.
    """

    device: str
    size: int
    time_ms: float
    versions: tuple[tuple[str, str], ...]
    date: str
    runner_up: tuple[Schedule, float] | None = None


@dataclass(frozen=True)
class SizeClass:
    """A schedule and the problems that it serves.

    Attributes:
        up_to: the largest size (`kda_tl.specs.sizes`); None, in the last class of a spec alone, for all that are larger.
        source: "measured" on that hardware, "model", or "default" where the file names no schedule.
    """

    up_to: int | None
    schedule: Schedule
    source: str = "default"
    measured: Measured | None = None


def schedule_classes(spec: KernelSpec, arch: str) -> tuple[SizeClass, ...]:
    """The size classes that schedules/ARCH.json names for `spec`, smallest first; one with the kernel's default schedule where
    it names none, or cannot be read. What cannot be read is told once, as a warning of the logger "kda_tl"."""
    path = schedules_folder() / f"{arch}.json"
    try:
        stat = path.stat()
        version = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    except OSError:
        version = None
    found = _read(path, arch, version).get(spec.key)
    return found if found is not None else (SizeClass(None, SCHEDULES[spec.kernel]()),)


def schedule_for(spec: KernelSpec, arch: str, size: int | None = None) -> Schedule:
    """The schedule of `spec` for problems of `size`; without one, for the largest. As `schedule_classes`."""
    classes = schedule_classes(spec, arch)
    if size is None:
        return classes[-1].schedule
    return classes[bisect_left([c.up_to for c in classes[:-1] if c.up_to is not None], size)].schedule


def schedules_folder() -> Path:
    """schedules/ of a checkout, or the copy that travels in the wheel."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "schedules"
    return checkout if (package.parent / "pyproject.toml").is_file() else package / "_schedules"


@lru_cache(maxsize=16)
def _read(path: Path, arch: str, version: tuple[int, int, int] | None) -> dict[str, tuple[SizeClass, ...]]:
    """By spec key. `version` is that of the file on disk, None where there is none: a file that changes is read again."""
    from kda_tl.specs.schedule_file import ScheduleFileError, read_schedule_file

    if version is None:
        return {}
    try:
        found, problems = read_schedule_file(path, arch)
    except ScheduleFileError as error:
        log.warning("%s. Until then every kernel for %s has its default schedule", error, arch)
        return {}
    for problem in problems:
        log.warning("%s. Until then this kernel has its default schedule", problem)
    return found
