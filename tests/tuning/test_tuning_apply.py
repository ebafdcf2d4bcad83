"""From timings to schedules: who wins where, how few classes that takes, and that equal timings give equal bytes."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec
from kda_tl.specs.schedule_file import MAX_CLASSES, ScheduleFileError, read_schedule_file, write_entries
from kda_tl.specs.schedules import ChunkScanSchedule, SizeClass
from kda_tl.tuning import Applied, Timing, TimingsError, apply
from kda_tl.tuning.timings import Key

SPEC, HEIR = ChunkScanSpec(), ChunkScanSpec(state_dtype="bfloat16")
TILES = (16, 32, 64, 128)
OTHER = ChunkWySpec().key
ENTRIES = {OTHER: {"classes": [{"up_to": None, "schedule": {"parts": 8}, "source": "model"}]}}

Times = Mapping[int, Mapping[int, float | str]]
"""By V tile and size: milliseconds, or what became of it."""


def record(tile: int, size: int, outcome: float | str, **changes: Any) -> dict[str, Any]:
    ok = not isinstance(outcome, str)
    return {
        "spec": SPEC.key, "schedule": {"block_v": tile}, "size": size, "problem": {"HV": size}, "baseline": False,
        "status": "ok" if ok else outcome, "time_ms": outcome if ok else None, "error": 1e-3 if ok else None, "reason": None,
        "device": "NVIDIA H200", "versions": {"nvcc": "13.0", "kda_tl": "0.1"}, "date": f"2026-11-30T12:{size % 60:02d}:00",
        **changes,
    }  # fmt: skip


def records(times: Times, baseline: int | None = None) -> list[dict[str, Any]]:
    return [
        record(tile, size, outcome, baseline=tile == baseline)
        for tile, by_size in times.items()
        for size, outcome in by_size.items()
    ]


def run(folder: Path, lines: Sequence[dict[str, Any]], **options: Any) -> tuple[tuple[SizeClass, ...], Applied]:
    """The classes of SPEC after `apply`, in a schedules folder that holds another spec's entry too."""
    timings = folder / "timings.jsonl"
    timings.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if not (folder / "sm_90.json").exists():
        write_entries(folder / "sm_90.json", "sm_90", ENTRIES)
    applied = apply(timings, "sm_90", folder, **options)
    found, problems = read_schedule_file(folder / "sm_90.json", "sm_90")
    assert not problems and found[OTHER][0].schedule.as_dict()["parts"] == 8
    return found.get(SPEC.key, ()), applied


def shape(classes: Sequence[SizeClass]) -> list[tuple[int | None, int]]:
    return [(one.up_to, one.schedule.block_v) for one in classes if isinstance(one.schedule, ChunkScanSchedule)]


# -- who wins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # One size, one schedule.
        ({32: {64: 1.0}, 64: {64: 0.9}}, [(None, 64)]),
        # A crossover lies at the geometric mean of its neighbours.
        ({32: {32: 0.169, 96: 0.496}, 128: {32: 0.354, 96: 0.410}}, [(55, 32), (None, 128)]),
        ({32: {8: 1, 64: 1, 96: 5}, 128: {8: 2, 64: 2, 96: 4}}, [(78, 32), (None, 128)]),
        # Within 2 % at both sizes, one class is enough; the fastest on average has it.
        ({32: {8: 1.00, 96: 1.015}, 64: {8: 1.01, 96: 1.00}}, [(None, 64)]),
        ({32: {8: 1.00, 96: 1.03}, 64: {8: 1.03, 96: 1.00}}, [(27, 32), (None, 64)]),
        # Best nowhere, and good enough everywhere.
        ({32: {8: 1.0, 64: 1.5, 96: 2.0}, 64: {8: 1.01, 64: 1.01, 96: 1.01}, 128: {8: 2.0, 64: 1.5, 96: 1.0}}, [(None, 64)]),
        # Not measured, stopped or out of time at a size: it cannot win there, and may elsewhere.
        ({32: {8: 0.5}, 64: {8: 1.0, 96: 1.0}}, [(27, 32), (None, 64)]),
        ({32: {8: 0.5, 96: "stopped"}, 64: {8: 1.0, 96: 1.0}}, [(27, 32), (None, 64)]),
        ({32: {8: 0.5, 96: "timeout"}, 64: {8: 1.0, 96: 1.0}}, [(27, 32), (None, 64)]),
        # Wrong or crashed once: out everywhere.
        ({32: {8: 0.5, 96: "wrong"}, 64: {8: 1.0, 96: 1.0}}, [(None, 64)]),
        ({32: {8: 0.5, 96: "crashed"}, 64: {8: 1.0, 96: 1.0}}, [(None, 64)]),
    ],
)  # fmt: skip
def test_who_wins_where(tmp_path: Path, times: Times, expected: list[tuple[int | None, int]]) -> None:
    classes, _ = run(tmp_path, records(times))
    assert shape(classes) == expected


