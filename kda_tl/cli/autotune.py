"""kda-tl autotune: schedules by measurement."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kda_tl.cli.shared import INTERRUPTED, Minutes, NamedPath, arch_option, size, table
from kda_tl.registry import Registry, RegistryError, default_root
from kda_tl.runtime.errors import KdaTlError
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.floors import Problem, cost, floor_ms
from kda_tl.specs.kernels import KernelSpec, spec_of_key
from kda_tl.specs.rules import RULES
from kda_tl.specs.schedule_file import ScheduleFileError
from kda_tl.specs.schedules import SCHEDULES, schedule_classes
from kda_tl.tuning import TimingsError, read_timings
from kda_tl.tuning.apply import Table, select
from kda_tl.tuning.problems_plan import TIMINGS, PlanError, read_plan

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar

__all__ = ["autotune"]

TUNED_KERNELS = ("chunk_scan", "chunk_wy", "intracard_merge", "intracard_pre_scan", "recurrent_decode")
OPTIONS_OF_STEP = {
    "prepare": ("kernels", "op", "jobs"),
    "measure": ("kernels", "op", "budget", "resume"),
    "apply": ("jobs",),
}
RULE_OF_OP = {
    **{f"chunk_{name}": rule for name, rule in RULES.items()},
    **{f"recurrent_{name}": rule for name, rule in RULES.items()},
}

EPILOG = """\b
Examples:
  kda-tl autotune --arch sm_90                       all of it, on a machine with the GPU and a compiler
  kda-tl autotune --arch sm_90 --prepare DIR         anywhere: compiles the candidates; copy DIR to the GPU
  kda-tl autotune --measure DIR                      there; needs neither TileLang nor a compiler
  kda-tl autotune --measure DIR --resume             goes on after Ctrl-C, a crash, or a budget that was too small
  kda-tl autotune --apply DIR                        back in the checkout: schedules/ARCH.json, and the build of it
  kda-tl autotune --report DIR                       what tuning gained, by kernel and size

Exits 0 where every candidate came to an end, be it a bad one; 1 where the budget, a missing device or want of memory left
some; 130 after Ctrl-C.
"""


def _folder_option(name: str, help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(f"--{name}", type=NamedPath(file_okay=False), metavar="DIR", help=help)


@click.command(epilog=EPILOG)
@arch_option("What to tune for.  [default: the arch of DIR's plan]")
@click.option("--kernel", "kernels", type=click.Choice(TUNED_KERNELS), multiple=True, help="Only this kernel; may be "
              "given several times.  [default: all of them]")  # fmt: skip
@click.option("--op", type=click.Choice(sorted(RULE_OF_OP)), help="Only the kernels of this op.")
@click.option("--budget", type=Minutes(min=0.0, min_open=True), default=10.0, show_default=True, metavar="MINUTES",
              help="Of measuring. What is left then is told, and --resume goes on with it.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Keep the timings that DIR has: nothing that is "
              "finished is timed again. Without it they are moved aside, to timings-1.jsonl and so on.")  # fmt: skip
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Worker processes that compile.  [default: one per core]")
@_folder_option("prepare", "Only compile the candidates, into DIR.")
@_folder_option("measure", "Only time the candidates of DIR, on the device here.")
@_folder_option(
    "apply", "Only choose by the timings of DIR, write schedules/ARCH.json, and build what the registry lacks of it."
)
@_folder_option("report", "Only print what the timings of DIR say.")
def autotune(
    arch: str | None, kernels: tuple[str, ...], op: str | None, budget: float, resume: bool, jobs: int | None,
    prepare: Path | None, measure: Path | None, apply: Path | None, report: Path | None,
) -> None:  # fmt: skip
    """Find the fastest schedules by measurement.

    Every legal schedule of every kernel is compiled (--prepare), checked against the float64 reference and timed (--measure);
    the best ones go into schedules/ARCH.json (--apply). With none of the three all of them run, in tuning/ARCH of the registry
    that a build goes to. A candidate that crashes, hangs or computes something else loses its turn and nothing more.
    """
    from kda_tl.compiler.errors import BuildError
    from kda_tl.tuning.measure import MeasureError

    given = [folder for folder in (prepare, measure, apply, report) if folder is not None]
    if len(given) > 1:
        raise click.UsageError("--prepare, --measure, --apply and --report are steps: give one of them, or none for all")
    if arch is None and (not given or prepare is not None):
        raise click.UsageError("--arch is needed to compile candidates")
    steps = {"prepare": prepare, "measure": measure, "apply": apply, "report": report}
    step = next((name for name, one in steps.items() if one is not None), None)
    _refuse_idle_options(step)
    try:
        folder = given[0] if given else default_root() / "tuning" / str(arch)
        if given and prepare is None and arch is not None and read_plan(folder).arch != arch:
            raise PlanError(f"{folder} holds candidates of {read_plan(folder).arch}, not of {arch}")
        left = 0
        if not given or prepare is not None:
            assert arch is not None
            _prepare(arch, folder, _selected(arch, kernels, op), jobs)
        if not given or measure is not None:
            left = _measure(folder, kernels, op, budget, resume)
        if not given or apply is not None:
            _apply(folder, jobs)
        if not given or report is not None or measure is not None:
            click.echo(_report(folder))
    except (BuildError, KdaTlError, MeasureError, PlanError, RegistryError, ScheduleFileError, TimingsError, OSError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        how = " with --resume" if step in (None, "measure") else ""
        click.echo(f"\nStopped. What had finished is kept: the same command{how} does the rest.", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if left:
        command = f"kda-tl autotune --measure {shlex.quote(str(folder))} --resume"
        raise click.ClickException(f"{left} candidates are not timed yet: `{command}`")


def _refuse_idle_options(step: str | None) -> None:
    """Raises click.UsageError for an option that this step does not look at."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name, given = str(parameter.name), context.get_parameter_source(str(parameter.name))
        users = [user for user, options in OPTIONS_OF_STEP.items() if name in options]
        if users and step is not None and step not in users and given is ParameterSource.COMMANDLINE:
            of = " and ".join(f"--{user}" for user in users)
            raise click.UsageError(f"{parameter.opts[-1]} is an option of {of}: it changes nothing with --{step}")


