"""schedules/ARCH.json: what is shipped parses, and what is broken is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda_tl.specs import schedules
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec
from kda_tl.specs.schedules import SCHEDULES, ScheduleFileError, schedule_for, schedules_folder

SPEC = ChunkScanSpec()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Path]:
    """write(content): makes it sm_90.json of the folder that schedules are read from; a text is written as it is."""
    monkeypatch.setattr(schedules, "schedules_folder", lambda: tmp_path)

    def write_file(content: Any) -> Path:
        path = tmp_path / "sm_90.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write_file


def file(schedule: Any, key: str = SPEC.key, **entry: Any) -> dict[str, Any]:
    return {"format": 1, "arch": "sm_90", "schedules": {key: {"schedule": schedule, "source": "model", **entry}}}


def test_the_folder_is_that_of_the_checkout() -> None:
    assert schedules_folder() == Path(__file__).resolve().parents[2] / "schedules"


def test_one_file_per_arch() -> None:
    assert {path.stem for path in schedules_folder().glob("*.json")} == set(ARCHS)


@pytest.mark.parametrize("arch", ARCHS)
def test_shipped_schedules(arch: str) -> None:
    text = (schedules_folder() / f"{arch}.json").read_text()
    content = json.loads(text)
    assert content["format"] == 1 and content["arch"] == arch
    specs = {spec.key: spec for spec in default_specs(arch)}
    assert set(content["schedules"]) <= set(specs)  # what is not named has its kernel's default
    for key, entry in content["schedules"].items():
        schedule = schedule_for(specs[key], arch)
        assert isinstance(schedule, SCHEDULES[specs[key].kernel])
        assert {name: schedule.as_dict()[name] for name in entry["schedule"]} == entry["schedule"]
        assert entry["source"] in ("model", "measured")
        assert entry["source"] == "model" or arch != "cpu"
    assert text == json.dumps(content, indent=2, sort_keys=True) + "\n"  # stable order, readable diffs


@pytest.mark.parametrize("kind", SCHEDULES.values())
def test_schedules_are_frozen_and_have_defaults(kind: type[schedules.Schedule]) -> None:
    schedule = kind()
    assert schedule == kind(**schedule.as_dict()) and schedule.kernel in SCHEDULES
    for field in dataclasses.fields(schedule):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(schedule, field.name, 1)


def test_an_entry_is_read(write) -> None:
    write(file({"threads": 256, "block_v": 32}, ms=0.5))
    assert schedule_for(SPEC, "sm_90") == SCHEDULES["chunk_scan"](threads=256, block_v=32)


def test_a_field_that_is_left_out_has_its_default(write) -> None:
    write(file({"block_v": 32}))
    assert schedule_for(SPEC, "sm_90") == SCHEDULES["chunk_scan"](block_v=32)


def test_a_spec_or_file_that_is_not_there_means_the_default(write) -> None:
    write(file({"block_v": 32}))
    assert schedule_for(ChunkScanSpec(head_dim_v=64), "sm_90") == SCHEDULES["chunk_scan"]()
    assert schedule_for(ChunkWySpec(), "sm_90") == SCHEDULES["chunk_wy"]()
    assert schedule_for(SPEC, "sm_80") == SCHEDULES["chunk_scan"]()


def test_an_unknown_field_is_named(write) -> None:
    write(file({"threads": 128, "warps": 4}))
    with pytest.raises(ScheduleFileError) as caught:
        schedule_for(SPEC, "sm_90")
    message = str(caught.value)
    assert "schedules/sm_90.json" in message and SPEC.key in message and "'warps'" in message
    assert "threads" in message and "block_v" in message


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "\x00",
        "null",
        "3",
        [],
        {},
        {"format": 1},
        {"schedules": {}},
        {"format": 2, "schedules": {}},
        {"format": "1", "schedules": {}},
        {"format": 1, "schedules": []},
        {"format": 1, "schedules": None},
        {"format": 1, "schedules": {SPEC.key: {"source": "model"}}},
        {"format": 1, "schedules": {SPEC.key: None}},
        {"format": 1, "schedules": {"another": 3}},
    ],
)
def test_a_corrupt_file_is_named(write, content: Any) -> None:
    path = write(content)
    with pytest.raises(ScheduleFileError) as caught:
        schedule_for(SPEC, "sm_90")
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_text_is_named(write) -> None:
    path = write("")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleFileError, match=r"sm_90\.json"):
        schedule_for(SPEC, "sm_90")


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"block_v": 48}, "block_v must be 16, 32, 64 or 128"),  # would leave the last 32 of 128 columns unwritten
        ({"block_v": 0}, "block_v must be a positive integer, got 0"),
        ({"block_v": "64"}, "block_v must be a positive integer, got '64'"),
        ({"block_v": 64.0}, "block_v must be a positive integer, got 64.0"),
        ({"threads": True}, "threads must be a positive integer, got True"),
        ({"threads": 100}, "threads must be a multiple of 128, got 100"),
        ({"variant": "fast"}, "variant must be plain or warp_specialized, got 'fast'"),
        ({"state_registers": 240}, "512 together at most"),
        ({"state_registers": 100}, "multiples of 8"),
        ([], "not a schedules file"),
        (None, "not a schedules file"),
    ],
)
def test_a_value_that_cannot_be_is_refused(write, schedule: Any, words: str) -> None:
    write(file(schedule))
    with pytest.raises(ScheduleFileError) as caught:
        schedule_for(SPEC, "sm_90")
    assert "sm_90.json" in str(caught.value) and words in str(caught.value)


def test_a_variant_of_another_arch_is_refused(write, tmp_path: Path) -> None:
    content = file({"variant": "warp_specialized"})
    write(content)
    assert schedule_for(SPEC, "sm_90").variant == "warp_specialized"
    (tmp_path / "sm_89.json").write_text(json.dumps({**content, "arch": "sm_89"}))
    with pytest.raises(ScheduleFileError, match=r"sm_89\.json.*warp_specialized runs on sm_90 alone"):
        schedule_for(SPEC, "sm_89")


def test_the_file_of_another_arch_is_refused(write) -> None:
    path = write({**file({"block_v": 32}), "arch": "sm_80"})
    with pytest.raises(ScheduleFileError, match="not a schedules file") as caught:
        schedule_for(SPEC, "sm_90")
    assert str(path) in str(caught.value)
