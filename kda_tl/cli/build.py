"""kda-tl build: the default set, compiled into a registry."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kda_tl.cli.shared import INTERRUPTED, arch_option, registry_option, size, sized, stored_bytes, table
from kda_tl.ops.plan import counted
from kda_tl.registry import Registry, RegistryError, default_root
from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.kernels import KernelSpec, spec_of_key
from kda_tl.specs.schedules import Schedule, schedule_classes

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar

    from kda_tl.compiler.build import BuildResult

__all__ = ["build"]


class Spec(click.ParamType):
    """A spec as manifests and messages write it."""

    name = "SPEC"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> KernelSpec:
        if isinstance(value, KernelSpec):
            return value
        try:
            return spec_of_key(str(value))
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)


@click.command()
@arch_option("What to compile for. May be given several times.", multiple=True, required=True)
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Worker processes.  [default: one per core]")
@click.option("--spec", "specs", type=Spec(), multiple=True, help="Only this program, e.g. 'chunk_wy[dtype=float16]'; may be "
              "given several times.  [default: the default set of the architecture]")  # fmt: skip
@registry_option("Where the artifacts go.  [default: the first writable folder of the search path]")
def build(arch: tuple[str, ...], jobs: int | None, specs: tuple[KernelSpec, ...], registry: Path | None) -> None:
    """Compile the kernels of one or more architectures.

    Needs TileLang (pip install 'CHECKOUT[build]', with CHECKOUT the path of the repository), a C++ compiler, and for the sm_
    architectures nvcc. No GPU. What the registry has already is not compiled again. The folder is complete: copied to another
    machine and named there with KDA_TL_REGISTRY, it serves with neither TileLang nor a compiler installed.

    Every program is compiled in a worker process; one that fails, or that ends its process, leaves the others alone. Exits 1
    where something could not be compiled; the rest is built all the same. After Ctrl-C, what had finished is kept, and nothing
    half-written is left behind.

    \b
    Examples:
      kda-tl build --arch sm_90
      kda-tl build --arch sm_80 --arch sm_89 --jobs 4 --registry artifacts
    """
    from kda_tl.compiler.errors import BuildError

    failures = []
    try:
        target = Registry(registry if registry is not None else default_root())
        click.echo(f"Registry {target.root}")
        for name in dict.fromkeys(arch):
            try:
                _build_arch(name, specs, jobs, target)
            except (BuildError, RegistryError, OSError) as error:
                failures.append(f"{name}: {error}")
    except RegistryError as error:
        failures.append(str(error))
    except KeyboardInterrupt:
        click.echo("\nStopped. What had finished is kept: the same command builds the rest.", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if failures:
        raise click.ClickException("\n".join(failures))


def _build_arch(arch: str, specs: Sequence[KernelSpec], jobs: int | None, registry: Registry) -> None:
    from kda_tl.compiler.build import build as compile_specs

    specs = list(dict.fromkeys(specs)) or default_specs(arch)
    finished: list[BuildResult] = []
    start = time.perf_counter()
    try:
        with _progress(arch, sum(len(_schedules(spec, arch)) for spec in specs)) as tell:

            def on_finished(result: BuildResult) -> None:
                finished.append(result)
                tell(result)

            compile_specs(arch, specs, registry, jobs=jobs, progress=on_finished, isolate=True)
    finally:
        if finished:
            click.echo(_report(arch, finished, registry, time.perf_counter() - start))


def _schedules(spec: KernelSpec, arch: str) -> dict[Schedule, int | None]:
    """What is built of a spec, and the largest problem that each is for."""
    return {one.schedule: one.up_to for one in schedule_classes(spec, arch)}


def _label(result: BuildResult, arch: str) -> str:
    """The spec, and where several artifacts serve it, the sizes that this one is for."""
    found = _schedules(result.spec, arch)
    if result.schedule not in found:
        return result.spec.key
    return sized(result.spec.key, found[result.schedule], len(found))


@contextmanager
def _progress(arch: str, total: int) -> Iterator[Callable[[BuildResult], None]]:
    """A bar on a terminal, else one line per finished spec; on stderr, so that the table can be kept alone."""
    if sys.stderr.isatty():
        bar: ProgressBar[BuildResult] = click.progressbar(
            length=total, label=f"{arch}, {counted(total, 'program')}", file=sys.stderr, show_eta=False, show_pos=True,
            item_show_func=lambda result: "" if result is None else f"{result.spec.kernel} {_took(result)}",
        )  # fmt: skip
        with bar:
            bar.render_progress()
            yield lambda result: bar.update(1, result)
        return
    count = 0

    def line(result: BuildResult) -> None:
        nonlocal count
        count += 1
        click.echo(f"{arch} {count}/{total}  {_label(result, arch)}  {_took(result)}", err=True)

    yield line


def _took(result: BuildResult) -> str:
    if result.error is not None:
        return "FAILED"
    return f"{result.seconds:.1f} s" if result.compiled else "already built"


def _report(arch: str, results: Sequence[BuildResult], registry: Registry, elapsed: float) -> str:
    row = arch_row(arch)
    rows, total, spilling, failed = [], 0, 0, sum(result.error is not None for result in results)
    for result in sorted(results, key=lambda result: _order(result, arch)):
        if result.error is not None:
            rows.append((_took(result), "-", "-", "-", "-", _label(result, arch)))
            continue
        meta = registry.load_meta(registry.root / "artifacts" / result.id)
        total += stored_bytes(meta)
        spilling += _spills(meta) > 0
        rows.append((_took(result), *_resources(meta), size(stored_bytes(meta)), _label(result, arch)))
    header = ("time", "shared memory", "registers", "spills", "size", "spec")
    lines = [
        f"{arch}: {counted(len(results) - failed, 'program')} in {elapsed:.1f} s" + (f", {failed} failed" if failed else "")
    ]
    lines.append(table(header, rows))
    support = registry.support_dir(arch)
    libraries = f", and {size(stored_bytes(registry.load_meta(support)))} of libraries that all of them load" if support else ""
    lines.append(f"  Together {size(total)}{libraries}.")
    if not row.is_cpu:
        lines.append(
            f"  A block may use {size(row.shared_memory)} of shared memory; {spilling} of {len(results)} spill registers."
        )
    if row.min_driver:
        lines.append(f"  Runs with an NVIDIA driver R{row.min_driver} or newer.")
    if not row.measured:
        lines.append(f"  Never run or timed on such a device: calls take sm_89's artifacts unless KDA_TL_ARCH={arch}.")
    return "\n".join(lines)


def _order(result: BuildResult, arch: str) -> tuple[str, float]:
    up_to = _schedules(result.spec, arch).get(result.schedule) if result.schedule is not None else None
    return result.spec.key, float("inf") if up_to is None else up_to


def _resources(meta: dict[str, Any]) -> tuple[str, str, str]:
    """Shared memory of the hungriest launch, registers of the hungriest kernel, and all spills; the cpu has none of them."""
    launches, kernels = meta.get("launches", []), meta.get("resources", [])
    return (
        size(max(launch["shared_memory"] for launch in launches)) if launches else "-",
        str(max(kernel["registers"] for kernel in kernels)) if kernels else "-",
        size(_spills(meta)) if kernels else "-",
    )


def _spills(meta: dict[str, Any]) -> int:
    return sum(kernel["spill_stores"] + kernel["spill_loads"] for kernel in meta.get("resources", []))
