"""The preparing half: which specs are timed, their legal schedules, compiled into a folder that travels to the device."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kda_tl.compiler.build import BuildResult, compile_each, compiler_versions
from kda_tl.kernels.candidates import candidates, rejection
from kda_tl.registry import Registry
from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.decode import RecurrentDecodeSpec
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.deltalog import DeltaLogDecodeSpec, DeltaLogPrepSpec
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec
from kda_tl.specs.schedules import Schedule, schedule_for
from kda_tl.tuning.problems import problems, size_of
from kda_tl.tuning.problems_plan import (
    PLAN,
    Plan,
    PlanError,
    PlannedCandidate,
    PlannedProblem,
    PlannedSpec,
    read_plan,
    write_plan,
)

__all__ = ["prepare", "representative"]

MOST_SPILLED = 16
"""Bytes, stored and loaded: what a few values that live around the loops come to. A loop that spills has more."""

Task = tuple[KernelSpec, Schedule]
Progress = Callable[[KernelSpec, Schedule, str, int, int], None]


def representative(spec: KernelSpec, arch: str) -> KernelSpec | str:
    """The spec whose timings choose for `spec`, maybe itself; or the reason why nothing does.

    One spec stands for its siblings with other 16-bit dtypes, gates of any dtype, and in the scan states of any; KDA for all
    rules with a decay per key, GDN for the others; K = 128 for K = 64 where no loop over tiles depends on it.
    """
    is_cpu = arch_row(arch).is_cpu
    dtype = "float32" if is_cpu else "bfloat16"
    if (
        getattr(spec, "dtype", None) == "float32"
        and not is_cpu
        and not isinstance(spec, IntracardMergeSpec | RecurrentDecodeSpec)
    ):
        return "float32 activations are right, not tuned"
    if isinstance(spec, ChunkWySpec):
        decay = "per_key" if spec.decay == "per_key" else "scalar"
        return replace(spec, head_dim_k=128, dtype=dtype, gate_dtype=dtype, decay=decay, delta=True, read_first=False)
    if isinstance(spec, ChunkScanSpec):
        V = min(spec.head_dim_v, spec.head_dim_k) if spec.head_dim_k == 64 else spec.head_dim_k
        return replace(spec, head_dim_v=V, dtype=dtype, state_dtype="float32", delta=True)
    if isinstance(spec, IntracardPreScanSpec):
        return replace(spec, dtype=dtype, delta=True)
    if isinstance(spec, IntracardMergeSpec):
        return replace(spec, delta=True)
    if isinstance(spec, RecurrentDecodeSpec):
        state = "float32" if spec.state_dtype == "float32" else "bfloat16"
        return replace(spec, head_dim_k=128, dtype=dtype, state_dtype=state)
    if isinstance(spec, DeltaLogDecodeSpec | DeltaLogPrepSpec):
        return "DeltaLog is timed over whole merge cycles, by tools/bench_deltalog.py"
    return f"the tuner has no problems for {spec.kernel}"


def prepare(
    arch: str,
    folder: Path,
    specs: Sequence[KernelSpec] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Compiles every legal candidate into `folder` and writes its plan. No GPU is needed.

    What the folder has already is not compiled again, and the plan's other specs stay in it, unless this version does not have
    them. Stopped early, it keeps what had been compiled.

    Args:
        specs: of the arch's default set, to be tuned; None for all. Those that another spec stands for are tuned by it.
        progress: called with each candidate as its artifact is done: spec, schedule, what became of it, how many are done, of
            how many.

    Raises:
        BuildError: TileLang or a compiler is missing.
        PlanError: the folder is a registry, or its plan is damaged or of another arch.
    """
    shipped = default_specs(arch)
    wanted = {representative(spec, arch) for spec in (shipped if specs is None else specs)}
    groups: dict[KernelSpec, list[KernelSpec]] = {}
    untuned: dict[str, str] = {}
    for spec in shipped:
        by = representative(spec, arch)
        if isinstance(by, str):
            untuned[spec.key] = by
        elif by in wanted:
            groups.setdefault(by, []).extend([] if by == spec else [spec])
    _refuse_registry(folder)
    kept = _planned_before(folder, arch, {spec.key for spec in groups})
    in_force = {spec: _in_force(spec, arch) for spec in groups}
    listed = {spec: _listed(spec, arch, in_force[spec]) for spec in groups}
    tasks = list(dict.fromkeys((spec, s) for spec, found in listed.items() for s, reason in found if reason is None))
    registry = Registry(folder)
    outcomes: dict[Task, tuple[str | None, str | None]] = {}
    for outcome in compile_each(arch, tasks, registry, jobs):
        outcomes[outcome.task] = _judged(registry, outcome.result, outcome.error, in_force[outcome.task[0]])
        if progress is not None:
            told = outcomes[outcome.task][1] or ("compiled" if outcome.result and outcome.result.compiled else "was there")
            progress(*outcome.task, told, len(outcomes), len(tasks))
    planned = [_planned(spec, arch, groups[spec], found, outcomes) for spec, found in listed.items()]
    order = {spec.key: index for index, spec in enumerate(shipped)}
    plan = Plan(
        arch,
        compiler_versions(arch),
        tuple(sorted([*planned, *kept], key=lambda one: order.get(one.spec, len(order)))),
        untuned,
    )
    write_plan(folder, plan)
    _remove_others(registry, plan)
    return plan


