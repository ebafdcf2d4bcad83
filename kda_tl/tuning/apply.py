"""From timings to schedules/ARCH.json: the best schedule of each spec by size, in few classes.

The choice depends on the timings alone, not on the clock, nor on what was chosen before: equal timings give equal bytes.
"""

from __future__ import annotations

import functools
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_tl.specs.kernels import spec_of_key
from kda_tl.specs.schedule_file import MAX_CLASSES, ScheduleFileError, class_as_json, make_schedule, read_entries, write_entries
from kda_tl.specs.schedules import Measured, Schedule, SizeClass, schedules_folder
from kda_tl.tuning.timings import Key, Timing, TimingsError, read_timings

__all__ = ["TOLERANCE", "Applied", "Gain", "Table", "apply", "select"]

TOLERANCE = 1.02
"""Times this close to the best count as the best where that saves a class. No choice is further above what was in force."""
HEIR_TOLERANCE = 1.2
"""Siblings that were not timed have coarser classes, by the times of the spec that was: each one is a program more. A choice
may be this far above the best, and above what was in force. So far out, times of clear losers count, of fewer rounds."""

Serves = Callable[[str, Mapping[str, Any]], bool]
Timed = tuple[Schedule, Timing]


@dataclass(frozen=True)
class Gain:
    """Of one spec: its measured sizes, smallest first, and milliseconds at each, before (None: not measured) and now."""

    spec: str
    sizes: tuple[int, ...]
    before: tuple[float | None, ...]
    now: tuple[float, ...]
    classes: tuple[SizeClass, ...]

    @property
    def speedup(self) -> float | None:
        """Geometric mean over the sizes of which both are known."""
        ratios = [old / new for old, new in zip(self.before, self.now) if old is not None]
        return _mean(ratios) if ratios else None