def _selected(arch: str, kernels: Sequence[str], op: str | None) -> list[KernelSpec]:
    """Raises click.UsageError where no kernel is meant."""
    found = [
        spec for spec in default_specs(arch) if (not kernels or spec.kernel in kernels) and (op is None or _serves(spec, op))
    ]
    if not found:
        which = f"kernel {' or '.join(kernels)}" if kernels else "kernel"
        raise click.UsageError(f"no {which} of {arch} serves --op {op}")
    return found


def _serves(spec: KernelSpec, op: str) -> bool:
    """Whether an op may launch the kernel of a spec."""
    rule, prefix = RULE_OF_OP[op], op.partition("_")[0]
    kernels = {"chunk": ("chunk_", "intracard_"), "recurrent": ("recurrent_",)}[prefix]
    fields = spec.as_dict()
    return spec.kernel.startswith(kernels) and all(
        name not in fields or fields[name] == value for name, value in rule.as_dict().items()
    )


def _prepare(arch: str, folder: Path, specs: Sequence[KernelSpec], jobs: int | None) -> None:
    from kda_tl.tuning.prepare import prepare

    with _progress(f"{arch}, compiling") as tell:
        plan = prepare(
            arch, folder, specs, jobs,
            lambda spec, schedule, told, done, total: tell(done, total, f"{_changed(spec.key, schedule.as_dict())}  {told}"),
        )  # fmt: skip
    rows = [
        (str(len(legal)), str(len(spec.candidates) - len(legal)), str(len(spec.problems)), str(len(spec.inherits)), spec.spec)
        for spec in plan.specs
        for legal in [[one for one in spec.candidates if one.artifact is not None]]
    ]  # fmt: skip
    click.echo(table(("candidates", "rejected", "sizes", "siblings", "spec"), rows))
    stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    click.echo(f"  {folder}: {size(stored)}. Siblings inherit the choices; {len(plan.untuned)} specs keep their schedules.")


def _measure(folder: Path, kernels: Sequence[str], op: str | None, budget: float, resume: bool) -> int:
    from kda_tl.tuning.measure import measure

    plan = read_plan(folder)
    only = {spec.key for spec in _selected(plan.arch, kernels, op)} if kernels or op else None
    if only is not None and only.isdisjoint(key for spec in plan.specs for key in (spec.spec, *spec.inherits)):
        planned = ", ".join(sorted({spec.spec.partition("[")[0] for spec in plan.specs}))
        raise PlanError(f"{folder} holds no candidates of what --kernel and --op name, only of {planned}: nothing is timed")
    with _progress(f"{plan.arch}, timing") as tell:

        def on_record(record: dict[str, Any], done: int, total: int) -> None:
            took = record["status"] if record["time_ms"] is None else f"{record['time_ms']:.4f} ms {record['status']}"
            tell(done, total, f"{_changed(record['spec'], record['schedule'])}, size {record['size']}  {took}")

        summary = measure(folder, resume=resume, budget_s=budget * 60, only=only, progress=on_record)
    counts = ", ".join(f"{count} {status}" for status, count in sorted(summary.counts.items())) or "nothing new"
    click.echo(f"{summary.device}: {counts} in {summary.seconds:.0f} s, in {folder / TIMINGS}")
    for problem in summary.not_made:
        click.echo(f"  Candidates are left, for the tensors of their problem could not be made: {problem}")
    return summary.left


