"""Folders of candidates for the tests, and what their records say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kda_tl.specs.floors import Problem
from kda_tl.specs.intracard import IntracardMergeSchedule, IntracardMergeSpec
from kda_tl.tuning.problems_plan import Plan, PlannedCandidate, PlannedProblem, PlannedSpec, write_plan
from kda_tl.tuning.timings import read_timings

AddCandidate = Callable[[IntracardMergeSchedule, str], None]
MERGE = IntracardMergeSpec(64, 64)
"""Of all kernels the one that compiles fastest."""


def with_candidates(plan: Plan, candidates: tuple[PlannedCandidate, ...]) -> Plan:
    return dataclasses.replace(plan, specs=(dataclasses.replace(plan.specs[0], candidates=candidates), *plan.specs[1:]))


def read_records(path: Path) -> list[dict[str, Any]]:
    """None where there is no file yet."""
    return [dataclasses.asdict(record) for record in read_timings(path)] if path.exists() else []


def statuses(records: list[Mapping[str, object]]) -> dict[tuple[str, int], str]:
    """(artifact, size) -> status; each of them once."""
    found: dict[tuple[str, int], str] = {}
    for record in records:
        key = (str(record["artifact"]), int(str(record["size"])))
        assert key not in found, f"{key} twice"
        found[key] = str(record["status"])
    return found


def write_merge_plan(folder: Path, arch: str = "cpu") -> Plan:
    """A plan of two candidates of MERGE on two sizes. Their artifacts are not there."""
    baseline, better = IntracardMergeSchedule(), IntracardMergeSchedule(block_v=32)
    sizes = [
        PlannedProblem(size, Problem(1, 64 * size, size, size, 2, 64).as_dict(), baseline.as_dict()) for size in (4, 8)
    ]  # fmt: skip
    candidates = tuple(PlannedCandidate(one.as_dict(), f"id-{one.block_v}") for one in (baseline, better))
    plan = Plan(arch, {"tilelang": "0"}, (PlannedSpec(MERGE.key, (), tuple(sizes), candidates),))
    write_plan(folder, plan)
    return plan
