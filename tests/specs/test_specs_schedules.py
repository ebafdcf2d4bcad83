"""schedules/ARCH.json: what is shipped parses, what is broken is named and replaced by defaults, and sizes pick a class."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda_tl.specs import schedules, sizes
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.defaults import MAX_PROGRAMS, default_specs
from kda_tl.specs.kernels import KERNEL_SPECS, ChunkScanSpec, ChunkWySpec
from kda_tl.specs.schedule_file import (
    FORMAT,
    MAX_CLASSES,
    ScheduleFileError,
    class_as_json,
    read_entries,
    read_schedule_file,
    write_entries,
)
from kda_tl.specs.schedules import SCHEDULES, SizeClass, schedule_classes, schedule_for, schedules_folder

SPEC = ChunkScanSpec()
MEASURED = {
    "source": "measured",
    "device": "NVIDIA H200",
    "size": 64,
    "time_ms": 0.4,
    "versions": {"tilelang": "0.1.15"},
    "date": "2026-11-30",
    "runner_up": {"schedule": {"block_v": 32}, "time_ms": 0.5},
}

Write = Callable[[Any], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """write(content): makes it sm_90.json of the folder that schedules are read from; a text is written as it is."""
    monkeypatch.setattr(schedules, "schedules_folder", lambda: tmp_path)

    def write_file(content: Any) -> Path:
        path = tmp_path / "sm_90.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write_file


def file(*classes: Any, key: str = SPEC.key, **entry: Any) -> dict[str, Any]:
    return {"format": 2, "arch": "sm_90", "schedules": {key: {"classes": list(classes), **entry}}}


def one(schedule: Any, up_to: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"up_to": up_to, "schedule": schedule, "source": "model", **fields}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.name == "kda_tl" and record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


# -- what is shipped -----------------------------------------------------------------------------------------------------


def test_the_folder_is_that_of_the_checkout() -> None:
    assert schedules_folder() == Path(__file__).resolve().parents[2] / "schedules"


def test_one_file_per_arch() -> None:
    assert {path.stem for path in schedules_folder().glob("*.json")} == set(ARCHS)


@pytest.mark.parametrize("arch", ARCHS)
def test_shipped_schedules(arch: str, tmp_path: Path) -> None:
    path = schedules_folder() / f"{arch}.json"
    found, problems = read_schedule_file(path, arch)
    specs = {spec.key: spec for spec in default_specs(arch)}
    assert not problems and set(found) <= set(specs)  # what is not named has its kernel's default
    for key, classes in found.items():
        assert schedule_classes(specs[key], arch) == classes
        assert schedule_for(specs[key], arch) == classes[-1].schedule
        assert all(isinstance(size_class.schedule, SCHEDULES[specs[key].kernel]) for size_class in classes)
        assert all(size_class.source == "model" or arch != "cpu" for size_class in classes)
        # Two classes side by side with one schedule would be one class.
        assert all(low.schedule != high.schedule for low, high in itertools.pairwise(classes))
    write_entries(tmp_path / "again.json", arch, read_entries(path, arch))
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()  # stable order, readable diffs


@pytest.mark.parametrize("arch", ARCHS)
def test_programs_of_an_arch(arch: str) -> None:
    programs = {(spec, one.schedule) for spec in default_specs(arch) for one in schedule_classes(spec, arch)}
    assert len(programs) <= MAX_PROGRAMS


@pytest.mark.parametrize(("scans", "block_v"), [(4, 16), (8, 16), (32, 32), (64, 64), (96, 128), (1000, 128)])
def test_the_scan_has_wider_tiles_for_more_heads_on_sm_90(scans: int, block_v: int) -> None:
    """Every V tile of a head is a block, and 132 run at once: narrow ones fill the device with few heads."""
    schedule = schedule_for(SPEC, "sm_90", scans)
    assert (schedule.variant, schedule.block_v) == ("warp_specialized", block_v)


@pytest.mark.parametrize("kind", SCHEDULES.values())
def test_schedules_are_frozen_and_have_defaults(kind: type[schedules.Schedule]) -> None:
    schedule = kind()
    assert schedule == kind(**schedule.as_dict()) and schedule.kernel in SCHEDULES
    for field in dataclasses.fields(schedule):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(schedule, field.name, 1)


def test_every_kernel_has_a_schedule_and_a_size() -> None:
    assert set(KERNEL_SPECS) == set(SCHEDULES) == set(sizes.WORK_ITEMS)
    assert sizes.problem_size("chunk_scan", 3, 32) == 96
    assert sizes.size_meaning("recurrent_decode") == "requests x value heads"
    with pytest.raises(ValueError, match=r"kernel must be one of chunk_wy, .*, got 'scan'"):
        sizes.problem_size("scan", 1, 1)


# -- reading -------------------------------------------------------------------------------------------------------------


def test_an_entry_is_read(write: Write) -> None:
    write(file(one({"threads": 256, "block_v": 32})))
    assert schedule_for(SPEC, "sm_90") == SCHEDULES["chunk_scan"](threads=256, block_v=32)


def test_a_field_that_is_left_out_has_its_default(write: Write) -> None:
    write(file(one({"block_v": 32})))
    assert schedule_for(SPEC, "sm_90") == SCHEDULES["chunk_scan"](block_v=32)


def test_a_spec_or_file_that_is_not_there_means_the_default(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    write(file(one({"block_v": 32})))
    for spec, arch in ((ChunkScanSpec(head_dim_v=64), "sm_90"), (ChunkWySpec(), "sm_90"), (SPEC, "sm_80")):
        assert schedule_classes(spec, arch) == (SizeClass(None, SCHEDULES[spec.kernel](), "default"),)
    assert not warnings(caplog)


@given(bounds=st.lists(st.integers(1, 200), unique=True, max_size=MAX_CLASSES - 1).map(sorted), size=st.integers(1, 250))
def test_a_size_picks_the_first_class_that_reaches_it(tmp_path_factory, bounds: list[int], size: int) -> None:
    limits = [*bounds, None]
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("schedules")
        patch.setattr(schedules, "schedules_folder", lambda: folder)
        content = file(*(one({"threads": 128 * (n + 1)}, limit) for n, limit in enumerate(limits)))
        (folder / "sm_90.json").write_text(json.dumps(content))
        classes = schedule_classes(SPEC, "sm_90")
        assert [size_class.up_to for size_class in classes] == limits
        index = next(n for n, limit in enumerate(limits) if limit is None or size <= limit)
        assert schedule_for(SPEC, "sm_90", size).threads == 128 * (index + 1)
        assert schedule_for(SPEC, "sm_90").threads == 128 * len(limits)


def test_where_a_measured_class_comes_from(write: Write) -> None:
    path = write(file(one({"block_v": 64}, 64, **MEASURED), one({"block_v": 128})))
    (few, many), problems = read_schedule_file(path, "sm_90")[0][SPEC.key], read_schedule_file(path, "sm_90")[1]
    assert not problems and many.measured is None and few.measured is not None
    assert (few.measured.device, few.measured.size, few.measured.time_ms) == ("NVIDIA H200", 64, 0.4)
    assert few.measured.runner_up == (SCHEDULES["chunk_scan"](block_v=32), 0.5)
    whole = {**one(few.schedule.as_dict(), 64), **MEASURED}
    whole["runner_up"] = {"schedule": SCHEDULES["chunk_scan"](block_v=32).as_dict(), "time_ms": 0.5}
    assert class_as_json(few) == whole
    write(file(class_as_json(few), class_as_json(many)))
    assert schedule_classes(SPEC, "sm_90") == (few, many)


def test_a_file_that_changes_is_read_again(write: Write) -> None:
    write(file(one({"block_v": 32})))
    assert schedule_for(SPEC, "sm_90").block_v == 32
    write(file(one({"block_v": 128})))
    assert schedule_for(SPEC, "sm_90").block_v == 128


# -- what is wrong -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("\x00", "not JSON"),
        ("null", "no table of schedules"),
        ("3", "no table of schedules"),
        ([], "no table of schedules"),
        ({}, "no table of schedules"),
        ({"format": 2}, "no table of schedules"),
        ({"format": 2, "arch": "sm_90", "schedules": []}, "no table of schedules"),
        ({"schedules": {}}, "format is None"),
        ({"format": 1, "arch": "sm_90", "schedules": {}}, "format is 1, this version of kda-tl reads format 2"),
        ({"format": 3, "arch": "sm_90", "schedules": {}}, "format is 3, this version of kda-tl reads format 2"),
        ({"format": "2", "arch": "sm_90", "schedules": {}}, "format is '2'"),
        ({"format": True, "arch": "sm_90", "schedules": {}}, "format is True"),
        ({"format": 2, "schedules": {}}, "its arch is None"),
        ({"format": 2, "arch": "sm_80", "schedules": {}}, "not the schedules file of sm_90, its arch is 'sm_80'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_defaults_serve(write: Write, caplog, content: Any, words: str) -> None:
    path = write(content)
    with pytest.raises(ScheduleFileError) as caught:
        read_schedule_file(path, "sm_90")
    assert str(path) in str(caught.value) and words in str(caught.value)
    assert "restore it, or delete it; then" in str(caught.value) and "kda-tl autotune" in str(caught.value)
    for _ in range(2):
        assert schedule_classes(SPEC, "sm_90") == (SizeClass(None, SCHEDULES["chunk_scan"](), "default"),)
    (warning,) = warnings(caplog)  # told once
    assert warning == f"{caught.value}. Until then every kernel for sm_90 has its default schedule"


def test_a_file_that_is_not_text_is_named(write: Write, caplog) -> None:
    path = write("")
    path.write_bytes(b"\xff\xfe\x00")
    assert schedule_for(SPEC, "sm_90") == SCHEDULES["chunk_scan"]()
    assert str(path) in warnings(caplog)[0]


WRONG_SCHEDULES: list[tuple[Any, str]] = [
    ({"threads": 128, "warps": 4}, "unknown field 'warps'; allowed: variant, threads, block_v, stages"),
    ({"block_v": 48}, "block_v must be 16, 32, 64 or 128"),  # would leave the last 32 of 128 columns unwritten
    ({"block_v": 0}, "block_v must be a positive integer, got 0"),
    ({"block_v": "64"}, "block_v must be a positive integer, got '64'"),
    ({"block_v": 64.0}, "block_v must be a positive integer, got 64.0"),
    ({"threads": True}, "threads must be a positive integer, got True"),
    ({"threads": 100}, "threads must be a multiple of 128, got 100"),
    ({"variant": "fast"}, "variant must be plain or warp_specialized, got 'fast'"),
    ({"state_registers": 240}, "512 together at most"),
    ({"state_registers": 100}, "multiples of 8"),
    ([], "schedule must be a table of variant, threads"),
    (None, "schedule must be a table of variant, threads"),
]
WRONG_CLASSES: list[tuple[list[Any], str]] = [
    ([], "classes must be 1 to 4, got 0"),
    ([one({}, n) for n in range(1, 5)] + [one({})], "classes must be 1 to 4, got 5"),
    ([one({}, 64)], "up_to must rise from class to class and be null in the last one alone, got [64]"),
    ([one({}), one({})], "up_to must rise from class to class and be null in the last one alone, got [None, None]"),
    ([one({}, 64), one({}, 64), one({})], "got [64, 64, None]"),
    ([one({}, 64), one({}, 32), one({})], "got [64, 32, None]"),
    ([one({}, 0), one({})], "up_to must be a positive integer or null, got 0"),
    ([one({}, True), one({})], "up_to must be a positive integer or null, got True"),
    ([one({}, 6.5), one({})], "up_to must be a positive integer or null, got 6.5"),
    ([one({}, source="guess")], "source must be one of model, measured, got 'guess'"),
    ([one({}, time_ms=0.5)], "unknown field 'time_ms' of a class from a model; allowed: schedule, source, up_to"),
    ([one({}, **{**MEASURED, "fast": True})], "unknown field 'fast' of a class from a measured; allowed: date, device"),
    ([{"schedule": {}, "source": "model"}], "a class is a table with schedule, source, up_to, got"),
    ([3], "a class is a table with schedule, source, up_to, got 3"),
    ([one({}, source="measured")], "a measured class has date, device, size, time_ms, versions, and date is missing"),
    ([one({}, **{**MEASURED, "time_ms": 0})], "time_ms must be a positive number, got 0"),
    ([one({}, **{**MEASURED, "time_ms": "1"})], "time_ms must be a positive number, got '1'"),
    ([one({}, **{**MEASURED, "date": "yesterday"})], "date must be an ISO date, got 'yesterday'"),
    ([one({}, **{**MEASURED, "device": ""})], "device must be the name of one, got ''"),
    ([one({}, **{**MEASURED, "size": None})], "size must be a positive integer, got None"),
    ([one({}, **{**MEASURED, "versions": ["1"]})], "versions must be a table of texts, got ['1']"),
    ([one({}, **{**MEASURED, "versions": {"nvcc": 13}})], "versions must be a table of texts, got {'nvcc': 13}"),
    ([one({}, **{**MEASURED, "runner_up": {"time_ms": 1}})], "runner_up is a table with schedule and time_ms"),
    ([one({}, **{**MEASURED, "runner_up": {"schedule": {"block_v": 3}, "time_ms": 1}})], "block_v must be 16, 32, 64"),
]
CONTENTS = [(file(one(schedule)), words) for schedule, words in WRONG_SCHEDULES]
CONTENTS += [(file(*classes), words) for classes, words in WRONG_CLASSES]
CONTENTS += [
    (file(one({}), key=SPEC.key, source="model"), 'an entry is {"classes": [...]}, got'),
    ({**file(), "schedules": {SPEC.key: None}}, 'an entry is {"classes": [...]}, got null'),
    (
        {**file(), "schedules": {SPEC.key: {"schedule": {}, "source": "model"}}},
        'an entry is {"classes": [...]}, got',
    ),  # format 1
    (file(one({}), key="chunk_scan[warps=3]"), "chunk_scan takes each of head_dim_k"),
    (file(one({}), key="chunk_scam"), "a spec is KERNEL[FIELD=VALUE,...] with KERNEL one of chunk_wy, chunk_scan"),
    (file(one({}), key="chunk_scan[dtype=int3]"), "dtype must be one of bfloat16, float16, float32, got 'int3'"),
    (file(one({}), key="chunk_scan[dtype=bfloat16]"), f"an entry has the whole key of its spec, {SPEC.key}"),
]


@pytest.mark.parametrize(("content", "words"), CONTENTS, ids=[words for _, words in CONTENTS])
def test_an_entry_that_cannot_be_used_is_named_and_the_others_are(write: Write, caplog, content: Any, words: str) -> None:
    content = copy.deepcopy(content)
    (key,) = content["schedules"]
    good = ChunkWySpec()
    content["schedules"][good.key] = {"classes": [one({"parts": 8})]}
    path = write(content)
    assert schedule_classes(SPEC, "sm_90") == (SizeClass(None, SCHEDULES["chunk_scan"](), "default"),)
    assert schedule_for(good, "sm_90") == SCHEDULES["chunk_wy"](parts=8)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{path}: {key}: ") and words in warning
    assert warning.endswith(
        ": correct or remove the entry, or run `kda-tl autotune`. Until then this kernel has its default schedule"
    )


def test_a_variant_of_another_arch_is_refused(write: Write, tmp_path: Path, caplog) -> None:
    content = file(one({"variant": "warp_specialized"}))
    write(content)
    assert schedule_for(SPEC, "sm_90").variant == "warp_specialized" and not warnings(caplog)
    (tmp_path / "sm_89.json").write_text(json.dumps({**content, "arch": "sm_89"}))
    assert schedule_for(SPEC, "sm_89").variant == "plain"
    assert "sm_89.json" in warnings(caplog)[0] and "warp_specialized runs on sm_90 alone, not on sm_89" in warnings(caplog)[0]


# -- writing -------------------------------------------------------------------------------------------------------------


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sm_90.json"
    entries = {SPEC.key: {"classes": [one({"block_v": 32})]}}
    write_entries(path, "sm_90", entries)
    assert read_entries(path, "sm_90") == entries and path.read_text().startswith('{\n  "arch": "sm_90",\n')
    assert json.loads(path.read_text())["format"] == FORMAT
    before = path.read_bytes()
    with pytest.raises(ValueError):
        write_entries(path, "sm_90", {SPEC.key: {"classes": [one({"block_v": float("nan")})]}})
    assert path.read_bytes() == before and [file.name for file in path.parent.iterdir()] == [path.name]