def test_where_a_choice_comes_from(tmp_path: Path) -> None:
    times = {32: {32: 0.169, 64: 0.3, 96: 0.496}, 64: {32: 0.225, 64: 0.31, 96: 0.492}, 128: {32: 0.354, 64: 0.38, 96: 0.41}}
    (few, many), applied = run(tmp_path, records(times, baseline=32))
    assert few.source == many.source == "measured" and few.measured is not None and many.measured is not None
    assert (few.measured.size, few.measured.time_ms, few.measured.date) == (64, 0.3, "2026-11-30T12:04:00")
    assert few.measured.runner_up == (ChunkScanSchedule(block_v=64), 0.31)
    assert many.measured.device == "NVIDIA H200" and many.measured.versions == (("kda_tl", "0.1"), ("nvcc", "13.0"))
    assert many.measured.runner_up == (ChunkScanSchedule(block_v=64), 0.492)
    (gain,) = applied.gains
    assert (gain.sizes, gain.before, gain.now) == ((32, 64, 96), (0.169, 0.3, 0.496), (0.169, 0.3, 0.41))
    assert gain.speedup == pytest.approx((0.496 / 0.41) ** (1 / 3))
    assert applied.changed == (SPEC.key,) and not applied.notes
    table = str(applied)
    assert SPEC.key in table and "1.07x" in table and "1 entry changed" in table


def test_the_last_record_of_a_candidate_counts(tmp_path: Path) -> None:
    lines = [record(32, 8, "crashed"), record(32, 8, 0.5), record(64, 8, 0.4), record(64, 8, 0.6)]
    classes, _ = run(tmp_path, lines)
    assert shape(classes) == [(None, 32)] and classes[0].measured is not None and classes[0].measured.time_ms == 0.5


def test_problems_of_one_size_count_together(tmp_path: Path) -> None:
    """A schedule must be right on all of them, and wins by its mean."""
    long, short = {"T": 8192}, {"T": 64}
    lines = [
        record(32, 8, 1.0, problem=long), record(32, 8, 4.0, problem=short), record(64, 8, 3.0, problem=long),
        record(64, 8, 1.0, problem=short), record(128, 8, 0.1, problem=short), record(128, 8, "stopped", problem=long),
    ]  # fmt: skip
    classes, _ = run(tmp_path, lines)
    assert shape(classes) == [(None, 64)] and classes[0].measured is not None
    assert classes[0].measured.time_ms == pytest.approx(math.sqrt(3.0), rel=1e-4)


def test_what_was_in_force_is_not_made_slower_for_want_of_classes(tmp_path: Path) -> None:
    """Five sizes with five winners: the smallest losses go, but none against what was in force."""
    times = {tile: {size: 2.0 for size in (1, 4, 16, 64, 256)} for tile in TILES}
    for tile, size in zip((16, 32, 64, 128, 16), (1, 4, 16, 64, 256)):
        times[tile][size] = 1.0
    classes, applied = run(tmp_path, records(times, baseline=16))
    assert len(classes) == MAX_CLASSES and not applied.notes
    now = dict(zip(applied.gains[0].sizes, applied.gains[0].now))
    assert now[1] == now[256] == 1.0 and sorted(now.values()) == [1.0, 1.0, 1.0, 1.0, 2.0]


