"""The default set, or any list of specs, for one arch: traced, compiled in worker processes, stored and published."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import kda_tl
from kda_tl.compiler.errors import BuildError
from kda_tl.compiler.lower import RECIPE, lower_program, program_text
from kda_tl.compiler.support import put_support
from kda_tl.compiler.toolchain import cxx_compiler, nvcc_compiler, require_tilelang, version_line
from kda_tl.compiler.workers import Outcome, run_tasks
from kda_tl.registry import ARTIFACT_FORMAT, Registry, RegistryError, is_writable
from kda_tl.registry.locks import remove_stale
from kda_tl.specs.archs import Arch
from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.kernels import KernelSpec
from kda_tl.specs.schedules import Schedule, SizeClass, schedule_classes

__all__ = ["BuildResult", "build", "compile_each", "compiler_versions"]

Task = tuple[KernelSpec, Schedule]


@dataclass(frozen=True)
class BuildResult:
    """What one spec with one schedule came to: `seconds` is 0 where the registry had the artifact already; `error` is None
    where it has it now, and `id` is empty otherwise."""

    spec: KernelSpec
    id: str
    seconds: float
    compiled: bool
    error: str | None = None
    schedule: Schedule | None = None


def build(
    arch: str,
    specs: Sequence[KernelSpec],
    registry: Registry,
    jobs: int | None = None,
    progress: Callable[[BuildResult], None] | None = None,
    schedules: Mapping[KernelSpec, Schedule | Sequence[SizeClass]] | None = None,
    isolate: bool | None = None,
) -> list[BuildResult]:
    """Compiles what the registry lacks and publishes the whole list in its manifest.

    A registry that has everything is only read: it may be on a read-only file system. After an interrupt, and where some specs
    fail, what was finished is stored and published all the same, and nothing else is left behind.

    Args:
        arch: a name of `kda_tl.specs.archs`.
        jobs: worker processes, default one per core.
        progress: called once per spec and schedule, in the order in which they finish; those that failed have an `error`.
        schedules: for these specs, in place of what schedules/ARCH.json says: one for every size, or size classes.
        isolate: whether specs compile in child processes, which may die without ending this one; default: with 2 jobs or more.

    Raises:
        BuildError: specs did not compile; the message names each of them.
        ManifestError: the registry's manifest of `arch` is damaged. Nothing was compiled.
        RegistryError: the registry lacks specs, and cannot be written. Nothing was compiled.
    """
    require_tilelang()
    row = arch_row(arch)
    # What would stop it at the end shows before an hour of compiling rather than after it.
    published = registry.manifest(arch).artifacts
    if not is_writable(registry.root) and any(spec.key not in published for spec in specs):
        raise RegistryError(f"{registry.root} cannot be written: name another folder with --registry or KDA_TL_REGISTRY")
    classes = {spec: _classes((schedules or {}).get(spec) or schedule_classes(spec, arch)) for spec in specs}
    tasks = list(dict.fromkeys((spec, one.schedule) for spec, sized in classes.items() for one in sized))
    _versions(row)  # so does a compiler that is missing, or too old
    jobs = max(1, min(jobs or os.cpu_count() or 1, len(tasks)))
    isolate = jobs > 1 if isolate is None else isolate
    support = None if row.is_cpu else put_support(registry)
    results: list[BuildResult] = []
    failures: list[str] = []
    compile_one = partial(_build_one, arch=arch, root=str(registry.root))
    outcomes = run_tasks(compile_one, tasks, jobs) if isolate else _in_this_process(compile_one, tasks)
    try:
        with closing(outcomes):
            for outcome in outcomes:
                result = outcome.result
                if result is None:
                    spec, schedule = outcome.task
                    failures.append(_named(spec, arch, str(outcome.error)))
                    result = BuildResult(spec, "", 0.0, compiled=False, error=failures[-1], schedule=schedule)
                else:
                    results.append(result)
                if progress is not None:
                    progress(result)
    finally:
        remove_stale(registry.root / "artifacts")  # of a worker that was stopped while it wrote
        if results:
            _publish(registry, arch, classes, results, support)
    if failures:
        raise BuildError("\n".join(failures))
    return sorted(results, key=lambda result: result.spec.key)


def _classes(given: Schedule | Sequence[SizeClass]) -> tuple[SizeClass, ...]:
    return (SizeClass(None, given, "given"),) if isinstance(given, Schedule) else tuple(given)


def _in_this_process(
    function: Callable[[Task], BuildResult], tasks: Sequence[Task]
) -> Generator[Outcome[Task, BuildResult], None, None]:
    for task in tasks:
        try:
            yield Outcome(task, function(task), None)
        except BuildError as error:
            yield Outcome(task, None, error)


def _named(spec: KernelSpec, arch: str, message: str) -> str:
    prefix = f"{spec.key} for {arch}: "
    return message if message.startswith(prefix) else prefix + message


def _publish(
    registry: Registry,
    arch: str,
    classes: Mapping[KernelSpec, Sequence[SizeClass]],
    results: Sequence[BuildResult],
    support: str | None,
) -> None:
    """Specs of which every class was built. Entries that the manifest has already stay as they are, their date included."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    ids = {(result.spec, result.schedule): result.id for result in results}
    published = registry.manifest(arch).artifacts
    entries: dict[str, Mapping[str, Any]] = {}
    for spec, sized in classes.items():
        if all((spec, one.schedule) in ids for one in sized):
            listed = [{"up_to": one.up_to, "id": ids[spec, one.schedule], "source": one.source} for one in sized]
            entry = {"kernel": spec.kernel, "classes": listed}
            before = published.get(spec.key, {})
            entries[spec.key] = before if {**before, **entry} == before else {**entry, "built": today}
    registry.publish(arch, entries, support)