def _refuse_registry(folder: Path) -> None:
    """What no plan names is removed from the folder: it must not be what a manifest names."""
    if Registry(folder).entries():
        raise PlanError(f"{folder} is a registry of built kernels: name a folder of its own for candidates")


def _planned_before(folder: Path, arch: str, replaced: set[str]) -> list[PlannedSpec]:
    if not (folder / PLAN).exists():
        return []
    plan = read_plan(folder, drop_stale=True)
    if plan.arch != arch:
        raise PlanError(f"{folder} holds candidates of {plan.arch}: name another folder for {arch}")
    return [spec for spec in plan.specs if spec.spec not in replaced]


def _in_force(spec: KernelSpec, arch: str) -> list[Schedule]:
    """What a build takes today, for the sizes that are timed."""
    return [schedule_for(spec, arch, size_of(spec, problem)) for problem in problems(spec, arch)]


def _listed(spec: KernelSpec, arch: str, in_force: Sequence[Schedule]) -> list[tuple[Schedule, str | None]]:
    """Legal schedules with None, the others with their reason; those in force are timed in any case."""
    found: dict[Schedule, str | None] = dict.fromkeys(in_force)
    for candidate in candidates(spec, arch):
        if candidate.schedule is not None:
            found.setdefault(candidate.schedule, candidate.reason)
    return list(found.items())


def _judged(
    registry: Registry, result: BuildResult | None, error: Exception | None, in_force: Sequence[Schedule]
) -> tuple[str | None, str | None]:
    """(artifact, reason against it)."""
    if result is None:
        return None, f"does not compile: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    meta: dict[str, Any] = registry.load_meta(registry.root / "artifacts" / result.id)
    spilled = sum(usage["spill_stores"] + usage["spill_loads"] for usage in meta.get("resources", []))
    if spilled > MOST_SPILLED and meta["schedule"] not in [schedule.as_dict() for schedule in in_force]:
        return None, f"registers: spills {spilled} bytes"
    return result.id, None


def _planned(
    spec: KernelSpec,
    arch: str,
    heirs: Sequence[KernelSpec],
    found: Sequence[tuple[Schedule, str | None]],
    outcomes: dict[Task, tuple[str | None, str | None]],
) -> PlannedSpec:
    planned = []
    for schedule, reason in found:
        artifact = None
        if reason is None:
            artifact, reason = outcomes[spec, schedule]
        serves = [heir.key for heir in heirs if artifact is not None and rejection(heir, schedule, arch) is None]
        planned.append(PlannedCandidate(schedule.as_dict(), artifact, reason, tuple(serves)))
    sizes = [
        PlannedProblem(size_of(spec, problem), problem.as_dict(), schedule.as_dict())
        for problem, schedule in zip(problems(spec, arch), _in_force(spec, arch), strict=True)
    ]
    return PlannedSpec(spec.key, tuple(heir.key for heir in heirs), tuple(sizes), tuple(planned))


def _remove_others(registry: Registry, plan: Plan) -> None:
    """Artifacts of candidates that are no more: the folder travels."""
    used = {candidate.artifact for spec in plan.specs for candidate in spec.candidates}
    for path in (registry.root / "artifacts").glob("[!.]*"):
        if path.name not in used:
            shutil.rmtree(path)