def test_no_choice_leaves_an_entry_as_it_was(tmp_path: Path) -> None:
    lines = [record(16 * 2**n, size, 1.0, schedule={"threads": 128 * (n + 1)}) for n, size in enumerate((1, 4, 16, 64, 256))]
    classes, applied = run(tmp_path, lines)
    assert not classes and not applied.changed and "no schedules serve all sizes" in applied.notes[0]
    assert applied.notes[0] in str(applied)


def test_timings_of_other_versions_are_told_of(tmp_path: Path) -> None:
    lines = [
        record(32, 8, 1.0), record(64, 8, 0.1, schedule={"warps": 4}), record(64, 8, 0.1, spec="chunk_scan[warps=3]"),
        record(32, 0, "rejected", problem={}),
    ]  # fmt: skip
    classes, applied = run(tmp_path, lines)
    assert shape(classes) == [(None, 32)]
    assert len(applied.notes) == 2 and "chunk_scan[warps=3]: timings of no spec" in applied.notes[1]
    assert "1 timings of schedules that this version does not have, unknown field 'warps'" in applied.notes[0]


def test_timings_of_two_devices(tmp_path: Path) -> None:
    lines = [record(32, 8, 1.0), record(64, 8, 0.1, device="NVIDIA L40S")]
    with pytest.raises(TimingsError, match="timings of NVIDIA H200 and of NVIDIA L40S, and those of one") as raised:
        run(tmp_path, lines)
    assert f"`kda-tl autotune --measure {tmp_path}` on the one that counts" in str(raised.value)
    assert "in a copy of the folder that has no timings.jsonl" in str(raised.value)
    assert shape(run(tmp_path, lines, device="NVIDIA H200")[0]) == [(None, 32)]
    with pytest.raises(TimingsError, match="no timings of NVIDIA B200, but of NVIDIA H200, NVIDIA L40S"):
        run(tmp_path, lines, device="NVIDIA B200")


def test_a_schedules_file_that_cannot_be_read_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "sm_90.json").write_text("{")
    with pytest.raises(ScheduleFileError, match=r"sm_90\.json: not a schedules file"):
        run(tmp_path, [record(32, 8, 1.0)])
    assert (tmp_path / "sm_90.json").read_text() == "{"


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run(tmp_path, [record(32, 8, 1.0)])
    before = (tmp_path / "sm_90.json").read_bytes()
    monkeypatch.setattr("kda_tl.specs.schedule_file.os.fsync", full)
    with pytest.raises(ScheduleFileError, match=r"sm_90\.json cannot be written \(No space left on device\), and is as it was"):
        run(tmp_path, [record(64, 8, 1.0)])
    assert (tmp_path / "sm_90.json").read_bytes() == before


def test_siblings_take_over_what_serves_them(tmp_path: Path) -> None:
    times = {32: {8: 1.0, 96: 3.2}, 64: {8: 1.5, 96: 2.5}, 128: {8: 3.0, 96: 2.0}}
    heirs = {SPEC.key: [HEIR.key]}
    serves = lambda key, schedule: key == HEIR.key and schedule["block_v"] < 128  # noqa: E731
    classes, applied = run(tmp_path, records(times), heirs=heirs, serves=serves)
    inherited = read_schedule_file(tmp_path / "sm_90.json", "sm_90")[0][HEIR.key]
    assert shape(classes) == [(27, 32), (None, 128)] and shape(inherited) == [(27, 32), (None, 64)]
    assert {one.source for one in inherited} == {"model"} and applied.inherited == (HEIR.key,)
    assert set(applied.changed) == {SPEC.key, HEIR.key} and len(applied.gains) == 1
    # By these timings the tiles that serve the sibling cannot keep up with what is in force.
    path = tmp_path / "kept"
    path.mkdir()
    _, applied = run(path, records(times, baseline=128), heirs=heirs, serves=lambda key, s: s["block_v"] == 32)
    assert applied.inherited == () and HEIR.key not in read_schedule_file(path / "sm_90.json", "sm_90")[0]