@dataclass(frozen=True)
class Applied:
    """What became of a timings file. `str` is a table of gains.

    Attributes:
        path: the schedules file.
        gains: of the specs that were measured.
        inherited: keys of the specs that took their schedules from one that was measured.
        changed: keys of those whose entry is another one than before.
        notes: timings that were not used, entries that were left as they were, and why.
    """

    path: Path
    gains: tuple[Gain, ...]
    inherited: tuple[str, ...]
    changed: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("classes", "before ms", "now ms", "speed-up", "spec")]
        for gain in self.gains:
            known = [pair for pair in zip(gain.before, gain.now) if pair[0] is not None]
            before = f"{_mean([old for old, _ in known if old is not None]):.4f}" if known else "-"
            now = f"{_mean([new for _, new in known] or list(gain.now)):.4f}"
            speedup = "-" if gain.speedup is None else f"{gain.speedup:.2f}x"
            rows.append((str(len(gain.classes)), before, now, speedup, gain.spec))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  " + "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths)), row[4]]) for row in rows]
        heirs, entries = len(self.inherited), len(self.changed)
        inherited = f", {heirs} spec{'s' * (heirs != 1)} took over a sibling's schedules" if heirs else ""
        changed = f"{entries} {'entry' if entries == 1 else 'entries'} changed"
        lines.append(f"  {self.path}: {changed}{inherited}. Milliseconds are geometric means over sizes.")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def apply(
    timings: Path,
    arch: str,
    folder: Path | None = None,
    *,
    device: str | None = None,
    heirs: Mapping[str, Sequence[str]] | None = None,
    serves: Serves | None = None,
    planned: Collection[Key] | None = None,
) -> Applied:
    """Writes the choices that `timings` make into the schedules file of `arch`, at once; entries of other specs stay.

    Per spec and measured size the fastest schedule wins; then neighbouring sizes share a class where one schedule is within 2 %
    of the best at each, and never more than 4 classes are left. A class ends at the geometric mean of the measured sizes on
    either side. A schedule that was wrong or crashed anywhere is out, and so is one that is over 2 % slower than the schedule
    in force at a size. Of several records of a candidate and problem the last one counts.

    Args:
        timings: `kda_tl.tuning.timings`.
        folder: of schedules files; default that of the checkout, or of the installed package.
        device: whose records count; default: that of all of them, of which there must be one.
        heirs: key of a measured spec -> keys of those that take its schedules over, as a model, in classes within 20 %.
        serves: serves(heir, schedule): whether a schedule can be built for an heir; default: all can.
        planned: what was to be measured: where one of the sizes of a spec is missing, its entry stays. Records of anything
            else are stale and do not count. Default: all count.

    Raises:
        TimingsError: the timings cannot be used, or are of several devices.
        ScheduleFileError: the schedules file cannot be read, so that what it holds would be lost; or it cannot be written.
        ValueError: a key of `heirs` is no spec.
    """
    path = (schedules_folder() if folder is None else folder) / f"{arch}.json"
    before = read_entries(path, arch) if path.exists() else {}
    selected, notes = select(read_timings(timings), arch, planned)
    by_spec = _of_device(selected, timings, device)
    sizes: dict[str, set[int]] = {}
    for key, size, *_ in planned or ():
        sizes.setdefault(key, set()).add(size)
    entries, gains, inherited = dict(before), [], []
    for key, timed in by_spec.items():
        table, coarse = Table.of(timed), Table.of(timed, stopped=True)
        missing = sorted(sizes.get(key, set()) - set(table.sizes))
        chosen = table.choose()
        if not table.sizes:
            became = ", ".join(f"{count} {status}" for status, count in sorted(table.counts.items()))
            notes.append(f"{key}: no schedule is left, of what was timed {became}, and the records say why: left as it was")
            continue
        if missing:
            notes.append(f"{key}: no times yet of size {', '.join(map(str, missing))}: left as it was")
            continue
        if chosen is None:
            notes.append(f"{key}: no schedules serve all sizes and are as fast as those in force: left as it was")
            continue
        gains.append(table.gain(key, chosen))
        entries[key] = {"classes": [class_as_json(one) for one in gains[-1].classes]}
        for heir in (heirs or {}).get(key, ()):
            spec_of_key(heir)
            if heir in by_spec:
                continue  # it has times of its own
            own = coarse.choose(None if serves is None else functools.partial(_serves, serves, heir), HEIR_TOLERANCE)
            if own is not None:
                classes = [SizeClass(up_to, schedule, "model") for up_to, schedule in coarse.bounds(own)]
                entries[heir] = {"classes": [class_as_json(one) for one in classes]}
                inherited.append(heir)
    changed = sorted(key for key in entries if entries[key] != before.get(key))
    if changed:
        try:
            write_entries(path, arch, entries)
        except OSError as error:
            reason = f"cannot be written ({error.strerror}), and is as it was: mend that, and apply again"
            raise ScheduleFileError(f"{path} {reason}") from None
    return Applied(path, tuple(gains), tuple(sorted(inherited)), tuple(changed), tuple(notes))


def _serves(serves: Serves, heir: str, schedule: Schedule) -> bool:
    return serves(heir, schedule.as_dict())


def select(
    records: Sequence[Timing], arch: str, planned: Collection[Key] | None = None
) -> tuple[dict[str, list[Timed]], list[str]]:
    """(what counts by spec, notes on what does not): candidates that ran, which this version and the plan, if there is one,
    still have."""
    notes, by_spec, found = [], dict[str, list[Timing]](), dict[str, list[Timed]]()
    ran = [record for record in records if record.status != "rejected"]
    current = ran if planned is None else [record for record in ran if record.key in planned]
    if stale := len(ran) - len(current):
        count = f"{stale} stale {'record' if stale == 1 else 'records'}"
        what = "of candidates or sizes that the plan no longer has"
        notes.append(f"{count} passed over, {what}: --measure with --resume times those that it has")
    for record in current:
        by_spec.setdefault(record.spec, []).append(record)
    for key, own in sorted(by_spec.items()):
        try:
            kernel = spec_of_key(key).kernel
        except ValueError as error:
            notes.append(f"{key}: timings of no spec of this version, {error}")
            continue
        unknown = []
        for record in own:
            try:
                found.setdefault(key, []).append((make_schedule(kernel, dict(record.schedule), arch), record))
            except ValueError as error:
                unknown.append(str(error))
        if unknown:
            notes.append(f"{key}: {len(unknown)} timings of schedules that this version does not have, {unknown[0]}")
    return found, notes


