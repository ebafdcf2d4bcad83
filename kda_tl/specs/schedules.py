"""How a kernel is built: one frozen dataclass per kernel, and the tuned choices in schedules/ARCH.json.

What an artifact computes never depends on its schedule. A schedules file reads

    {"format": 1, "arch": ARCH, "schedules": {SPEC_KEY: {"schedule": {FIELD: VALUE}, "source": "model" or "measured", ...}}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from kda_tl.specs.kernels import KernelSpec

__all__ = ["SCHEDULES", "ChunkScanSchedule", "ChunkWySchedule", "Schedule", "ScheduleFileError", "schedule_for"]

FORMAT = 1


class ScheduleFileError(ValueError):
    """A schedules file that cannot be used. The message names the file, the entry and what is allowed."""


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


def schedule_for(spec: KernelSpec, arch: str) -> Schedule:
    """The schedule that schedules/ARCH.json names for `spec`, or the kernel's default one where it names none.

    Raises:
        ScheduleFileError: the file is not of this format, or the entry has an unknown field.
    """
    entry = _read(schedules_folder() / f"{arch}.json").get(spec.key)
    kind = SCHEDULES[spec.kernel]
    if entry is None:
        return kind()
    unknown = set(entry["schedule"]) - {f.name for f in fields(kind)}
    if unknown:
        known = ", ".join(f.name for f in fields(kind))
        raise ScheduleFileError(f"schedules/{arch}.json: {spec.key}: unknown field {sorted(unknown)[0]!r}; allowed: {known}")
    try:
        schedule = kind(**entry["schedule"])
    except ValueError as error:
        raise ScheduleFileError(f"schedules/{arch}.json: {spec.key}: {error}") from None
    if getattr(schedule, "variant", "plain") == "warp_specialized" and arch != "sm_90":
        raise ScheduleFileError(f"schedules/{arch}.json: {spec.key}: variant warp_specialized runs on sm_90 alone")
    return schedule


def schedules_folder() -> Path:
    """schedules/ of a checkout, or the copy that travels in the wheel."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "schedules"
    return checkout if (package.parent / "pyproject.toml").is_file() else package / "_schedules"


@lru_cache(maxsize=16)
def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = content["schedules"]
        if content["format"] != FORMAT or content["arch"] != path.stem:
            raise KeyError("format or arch")
        if not all(isinstance(entry["schedule"], dict) for entry in entries.values()):
            raise KeyError("schedule")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ScheduleFileError(f"{path}: not a schedules file of format {FORMAT} ({error}); restore it or delete it") from None
    return dict(entries)
