"""schedules/ARCH.json, format 2: which schedule serves problems of which size, and where each choice comes from.

    {"format": 2, "arch": ARCH, "schedules": {SPEC_KEY: {"classes": [
        {"up_to": SIZE, "schedule": {FIELD: VALUE}, "source": "model"},
        {"up_to": null, "schedule": {FIELD: VALUE}, "source": "measured", "device": ..., "size": ..., "time_ms": ...,
         "versions": {...}, "date": ..., "runner_up": {"schedule": {...}, "time_ms": ...}}
    ]}}}

Fields that a schedule leaves out have their defaults. Sizes are those of `kda_tl.specs.sizes`.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

# Every module that brings a kernel: keys are read against all of them.
from kda_tl.specs import decode, deltalog, intracard  # noqa: F401
from kda_tl.specs.kernels import spec_of_key
from kda_tl.specs.schedules import SCHEDULES, Measured, Schedule, SizeClass

__all__ = [
    "FORMAT",
    "MAX_CLASSES",
    "ScheduleFileError",
    "class_as_json",
    "make_schedule",
    "read_entries",
    "read_schedule_file",
    "write_entries",
]

FORMAT = 2
MAX_CLASSES = 4
SOURCES = ("model", "measured")
REQUIRED = ("schedule", "source", "up_to")
MEASURED = ("date", "device", "size", "time_ms", "versions")

Classes = tuple[SizeClass, ...]


class ScheduleFileError(ValueError):
    """A schedules file that cannot be used. The message names the file, what is wrong, what is allowed and the fix."""


def read_entries(path: Path, arch: str) -> dict[str, Any]:
    """SPEC_KEY -> entry, as they stand in the file.

    Raises:
        ScheduleFileError: it is no schedules file of `arch` in this format.
    """
    fix = f"restore it, or delete it; then defaults hold, until `kda-tl autotune` on a GPU of {arch} writes it anew"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScheduleFileError(f"{path}: cannot be read ({error.strerror}): {fix}") from None
    except (ValueError, RecursionError):
        raise ScheduleFileError(f"{path}: not a schedules file, it is not JSON: {fix}") from None
    if not isinstance(content, dict) or not isinstance(content.get("schedules"), dict):
        raise ScheduleFileError(f"{path}: not a schedules file, it has no table of schedules: {fix}")
    if type(content.get("format")) is not int or content["format"] != FORMAT:
        found = f"its format is {content.get('format')!r}, this version of kda-tl reads format {FORMAT}"
        raise ScheduleFileError(f"{path}: not a schedules file of this version, {found}: {fix}")
    if content.get("arch") != arch:
        raise ScheduleFileError(f"{path}: not the schedules file of {arch}, its arch is {content.get('arch')!r}: {fix}")
    entries: dict[str, Any] = content["schedules"]
    return entries


def read_schedule_file(path: Path, arch: str) -> tuple[dict[str, Classes], list[str]]:
    """SPEC_KEY -> its size classes, and what is wrong with the entries that are left out: file, entry, what is allowed, fix.

    Raises:
        ScheduleFileError: as `read_entries`.
    """
    found: dict[str, Classes] = {}
    problems = []
    for key, entry in read_entries(path, arch).items():
        try:
            found[key] = _classes(key, entry, arch)
        except (ValueError, TypeError) as error:
            fix = "correct or remove the entry, or run `kda-tl autotune`"
            problems.append(f"{path}: {key}: {error}: {fix}")
    return found, problems


def write_entries(path: Path, arch: str, entries: Mapping[str, Any]) -> None:
    """Replaces the file at once, entries and fields in alphabetical order: equal entries give equal bytes."""
    content = {"format": FORMAT, "arch": arch, "schedules": dict(entries)}
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def make_schedule(kernel: str, given: object, arch: str) -> Schedule:
    """The schedule of a kernel from the fields that a file gives.

    Raises:
        ValueError: an unknown field, or a value that cannot be.
    """
    kind = SCHEDULES[kernel]
    known = [f.name for f in fields(kind)]
    if not isinstance(given, dict):
        raise ValueError(f"schedule must be a table of {', '.join(known)}, got {given!r}")
    for name in given:
        if name not in known:
            raise ValueError(f"unknown field {name!r}; allowed: {', '.join(known)}")
    schedule = kind(**given)
    if getattr(schedule, "variant", "plain") == "warp_specialized" and arch != "sm_90":
        raise ValueError(f"variant warp_specialized runs on sm_90 alone, not on {arch}")
    return schedule


def class_as_json(size_class: SizeClass) -> dict[str, Any]:
    """As it stands in a file, with every field of its schedule."""
    entry = {"up_to": size_class.up_to, "schedule": size_class.schedule.as_dict(), "source": size_class.source}
    measured = size_class.measured
    if measured is not None:
        entry |= {name: getattr(measured, name) for name in MEASURED} | {"versions": dict(measured.versions)}
        if measured.runner_up is not None:
            schedule, time_ms = measured.runner_up
            entry["runner_up"] = {"schedule": schedule.as_dict(), "time_ms": time_ms}
    return entry


def _classes(key: str, entry: object, arch: str) -> Classes:
    spec = spec_of_key(key)
    if spec.key != key:
        raise ValueError(f"an entry has the whole key of its spec, {spec.key}")
    given = entry.get("classes") if isinstance(entry, dict) else None
    if not isinstance(given, list) or not isinstance(entry, dict) or set(entry) != {"classes"}:
        raise ValueError(f'an entry is {{"classes": [...]}}, got {json.dumps(entry)[:80]}')
    if not 1 <= len(given) <= MAX_CLASSES:
        raise ValueError(f"classes must be 1 to {MAX_CLASSES}, got {len(given)}")
    found = tuple(_class(spec.kernel, one, arch) for one in given)
    _check_bounds([one.up_to for one in found])
    return found


def _check_bounds(bounds: Sequence[int | None]) -> None:
    numbers = [bound for bound in bounds[:-1] if bound is not None]
    rising = all(low < high for low, high in itertools.pairwise(numbers))
    if bounds[-1] is not None or len(numbers) != len(bounds) - 1 or not rising:
        raise ValueError(f"up_to must rise from class to class and be null in the last one alone, got {list(bounds)}")


def _class(kernel: str, given: object, arch: str) -> SizeClass:
    if not isinstance(given, dict) or not set(REQUIRED) <= set(given):
        raise ValueError(f"a class is a table with {', '.join(REQUIRED)}, got {json.dumps(given)[:80]}")
    up_to, source = given["up_to"], given["source"]
    if up_to is not None and (type(up_to) is not int or up_to < 1):
        raise ValueError(f"up_to must be a positive integer or null, got {up_to!r}")
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    allowed = {*REQUIRED, *((*MEASURED, "runner_up") if source == "measured" else ())}
    for name in given:
        if name not in allowed:
            raise ValueError(f"unknown field {name!r} of a class from a {source}; allowed: {', '.join(sorted(allowed))}")
    schedule = make_schedule(kernel, given["schedule"], arch)
    return SizeClass(up_to, schedule, source, _measured(kernel, given, arch) if source == "measured" else None)


def _measured(kernel: str, given: Mapping[str, Any], arch: str) -> Measured:
    for name in MEASURED:
        if name not in given:
            raise ValueError(f"a measured class has {', '.join(MEASURED)}, and {name} is missing")
    device, size, versions, date = given["device"], given["size"], given["versions"], given["date"]
    if not isinstance(device, str) or not device:
        raise ValueError(f"device must be the name of one, got {device!r}")
    if type(size) is not int or size < 1:
        raise ValueError(f"size must be a positive integer, got {size!r}")
    if not isinstance(versions, dict) or not all(isinstance(value, str) for value in versions.values()):
        raise ValueError(f"versions must be a table of texts, got {versions!r}")
    try:
        datetime.datetime.fromisoformat(str(date).replace("Z", "+00:00"))
    except ValueError:
        raise ValueError(f"date must be an ISO date, got {date!r}") from None
    runner_up = None
    if "runner_up" in given:
        second = given["runner_up"]
        if not isinstance(second, dict) or set(second) != {"schedule", "time_ms"}:
            raise ValueError(f"runner_up is a table with schedule and time_ms, got {json.dumps(second)[:80]}")
        runner_up = make_schedule(kernel, second["schedule"], arch), _milliseconds(second["time_ms"])
    return Measured(device, size, _milliseconds(given["time_ms"]), tuple(sorted(versions.items())), str(date), runner_up)


def _milliseconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"time_ms must be a positive number, got {value!r}")
    return float(value)