def _of_device(by_spec: Mapping[str, Sequence[Timed]], path: Path, device: str | None) -> dict[str, list[Timed]]:
    devices = sorted({record.device for timed in by_spec.values() for _, record in timed})
    if device is None and len(devices) > 1:
        one = f"`kda-tl autotune --measure {shlex.quote(str(path.parent))}` on the one that counts moves these aside"
        raise TimingsError(
            f"{path}: timings of {' and of '.join(devices)}, and those of one device are to choose: {one} and times anew; or "
            f"measure in a copy of the folder that has no {path.name}, one for each device"
        )
    if device is not None and device not in devices:
        raise TimingsError(f"{path}: no timings of {device}, but of {', '.join(devices) or 'nothing'}")
    kept = {key: [one for one in timed if device in (None, one[1].device)] for key, timed in by_spec.items()}
    return {key: timed for key, timed in kept.items() if timed}


Group = tuple[int, int, Schedule]
"""First size, last size + 1, by index, and what serves them."""


@dataclass(frozen=True)
class Table:
    """Of one spec on one device: sizes, rising; time_ms of the schedules that are right everywhere, by size; what was in
    force; the record of each; how many candidates and problems came to which end."""

    sizes: tuple[int, ...]
    times: Mapping[Schedule, Mapping[int, float]]
    baselines: Mapping[int, Schedule]
    records: Mapping[tuple[Schedule, int], Timing]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, timed: Sequence[Timed], stopped: bool = False) -> Table:
        """Of several records of a schedule and problem the last one counts. stopped: whether losers that were stopped early
        have times, too."""
        counted = ("ok", "stopped") if stopped else ("ok",)
        last: dict[tuple[Schedule, int, str], Timing] = {}
        for schedule, record in timed:
            key = (schedule, record.size, json.dumps(record.problem, sort_keys=True))
            last.pop(key, None)  # to the end: records of a size are in the order of their last measurement
            last[key] = record
        out = {schedule for (schedule, _, _), record in last.items() if record.status in ("wrong", "crashed")}
        ok = {key: record for key, record in last.items() if record.status in counted and record.time_ms and key[0] not in out}
        problems: dict[int, set[str]] = {}
        for _, size, problem in ok:
            problems.setdefault(size, set()).add(problem)
        times: dict[Schedule, dict[int, float]] = {}
        latest: dict[tuple[Schedule, int], Timing] = {}
        baselines: dict[int, Schedule] = {}
        for (schedule, size, _), record in ok.items():
            own = [ok.get((schedule, size, problem)) for problem in sorted(problems[size])]
            if all(one is not None for one in own):
                times.setdefault(schedule, {})[size] = _mean([float(one.time_ms or 0) for one in own if one is not None])
                latest[schedule, size] = record
                if record.baseline:
                    baselines[size] = schedule
        sizes = tuple(sorted({size for by_size in times.values() for size in by_size}))
        return cls(sizes, times, baselines, latest, Counter(record.status for record in last.values()))

    def best(self, size: int) -> Schedule:
        """The fastest at one of the sizes."""
        return min((s for s, times in self.times.items() if size in times), key=lambda s: (self.times[s][size], _text(s)))

    def choose(self, allowed: Callable[[Schedule], bool] | None = None, near: float = TOLERANCE) -> list[Group] | None:
        """The fewest classes of schedules as `near` the best; where these would be over MAX_CLASSES, the fastest ones that keep
        up with what was in force. None where there are none such, or nothing was measured."""
        usable = sorted((s for s in self.times if allowed is None or allowed(s)), key=_text)
        best = {size: min((self.times[s][size] for s in usable if size in self.times[s]), default=0.0) for size in self.sizes}
        if not self.sizes or not all(best.values()):
            return None
        in_force = {size: self.times[schedule][size] for size, schedule in self.baselines.items()}
        limit = {size: near * min(best[size], in_force.get(size, math.inf)) for size in self.sizes}
        for most in range(1, MAX_CLASSES + 1):
            found = self._cut(usable, limit, most)
            if found is not None:
                return found
        return self._cut(usable, {size: TOLERANCE * in_force.get(size, math.inf) for size in self.sizes}, MAX_CLASSES)

    def _cut(self, usable: Sequence[Schedule], limit: Mapping[int, float], most: int) -> list[Group] | None:
        """The fastest cut into at most `most` groups of neighbouring sizes, each with a schedule that is within `limit`."""

        @functools.cache
        def group(first: int, end: int) -> tuple[float, Schedule] | None:
            found: tuple[float, Schedule] | None = None
            for schedule in usable:
                times = self.times[schedule]
                if all(size in times and times[size] <= limit[size] for size in self.sizes[first:end]):
                    cost = math.fsum(math.log(times[size]) for size in self.sizes[first:end])
                    if found is None or cost < found[0]:
                        found = cost, schedule
            return found

        @functools.cache
        def cheapest(first: int, left: int) -> tuple[float, tuple[Group, ...]] | None:
            if first == len(self.sizes):
                return 0.0, ()
            found: tuple[float, tuple[Group, ...]] | None = None
            for end in range(len(self.sizes), first, -1) if left else ():
                own, rest = group(first, end), cheapest(end, left - 1)
                if own is not None and rest is not None and (found is None or own[0] + rest[0] < found[0]):
                    found = own[0] + rest[0], ((first, end, own[1]), *rest[1])
            return found

        found = cheapest(0, most)
        if found is None:
            return None
        merged: list[Group] = []
        for first, end, schedule in found[1]:  # parts of one schedule may add up to an ulp less than the whole
            if merged and merged[-1][2] == schedule:
                first = merged.pop()[0]
            merged.append((first, end, schedule))
        return merged

    def bounds(self, groups: Sequence[Group]) -> Iterator[tuple[int | None, Schedule]]:
        """(up_to, schedule) of each class."""
        for _, end, schedule in groups:
            last = end == len(self.sizes)
            yield None if last else math.isqrt(self.sizes[end - 1] * self.sizes[end]), schedule

    def gain(self, key: str, groups: Sequence[Group]) -> Gain:
        classes = [
            SizeClass(up_to, schedule, "measured", self._measured(group))
            for group, (up_to, schedule) in zip(groups, self.bounds(groups))
        ]
        now = tuple(self.times[schedule][size] for first, end, schedule in groups for size in self.sizes[first:end])
        before = tuple(
            self.times[self.baselines[size]][size] if size in self.baselines else None for size in self.sizes
        )  # fmt: skip
        return Gain(key, self.sizes, before, now, tuple(classes))

    def _measured(self, group: Group) -> Measured:
        _, end, schedule = group
        size = self.sizes[end - 1]
        record = self.records[schedule, size]
        versions = tuple(sorted((name, str(version)) for name, version in record.versions.items()))
        others = [s for s, times in self.times.items() if s != schedule and size in times]
        second = min(others, key=lambda s: (self.times[s][size], _text(s)), default=None)
        runner_up = None if second is None else (second, _rounded(self.times[second][size]))
        return Measured(record.device, size, _rounded(self.times[schedule][size]), versions, record.date, runner_up)


def _text(schedule: Schedule) -> str:
    return json.dumps(schedule.as_dict(), sort_keys=True)


def _mean(values: Sequence[float]) -> float:
    """Geometric."""
    return values[0] if len(values) == 1 else math.exp(math.fsum(map(math.log, values)) / len(values))


def _rounded(time_ms: float) -> float:
    """Five digits: more than a measurement has, few enough to read."""
    return float(f"{time_ms:.5g}")