def test_siblings_count_the_times_of_early_losers(tmp_path: Path) -> None:
    """At 8 the tile of 64 was stopped at 1.1: too slow for the measured spec, near enough for a sibling to save a class."""
    lines = [
        record(64, 8, "stopped", time_ms=1.1), record(64, 64, 1.0), record(16, 8, 1.0),
        record(16, 64, "stopped", time_ms=3.0),
    ]  # fmt: skip
    classes, _ = run(tmp_path, lines, heirs={SPEC.key: [HEIR.key]})
    inherited = read_schedule_file(tmp_path / "sm_90.json", "sm_90")[0][HEIR.key]
    assert shape(classes) == [(22, 16), (None, 64)] and shape(inherited) == [(None, 64)]


def planned(*records: dict[str, Any]) -> list[Key]:
    return [Timing(**one).key for one in records]


def test_sizes_that_are_missing_leave_an_entry_as_it_was(tmp_path: Path) -> None:
    classes, applied = run(tmp_path, [record(32, 8, 1.0)], planned=planned(record(32, 8, 1.0), record(32, 96, 1.0)))
    assert not classes and not applied.changed and "no times yet of size 96" in applied.notes[0]


def test_stale_records_do_not_count(tmp_path: Path) -> None:
    """Of an artifact that was compiled anew since, of a size or a problem that the plan has no more, and of a spec."""
    new = [record(32, 8, 1.0, artifact="new"), record(64, 8, 2.0, artifact="new-64")]
    old = [
        record(32, 8, "crashed", artifact="old"), record(64, 8, 0.1, artifact="old-64"), record(64, 8, 0.1),
        record(32, 4, 9.0, artifact="new"), record(32, 8, 9.0, artifact="new", problem={"HV": 9}),
        record(32, 8, 1.0, artifact="new", spec="chunk_scan[gone=1]"), record(64, 8, 1.0, device="another", artifact="old"),
    ]  # fmt: skip
    told = record(128, 0, "rejected", artifact=None, problem={})
    classes, applied = run(tmp_path, [*old, told, *new, *old], planned=planned(*new))
    assert shape(classes) == [(None, 32)] and applied.gains[0].sizes == (8,)
    assert len(applied.notes) == 1
    assert applied.notes[0].startswith(
        "14 stale records passed over, of candidates or sizes that the plan no longer has: --meas"
    )
    # Without a plan nothing says which of them are stale: the last ones count.
    (tmp_path / "all").mkdir()
    classes, applied = run(tmp_path / "all", [*new, *old[:3]])
    assert shape(classes) == [(None, 64)] and not applied.notes


def test_a_spec_that_nothing_is_left_of_is_named(tmp_path: Path) -> None:
    lines = [record(32, 8, "crashed"), record(32, 96, 1.0), record(64, 8, "wrong"), record(64, 96, "timeout")]
    classes, applied = run(tmp_path, lines)
    assert not classes and not applied.changed
    assert applied.notes == (
        f"{SPEC.key}: no schedule is left, of what was timed 1 crashed, 1 ok, 1 timeout, 1 wrong, and the records say why: "
        "left as it was",
    )
    assert run(tmp_path, lines, planned=planned(*lines))[1].notes == applied.notes


@pytest.mark.parametrize("time", [-1.0, 0, float("inf"), 10**400])
def test_a_time_is_a_positive_number_wherever_there_is_one(time: float, tmp_path: Path) -> None:
    with pytest.raises(TimingsError, match="line 1: time_ms must be a positive number"):
        run(tmp_path, [record(32, 8, "stopped", time_ms=time)])


# -- properties ----------------------------------------------------------------------------------------------------------

