"""Folders of candidates for the tests, and what their records say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from kda_tl.specs.intracard import IntracardMergeSchedule, IntracardMergeSpec
from kda_tl.tuning.problems_plan import Plan, PlannedCandidate

AddCandidate = Callable[[IntracardMergeSchedule, str], None]
MERGE = IntracardMergeSpec(64, 64)
"""Of all kernels the one that compiles fastest."""


def with_candidates(plan: Plan, candidates: tuple[PlannedCandidate, ...]) -> Plan:
    return dataclasses.replace(plan, specs=(dataclasses.replace(plan.specs[0], candidates=candidates), *plan.specs[1:]))


def statuses(records: list[Mapping[str, object]]) -> dict[tuple[str, int], str]:
    """(artifact, size) -> status; each of them once."""
    found: dict[tuple[str, int], str] = {}
    for record in records:
        key = (str(record["artifact"]), int(str(record["size"])))
        assert key not in found, f"{key} twice"
        found[key] = str(record["status"])
    return found
