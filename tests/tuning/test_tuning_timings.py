"""Timings files: what is read, what is passed over, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kda_tl.tuning import Timing, TimingsError, read_timings
from kda_tl.tuning.measure import MeasureError, append_record
from kda_tl.tuning.timings import STATUSES

RECORD: dict[str, Any] = {
    "spec": "chunk_scan[...]", "schedule": {"block_v": 32}, "size": 32, "problem": {"HV": 32}, "status": "ok", "time_ms": 0.2,
    "error": 1e-3, "reason": None, "device": "NVIDIA H200", "versions": {"nvcc": "13.0"}, "date": "2026-11-30T12:00:00+00:00",
    "baseline": True,
}  # fmt: skip


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_records_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    other = {**RECORD, "status": "crashed", "time_ms": None, "error": None, "reason": "illegal address", "baseline": False}
    path = write(tmp_path / "t", json.dumps(RECORD), json.dumps({**other, "artifact": "abc"}), "")
    assert read_timings(path) == [Timing(**RECORD), Timing(**other, artifact="abc")]


def test_torn_lines_are_passed_over(tmp_path: Path) -> None:
    """The last one, at any byte; and one in the middle, where a later process went on after it."""
    line = json.dumps(RECORD)
    for cut in range(len(line)):
        assert read_timings(write(tmp_path / "last", line, line[:cut])) == [Timing(**RECORD)]
        assert read_timings(write(tmp_path / "middle", line, line[:cut], line, "")) == [Timing(**RECORD)] * 2
    assert read_timings(write(tmp_path / "last", line)) == [Timing(**RECORD)]  # whole, but for its end
    assert read_timings(write(tmp_path / "empty")) == []
    (tmp_path / "zeros").write_bytes(line.encode() + b"\n" + bytes(4096) + b"\n" + line.encode())  # a machine that lost power
    assert read_timings(tmp_path / "zeros") == [Timing(**RECORD)] * 2
    (tmp_path / "behind").write_bytes(line.encode() + bytes(9) + b"\n" + line.encode() + b"\n")
    assert read_timings(tmp_path / "behind") == [Timing(**RECORD)] * 2


@pytest.mark.parametrize(
    "damage", [('"size": ', '"size"; '), ('"ok"', '"ok'), (", ", ". "), ("true}", 'true}"'), ("0.2", "0,2")]
)
def test_a_whole_line_that_is_damaged_is_no_torn_one(tmp_path: Path, damage: tuple[str, str]) -> None:
    line = json.dumps(RECORD)
    harmed = line.replace(*damage, 1)
    assert harmed != line
    with pytest.raises(TimingsError, match="t line 1: no record, and not the beginning of one"):
        read_timings(write(tmp_path / "t", harmed, line))
    assert read_timings(write(tmp_path / "t", line, harmed)) == [Timing(**RECORD)]  # no newline: it may be a torn one


def test_what_comes_after_zeros_is_shown(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(4096) + json.dumps(RECORD).encode() + b"\n")
    with pytest.raises(TimingsError, match=r"t line 1: .*x00' \.\. b'.*\"baseline\": true}': remove the line"):
        read_timings(tmp_path / "t")


def test_a_record_is_appended_after_a_torn_line(tmp_path: Path) -> None:
    path, line = tmp_path / "t", json.dumps(RECORD, sort_keys=True).encode() + b"\n"
    append_record(path, RECORD)
    assert path.read_bytes() == line
    with open(path, "ab") as file:
        file.write(line[:40])
    append_record(path, RECORD)
    assert path.read_bytes() == line + line[:40] + b"\n" + line and read_timings(path) == [Timing(**RECORD)] * 2


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "t").symlink_to("/dev/full")
    with pytest.raises(MeasureError) as raised:
        append_record(tmp_path / "t", RECORD)
    again = f"mend that; then `kda-tl autotune --measure {tmp_path} --resume` goes on"
    assert str(raised.value) == f"{tmp_path / 't'} cannot be written (No space left on device): {again}"


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00", b"<<<<<<< HEAD", b"time_ms 0.1"])
def test_what_no_tuner_writes_is_named(tmp_path: Path, garbage: bytes) -> None:
    line = json.dumps(RECORD).encode()
    (tmp_path / "t").write_bytes(b"\n".join((line, garbage, line)))
    with pytest.raises(TimingsError, match="t line 2: no record, and not the beginning of one"):
        read_timings(tmp_path / "t")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spec": 3}, "spec must be str, got 3"),
        ({"schedule": []}, "schedule must be dict, got []"),
        ({"size": 0}, "size must be positive, got 0"),
        ({"size": True}, "size must be int, got True"),
        ({"size": 1.5}, "size must be int, got 1.5"),
        ({"status": "fine"}, "status must be one of ok, wrong, crashed, timeout, stopped, rejected, got 'fine'"),
        ({"time_ms": None}, "time_ms must be a positive number where status is ok, got None"),
        ({"time_ms": -1.0}, "time_ms must be a positive number where status is ok, got -1.0"),
        ({"time_ms": float("nan")}, "time_ms must be a positive number where status is ok, got nan"),
        ({"time_ms": "1"}, "time_ms must be int or float or null, got '1'"),
        ({"reason": 3}, "reason must be str or null, got 3"),
        ({"date": "today"}, "date must be an ISO date, got 'today'"),
        ({"baseline": 1}, "baseline must be bool, got 1"),
        ({"versions": None}, "versions must be dict, got None"),
        ({"artifact": 3}, "artifact must be str or null, got 3"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "t", json.dumps(RECORD), json.dumps({**RECORD, **change}), "")
    with pytest.raises(TimingsError) as caught:
        read_timings(path)
    assert str(caught.value) == f"{path} line 2: {words}: remove the line, or tune anew"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for name in RECORD:
        rest = {key: value for key, value in RECORD.items() if key != name}
        with pytest.raises(TimingsError, match=f"line 1: a record has spec, .*, and {name} is missing"):
            read_timings(write(tmp_path / "t", json.dumps(rest)))
    with pytest.raises(TimingsError, match="line 1: a record is a JSON object, got 3"):
        read_timings(write(tmp_path / "t", "3"))
    with pytest.raises(TimingsError, match="nowhere: cannot be read"):
        read_timings(tmp_path / "nowhere")


def test_every_status_is_read(tmp_path: Path) -> None:
    for status in STATUSES:
        size = 0 if status == "rejected" else 32
        (timing,) = read_timings(write(tmp_path / "t", json.dumps({**RECORD, "status": status, "size": size})))
        assert timing.status == status