outcomes = st.one_of(
    st.floats(0.01, 10.0, allow_nan=False).map(lambda t: float(f"{t:.3g}")),
    st.sampled_from([1.0, 1.015, 1.03]),
    st.sampled_from(["stopped", "timeout"]),
)
tables = st.lists(st.integers(1, 2000), min_size=1, max_size=7, unique=True).flatmap(
    lambda sizes: st.fixed_dictionaries(
        {tile: st.fixed_dictionaries({}, optional={size: outcomes for size in sizes}) for tile in TILES}
    )
)


@settings(deadline=None)
@given(times=tables, baseline=st.sampled_from([None, *TILES]))
def test_every_choice_is_sound(tmp_path_factory, times: Times, baseline: int | None) -> None:
    folder = tmp_path_factory.mktemp("apply")
    classes, applied = run(folder, records(times, baseline))
    ok = {tile: {size: t for size, t in by_size.items() if not isinstance(t, str)} for tile, by_size in times.items()}
    sizes = sorted({size for by_size in ok.values() for size in by_size})
    if not classes:
        # Nothing ran, or no cut into four has a schedule that ran at all sizes of a part and keeps up.
        assert not sizes or len(sizes) > MAX_CLASSES
        return
    assert len(classes) <= MAX_CLASSES
    limits = [one.up_to for one in classes]
    assert limits[-1] is None and all(
        low is not None and (high is None or low < high) for low, high in itertools.pairwise(limits)
    )
    exact = True
    for size in sizes:
        index = next(n for n, limit in enumerate(limits) if limit is None or size <= limit)
        schedule = classes[index].schedule
        assert isinstance(schedule, ChunkScanSchedule)
        time, best = ok[schedule.block_v][size], min(by_size[size] for by_size in ok.values() if size in by_size)
        exact &= time <= 1.02 * best
        if baseline is not None and size in ok[baseline]:
            assert time <= 1.02 * ok[baseline][size]
    # What is over 2 % from the best was given up because four classes cannot give all of it.
    assert exact or not fits(ok, sizes, MAX_CLASSES)
    for index, limit in enumerate(limits[:-1]):
        assert limit is not None
        low, high = max(s for s in sizes if s <= limit), min(s for s in sizes if s > limit)
        assert limit == math.isqrt(low * high) and classes[index].schedule != classes[index + 1].schedule
    # Fewest: where all are within 2 %, no cut into one class less is.
    if exact and len(classes) > 1:
        assert not fits(ok, sizes, len(classes) - 1)
    assert {size for gain in applied.gains for size in gain.sizes} == set(sizes)


def fits(ok: Mapping[int, Mapping[int, float]], sizes: Sequence[int], most: int) -> bool:
    """By trying every cut."""
    best = {size: min(by_size[size] for by_size in ok.values() if size in by_size) for size in sizes}

    def one(part: Sequence[int]) -> bool:
        return any(all(size in by and by[size] <= 1.02 * best[size] for size in part) for by in ok.values())

    for count in range(1, most + 1):
        for cuts in itertools.combinations(range(1, len(sizes)), count - 1):
            edges = [0, *cuts, len(sizes)]
            if all(one(sizes[first:end]) for first, end in itertools.pairwise(edges)):
                return True
    return False


@settings(deadline=None)
@given(times=tables, baseline=st.sampled_from([None, *TILES]), data=st.data())
def test_a_replay_gives_equal_bytes(tmp_path_factory, times: Times, baseline: int | None, data: st.DataObject) -> None:
    """Into another folder, over its own result, from a file with a torn end, and with records of different candidates in
    another order."""
    lines = records(times, baseline)
    first, again = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("again")
    run(first, lines)
    content = (first / "sm_90.json").read_bytes()
    _, applied = run(first, lines)
    assert (first / "sm_90.json").read_bytes() == content and not applied.changed
    run(again, data.draw(st.permutations(lines)))
    assert (again / "sm_90.json").read_bytes() == content
    with open(again / "timings.jsonl", "a") as file:
        file.write(json.dumps(record(16, 1, 0.001))[:-20])
    apply(again / "timings.jsonl", "sm_90", again)
    assert (again / "sm_90.json").read_bytes() == content
