"""Timings files: what a tuner found out, a JSON object per line, in the order in which it was found out.

    {"spec": KEY, "schedule": {...}, "size": INT, "problem": {...}, "status": "ok", "time_ms": FLOAT, "error": FLOAT,
     "reason": null, "device": NAME, "versions": {...}, "date": ISO, "baseline": BOOL,
     "artifact": ID}

Lines are only ever appended. A process that dies while it writes leaves a torn one, the beginning of a record or zeros: it is
no record and is passed over. Anything else that is no record is an error.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["STATUSES", "Key", "Timing", "TimingsError", "read_timings", "timing_key"]

Key = tuple[str, int, "str | None", str]
"""What a record is of: spec, size, artifact, and schedule and problem as text."""

STATUSES = ("ok", "wrong", "crashed", "timeout", "stopped", "rejected")


class TimingsError(ValueError):
    """A timings file that cannot be used. The message names the file, the line, what is wrong and what is allowed."""


@dataclass(frozen=True)
class Timing:
    """One candidate on one problem.

    Attributes:
        spec: its key.
        schedule: fields by name; those left out have their defaults.
        size: of the problem, as `kda_tl.specs.sizes` counts it; 0 for a candidate that was rejected for all of them.
        problem: the numbers that make it up, whatever they are.
        status: "ok"; "wrong" (over the error bound), "crashed", "timeout", "stopped" (clearly slower) or "rejected".
        time_ms: milliseconds of a launch; a number wherever status is ok.
        error: relative, against the reference; None where it never ran.
        reason: what went wrong; None where nothing did.
        device: name of the GPU.
        versions: of packages and compilers, by name.
        date: ISO, of the measurement.
        baseline: whether this schedule was in force for that size when it was measured.
        artifact: id of what ran; None where nothing did, or nobody wrote it down.
    """

    spec: str
    schedule: Mapping[str, Any]
    size: int
    problem: Mapping[str, Any]
    status: str
    time_ms: float | None
    error: float | None
    reason: str | None
    device: str
    versions: Mapping[str, str]
    date: str
    baseline: bool
    artifact: str | None = None

    def __post_init__(self) -> None:
        for name, kinds in KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                words = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
                raise ValueError(f"{name} must be {words}, got {value!r}")
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")
        if self.size < (self.status != "rejected"):
            raise ValueError(f"size must be positive, got {self.size}")
        if (self.time_ms is None and self.status == "ok") or (self.time_ms is not None and not 0 < self.time_ms < MOST_MS):
            where = " where status is ok" if self.status == "ok" else ""
            raise ValueError(f"time_ms must be a positive number{where}, got {str(self.time_ms)[:40]}")
        try:
            datetime.datetime.fromisoformat(self.date.replace("Z", "+00:00"))
        except ValueError:
            raise ValueError(f"date must be an ISO date, got {self.date!r}") from None

    @property
    def key(self) -> Key:
        return timing_key(self.spec, self.size, self.artifact, self.schedule, self.problem)


def timing_key(spec: str, size: int, artifact: str | None, schedule: Mapping[str, Any], problem: Mapping[str, Any]) -> Key:
    """Records of equal keys say what became of the same thing."""
    return spec, size, artifact, json.dumps([dict(schedule), dict(problem)], sort_keys=True)


MOST_MS = 1e12
LAST_WORD = re.compile(r"[-+.\w\s\\]*")
KINDS: Mapping[str, tuple[type, ...]] = {
    "spec": (str,), "schedule": (dict,), "size": (int,), "problem": (dict,), "status": (str,),
    "time_ms": (int, float, type(None)), "error": (int, float, type(None)), "reason": (str, type(None)),
    "device": (str,), "versions": (dict,), "date": (str,), "baseline": (bool,),
    "artifact": (str, type(None)),
}  # fmt: skip


def read_timings(path: Path) -> list[Timing]:
    """All records, in the order of the file. Fields that a record has besides are left to whoever wrote them.

    Raises:
        TimingsError: the file cannot be read, or a whole line is no record.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise TimingsError(f"{path}: cannot be read: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            given = json.loads(line.rstrip(b"\0\r\n"))  # zeros are what a machine leaves that lost power
        except (ValueError, RecursionError):
            if _is_torn(line):
                continue
            text = line.rstrip(b"\r\n")
            tail = f" .. {text[-40:]!r}" if text.startswith(b"\0") else ""
            where = f"{path} line {number}: no record, and not the beginning of one: {text[:40]!r}{tail}"
            raise TimingsError(f"{where}: remove the line, or tune anew") from None
        try:
            found.append(_record(given))
        except ValueError as error:
            raise TimingsError(f"{path} line {number}: {error}: remove the line, or tune anew") from None
    return found


def _is_torn(line: bytes) -> bool:
    """Whether a line that is no JSON is what a process leaves that dies while it writes: nothing, zeros, or the beginning of a
    record, with zeros after it or not. One with a newline must really be a beginning: a later process went on after it."""
    text = line.rstrip(b"\0 \t\r\n")
    if not text.startswith(b"{") or not line.endswith((b"\n", b"\r")):
        return not text or text.startswith(b"{")
    try:
        json.loads(text.decode("utf-8", "ignore"))
    except json.JSONDecodeError as error:
        # Of a beginning only the last word is wrong: a string that does not end, or less than a number, a name or an escape.
        return error.msg.startswith("Unterminated string") or LAST_WORD.fullmatch(error.doc, error.pos) is not None
    except (ValueError, RecursionError):
        pass
    return False


def _record(given: object) -> Timing:
    if not isinstance(given, dict):
        raise ValueError(f"a record is a JSON object, got {given!r}")
    required = [f.name for f in fields(Timing) if f.default is MISSING]
    for name in required:
        if name not in given:
            raise ValueError(f"a record has {', '.join(required)}, and {name} is missing")
    return Timing(**{f.name: given[f.name] for f in fields(Timing) if f.name in given})
