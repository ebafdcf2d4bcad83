"""The default set, or any list of specs, for one arch: traced, compiled in worker processes, stored and published."""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import kda_tl
from kda_tl.compiler.errors import BuildError
from kda_tl.compiler.lower import RECIPE, lower_program, program_text
from kda_tl.compiler.support import put_support
from kda_tl.compiler.toolchain import cxx_compiler, nvcc_compiler, require_tilelang, version_line
from kda_tl.registry import DamagedArtifact, Registry
from kda_tl.specs.archs import Arch
from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.kernels import KernelSpec
from kda_tl.specs.schedules import Schedule, schedule_for

__all__ = ["BuildResult", "build"]

ARTIFACT_FORMAT = 1  # of meta.json; runtime.loader reads this one


@dataclass(frozen=True)
class BuildResult:
    """What one spec came to: `seconds` is 0 where the registry had the artifact already."""

    spec: KernelSpec
    id: str
    seconds: float
    compiled: bool


def build(
    arch: str,
    specs: Sequence[KernelSpec],
    registry: Registry,
    jobs: int | None = None,
    progress: Callable[[BuildResult], None] | None = None,
    schedules: Mapping[KernelSpec, Schedule] | None = None,
) -> list[BuildResult]:
    """Compiles what the registry lacks and publishes the whole list in its manifest.

    Args:
        arch: a name of `kda_tl.specs.archs`.
        jobs: worker processes, default one per core. One job compiles in this process.
        progress: called once per finished spec.
        schedules: for these specs, in place of what schedules/ARCH.json says.

    Raises:
        BuildError: a spec did not compile. What was finished before is stored and published all the same.
    """
    require_tilelang()
    row = arch_row(arch)
    chosen = {spec: (schedules or {}).get(spec) or schedule_for(spec, arch) for spec in specs}
    workers = max(1, min(jobs or os.cpu_count() or 1, len(specs)))
    support = None if row.is_cpu else put_support(registry)
    results: list[BuildResult] = []
    failures: list[BaseException] = []

    def finished(result: BuildResult) -> None:
        results.append(result)
        if progress is not None:
            progress(result)

    try:
        if workers == 1:
            for spec in specs:
                try:
                    finished(_build_one(spec, chosen[spec], arch, str(registry.root)))
                except BuildError as error:
                    failures.append(error)
        else:
            # spawn: TileLang and torch start threads, which a fork would not survive. Workers die of an interrupt in silence.
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))
            try:
                for future in as_completed(
                    [pool.submit(_build_one, spec, chosen[spec], arch, str(registry.root)) for spec in specs]
                ):
                    if (failure := future.exception()) is not None:
                        failures.append(failure)
                    else:
                        finished(future.result())
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        if results:
            today = time.strftime("%Y-%m-%d", time.gmtime())
            entries = {r.spec.key: {"id": r.id, "kernel": r.spec.kernel, "built": today} for r in results}
            published = registry.manifest(arch).artifacts
            kept = {key: published[key] for key in entries if key in published and published[key]["id"] == entries[key]["id"]}
            registry.publish(arch, {**entries, **kept}, support)
    if failures:
        raise BuildError("\n".join(map(str, failures))) from failures[0]
    return sorted(results, key=lambda result: result.spec.key)


def _build_one(spec: KernelSpec, schedule: Schedule, arch: str, root: str) -> BuildResult:
    """One spec, in whichever process: trace, hash, and compile unless the registry has that hash."""
    start = time.perf_counter()
    row = arch_row(arch)
    registry = Registry(root)
    try:
        program = _program(spec, schedule, arch)
    except Exception as error:
        raise BuildError(f"{spec.key} for {arch}: {error}") from None
    identity = _identity(program, spec, schedule, row)
    path = registry.root / "artifacts" / identity
    if path.is_dir():
        # A damaged artifact is quarantined by the check, and then rebuilt like a missing one.
        with suppress(DamagedArtifact):
            registry.verify(path)
            return BuildResult(spec, identity, 0.0, compiled=False)
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
    return BuildResult(spec, identity, time.perf_counter() - start, compiled=True)


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
