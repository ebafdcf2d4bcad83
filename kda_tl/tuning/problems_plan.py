"""The plan file of a tuning folder, which the preparing half writes and the measuring one reads.

DIR/plan.json        which specs, problems and candidates; which artifact each candidate runs
DIR/artifacts/ID/    as in a registry; DIR/support/, DIR/manifest/: what they load with
DIR/timings.jsonl    what was measured, one record a line
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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


def read_plan(folder: Path) -> Plan:
    """Raises PlanError where the folder has no plan, or not one of this format."""
    path = folder / PLAN
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}")
        return Plan(data["arch"], data["versions"], tuple(map(_spec, data["specs"])), data["untuned"])
    except FileNotFoundError:
        raise PlanError(f"{folder} has no {PLAN}: make one with `kda-tl autotune --arch ARCH --prepare {folder}`") from None
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise PlanError(
            f"{path} is no plan of format {FORMAT} ({reason}): make one with `kda-tl autotune --arch ARCH --prepare {folder}`"
        ) from None


def _spec(data: Mapping[str, Any]) -> PlannedSpec:
    return PlannedSpec(
        data["spec"],
        tuple(data["inherits"]),
        tuple(PlannedProblem(**problem) for problem in data["problems"]),
        tuple(PlannedCandidate(**{**one, "serves": tuple(one["serves"])}) for one in data["candidates"]),
    )


def write_plan(folder: Path, plan: Plan) -> None:
    """At once: a reader sees the old plan or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{PLAN}.tmp"
    temporary.write_text(json.dumps({"format": FORMAT, **asdict(plan)}, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, folder / PLAN)
