"""The plan file of a tuning folder, which the preparing half writes and the measuring one reads.

DIR/plan.json        which specs, problems and candidates; which artifact each candidate runs
DIR/artifacts/ID/    as in a registry; DIR/support/, DIR/manifest/: what they load with
DIR/timings.jsonl    what was measured, one record a line
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from kda_tl.specs.archs import ARCHS
from kda_tl.specs.floors import Problem
from kda_tl.specs.kernels import spec_of_key
from kda_tl.tuning.timings import Key, timing_key

__all__ = [
    "PLAN",
    "TIMINGS",
    "Plan",
    "PlanError",
    "PlannedCandidate",
    "PlannedProblem",
    "PlannedSpec",
    "read_plan",
    "write_plan",
]

PLAN, TIMINGS = "plan.json", "timings.jsonl"
FORMAT = 1
T = TypeVar("T")


class PlanError(ValueError):
    """A folder without a plan that this version can use. The message names the file and the command that makes one."""


@dataclass(frozen=True)
class PlannedCandidate:
    """Attributes:
    schedule: all fields.
    artifact: id, in the folder's store; several candidates may share one. None where `reason` says why there is none.
    serves: keys of specs that are not timed themselves and take this spec's choice, where this schedule is legal for them.
    """

    schedule: Mapping[str, Any]
    artifact: str | None
    reason: str | None = None
    serves: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedProblem:
    """size: as schedules are chosen by; baseline: the schedule in force for it when the plan was made."""

    size: int
    problem: Mapping[str, int]
    baseline: Mapping[str, Any]


@dataclass(frozen=True)
class PlannedSpec:
    """inherits: specs that are not timed themselves and take the choices of this one."""

    spec: str
    inherits: tuple[str, ...]
    problems: tuple[PlannedProblem, ...]
    candidates: tuple[PlannedCandidate, ...]


@dataclass(frozen=True)
class Plan:
    """untuned: specs that keep their schedules, and why. versions: of the package and the compilers."""

    arch: str
    versions: Mapping[str, str]
    specs: tuple[PlannedSpec, ...]
    untuned: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def keys(self) -> frozenset[Key]:
        """Of all that is to be timed: records of other keys are of an older plan."""
        return frozenset(
            timing_key(spec.spec, problem.size, one.artifact, one.schedule, problem.problem)
            for spec in self.specs
            for problem in spec.problems
            for one in spec.candidates
            if one.artifact is not None
        )


def read_plan(folder: Path, *, drop_stale: bool = False) -> Plan:
    """The plan of a folder, every field of it checked.

    Args:
        drop_stale: leave out specs that this version of the package does not have, rather than raise for them.

    Raises:
        PlanError: there is none, it cannot be read, or it is not what `write_plan` writes.
    """
    path, prepare = folder / PLAN, f"--prepare {shlex.quote(str(folder))}`"
    again = f"make one with `kda-tl autotune --arch ARCH {prepare}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"its format is {data.get('format')!r}" if isinstance(data, dict) else "it is no table")
        plan = Plan(
            _get(data, "arch", _arch), _get(data, "versions", _texts),
            tuple(_spec(one, f"specs[{n}].") for n, one in enumerate(_get(data, "specs", _list))),
            _get(data, "untuned", _texts),
        )  # fmt: skip
    except FileNotFoundError:
        raise PlanError(f"{folder} has no {PLAN}: {again}") from None
    except OSError as error:
        raise PlanError(f"{path} cannot be read ({error.strerror}): mend that, or remove it and {again}") from None
    except (ValueError, RecursionError) as error:
        reason = "it is no JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError) else error
        raise PlanError(
            f"{path} is no plan of format {FORMAT} ({reason}): remove it and {again}, or name another folder"
        ) from None
    if drop_stale:
        return replace(plan, specs=tuple(_without_stale(spec) for spec in plan.specs if _is_known(spec.spec)))
    for key in (key for spec in plan.specs for key in (spec.spec, *spec.inherits)):
        if not _is_known(key):
            again = f"`kda-tl autotune --arch {plan.arch} {prepare}"
            raise PlanError(f"{path} has {key}, which is no spec of this version of kda-tl: prepare again with {again}")
    return plan


def _is_known(key: str) -> bool:
    try:
        return spec_of_key(key).key == key
    except (ValueError, TypeError):
        return False


def _without_stale(spec: PlannedSpec) -> PlannedSpec:
    return replace(
        spec, inherits=tuple(filter(_is_known, spec.inherits)),
        candidates=tuple(replace(one, serves=tuple(filter(_is_known, one.serves))) for one in spec.candidates),
    )  # fmt: skip


def _spec(data: object, at: str) -> PlannedSpec:
    return PlannedSpec(
        _get(data, "spec", _text, at),
        tuple(_get(data, "inherits", _list_of_texts, at)),
        tuple(_problem(one, f"{at}problems[{n}].") for n, one in enumerate(_get(data, "problems", _list, at))),
        tuple(_candidate(one, f"{at}candidates[{n}].") for n, one in enumerate(_get(data, "candidates", _list, at))),
    )


def _problem(data: object, at: str) -> PlannedProblem:
    return PlannedProblem(
        _get(data, "size", _count, at), _get(data, "problem", _sizes, at), _get(data, "baseline", _table, at)
    )  # fmt: skip


def _candidate(data: object, at: str) -> PlannedCandidate:
    artifact = _get(data, "artifact", _name, at)
    reason = _get(data, "reason", lambda value: None if value is None else _text(value), at)
    return PlannedCandidate(
        _get(data, "schedule", _table, at), artifact, reason, tuple(_get(data, "serves", _list_of_texts, at))
    )  # fmt: skip


def _get(data: object, name: str, read: Callable[[object], T], at: str = "") -> T:
    """A field as `read` takes it. Raises ValueError with its place, what it must be, and what came."""
    if not isinstance(data, dict) or name not in data:
        raise ValueError(f"{at}{name} is missing")
    try:
        return read(data[name])
    except _Not as error:
        raise ValueError(f"{at}{name} must be {error}, got {repr(data[name])[:80]}") from None


class _Not(Exception):
    """What a value is not, and must be."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Not("a text")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _Not("a list")
    return value


def _list_of_texts(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _Not("a list of texts")
    return value


def _table(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Not("a table")
    return value


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise _Not("a table of texts")
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 1:
        raise _Not("a positive integer")
    return value


def _sizes(value: object) -> dict[str, int]:
    names = [f.name for f in fields(Problem)]
    if not isinstance(value, dict) or not all(
        name in names and type(one) is int and one >= 1 for name, one in value.items()
    ):  # fmt: skip
        raise _Not(f"a table of positive integers by {', '.join(names)}")
    return value


def _arch(value: object) -> str:
    if not isinstance(value, str) or value not in ARCHS:
        raise _Not(f"one of {', '.join(ARCHS)}")
    return value


def _name(value: object) -> str | None:
    """Of a folder of artifacts/: no path."""
    if value is not None and not (isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", value)):
        raise _Not("a plain name or null")
    return value


def write_plan(folder: Path, plan: Plan) -> None:
    """At once: a reader sees the old plan or the new one. Raises PlanError where it cannot be written."""
    temporary = folder / f".{PLAN}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"format": FORMAT, **asdict(plan)}, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / PLAN)
    except OSError as error:
        with suppress(OSError):  # the folder travels
            temporary.unlink()
        raise PlanError(
            f"{folder / PLAN} cannot be written ({error.strerror}): mend that; then the same command again goes on"
        ) from None