def _build_one(task: Task, arch: str, root: str) -> BuildResult:
    """One spec, in whichever process: trace, hash, and compile unless the registry has that hash."""
    start = time.perf_counter()
    spec, schedule = task
    row = arch_row(arch)
    registry = Registry(root)
    try:
        program = _program(spec, schedule, arch)
    except Exception as error:
        raise BuildError(_named(spec, arch, str(error) or type(error).__name__)) from None
    identity = _identity(program, spec, schedule, row)
    if registry.has("artifacts", identity):  # a damaged one is quarantined by the look at it, and then built like a missing one
        return BuildResult(spec, identity, 0.0, compiled=False, schedule=schedule)
    compiled = lower_program(program, row, spec.key)
    meta = {
        **compiled.meta,
        "format": ARTIFACT_FORMAT,
        "spec": spec.as_dict(),
        "spec_key": spec.key,
        "schedule": schedule.as_dict(),
        "arch": arch,
        "versions": _versions(row),
    }
    registry.put("artifacts", identity, compiled.files, meta)
    return BuildResult(spec, identity, time.perf_counter() - start, compiled=True, schedule=schedule)


def _program(spec: KernelSpec, schedule: Schedule, arch: str) -> Any:
    return importlib.import_module(f"kda_tl.kernels.{spec.kernel}").program(spec, schedule, arch)


def _versions(row: Arch) -> dict[str, str]:
    compilers = {} if row.is_cpu else {"nvcc": version_line(nvcc_compiler())}
    return {"kda_tl": kda_tl.__version__, "tilelang": require_tilelang(), "cxx": version_line(cxx_compiler()), **compilers}


def _identity(program: Any, spec: KernelSpec, schedule: Schedule, row: Arch) -> str:
    """The hash of everything that shapes the artifact."""
    shaping = [
        program_text(program),
        spec.key,
        schedule.as_dict(),
        row.name,
        row.compiler_arch,
        _versions(row),
        RECIPE,
        ARTIFACT_FORMAT,
    ]
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:32]


def compile_each(
    arch: str, tasks: Sequence[Task], registry: Registry, jobs: int | None = None
) -> Iterator[Outcome[Task, BuildResult]]:
    """Stores the artifact of each (spec, schedule), several schedules of one spec too, and publishes none of them: the manifest
    names only the libraries that they load with. Outcomes come in the order in which they finish, failures among them; when the
    caller stops early, what had finished is kept.

    Raises:
        BuildError: TileLang or a compiler is missing.
    """
    require_tilelang()
    row = arch_row(arch)
    _versions(row)
    if not row.is_cpu:
        registry.publish(arch, {}, put_support(registry))
    compile_one = partial(_build_one, arch=arch, root=str(registry.root))
    try:
        with closing(run_tasks(compile_one, tasks, max(1, min(jobs or os.cpu_count() or 1, len(tasks))))) as outcomes:
            yield from outcomes
    finally:
        remove_stale(registry.root / "artifacts")


def compiler_versions(arch: str) -> dict[str, str]:
    """Of the package, TileLang and the compilers, as artifacts of `arch` record them."""
    return _versions(arch_row(arch))