def _apply(folder: Path, jobs: int | None) -> None:
    from kda_tl.compiler.build import build
    from kda_tl.tuning import apply

    plan = read_plan(folder)
    if not (folder / TIMINGS).exists():
        raise TimingsError(_not_measured(folder))
    served = {(heir, json.dumps(dict(one.schedule), sort_keys=True))
              for spec in plan.specs for one in spec.candidates for heir in one.serves}  # fmt: skip
    applied = apply(
        folder / TIMINGS, plan.arch, heirs={spec.spec: spec.inherits for spec in plan.specs},
        serves=lambda heir, schedule: (heir, json.dumps(dict(schedule), sort_keys=True)) in served,
        planned=plan.keys,
    )  # fmt: skip
    click.echo(str(applied))
    # All specs of the plan, not the changed ones alone: a build that was stopped goes on, and one that is complete is read.
    keys = dict.fromkeys([*(key for spec in plan.specs for key in (spec.spec, *spec.inherits)), *applied.changed])
    registry = Registry(default_root())
    with _progress(f"{plan.arch}, building") as tell:
        done, specs = itertools.count(1), [spec_of_key(key) for key in keys]
        total = sum(len({one.schedule for one in schedule_classes(spec, plan.arch)}) for spec in specs)
        results = build(
            plan.arch, specs, registry, jobs=jobs, isolate=True,
            progress=lambda result: tell(next(done), total, result.spec.key),
        )  # fmt: skip
    compiled = sum(result.compiled for result in results)
    click.echo(f"  Built into {registry.root}: {compiled} compiled, {len(results) - compiled} were there.")


def _changed(key: str, schedule: Mapping[str, object]) -> str:
    """A kernel and what a schedule has of its own, as `chunk_scan(block_v=32, stages=3)`."""
    kernel = key.partition("[")[0]
    default = SCHEDULES[kernel]().as_dict()
    fields = ", ".join(f"{name}={value}" for name, value in schedule.items() if value != default.get(name))
    return f"{kernel}({fields})"


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar with the time left on a terminal, else one line per step; on stderr, so that tables can be kept alone."""
    began = time.monotonic()
    bar: ProgressBar[str] | None = None

    def tell(done: int, total: int, text: str) -> None:
        nonlocal bar
        if sys.stderr.isatty():
            if bar is None:
                bar = click.progressbar(length=total, label=label, file=sys.stderr, show_pos=True, show_eta=True,
                                        item_show_func=lambda item: item and item[:60])  # fmt: skip
                bar.render_progress()
            bar.update(1, text)
            return
        left = (time.monotonic() - began) / max(done, 1) * (total - done)
        click.echo(f"{label} {done}/{total}, about {left / 60:.1f} min left  {text}", err=True)

    try:
        yield tell
    finally:
        if bar is not None:
            bar.render_finish()


def _report(folder: Path) -> str:
    """Per spec and size: the time of the schedule that was in force, the best one's, and that over the floor. Of the records
    that --apply goes by."""
    plan, rows = read_plan(folder), []
    if not (folder / TIMINGS).exists():
        return _not_measured(folder)
    by_spec, notes = select(read_timings(folder / TIMINGS), plan.arch, plan.keys)
    for device in sorted({record.device for timed in by_spec.values() for _, record in timed}):
        for key, timed in by_spec.items():
            here = [one for one in timed if one[1].device == device]
            right, stopped = Table.of(here), Table.of(here, stopped=True)
            for at in right.sizes:
                count = sum(at in times for times in stopped.times.values())
                rows.append((device, str(at), *_row(key, right, at, count, plan.arch), key))
    header = ("device", "size", "in force ms", "best ms", "gain", "over floor", "timed", "best schedule", "spec")
    told = table(header, rows) if rows else f"No timings of the plan's candidates in {folder / TIMINGS}."
    return "\n".join([told, *(f"  {note}" for note in notes)])


def _not_measured(folder: Path) -> str:
    return f"{folder} has no timings yet: `kda-tl autotune --measure {shlex.quote(str(folder))}`"


def _row(key: str, right: Table, at: int, timed: int, arch: str) -> tuple[str, ...]:
    best = right.best(at)
    base = right.times[right.baselines[at]][at] if at in right.baselines else None
    time_ms, problem = right.times[best][at], right.records[best, at].problem
    floor = floor_ms(cost(spec_of_key(key), Problem(**problem), best), arch)
    return (
        "-" if base is None else f"{base:.4f}",
        f"{time_ms:.4f}",
        "-" if base is None else f"{base / time_ms:.2f}x",
        "-" if floor is None else f"{time_ms / floor:.2f}",
        str(timed),
        _changed(key, best.as_dict()),
    )
