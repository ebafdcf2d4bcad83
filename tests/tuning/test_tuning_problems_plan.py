"""Plan files: what is written is read, and whatever else is there is named, with its field."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tuning_folders import write_merge_plan

from kda_tl.tuning.problems_plan import PlanError, read_plan, write_plan


def test_what_is_written_is_read(tmp_path: Path) -> None:
    plan = write_merge_plan(tmp_path)
    assert read_plan(tmp_path) == plan == read_plan(tmp_path, drop_stale=True)
    (spec,) = plan.specs
    assert len(plan.keys) == len(spec.problems) * len(spec.candidates) == 4


def one(data: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = data["specs"][0][kind][0]
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format=2), "its format is 2"),
        (lambda d: d.update(arch="../sm_90"), "arch must be one of sm_80, sm_89, sm_90, .*, got '../sm_90'"),
        (lambda d: d.update(arch=["cpu"]), "arch must be one of"),
        (lambda d: d.update(versions=[1]), r"versions must be a table of texts, got \[1\]"),
        (lambda d: d.pop("untuned"), "untuned is missing"),
        (lambda d: d.update(specs={}), "specs must be a list"),
        (lambda d: d["specs"].append(3), r"specs\[1\].spec is missing"),
        (lambda d: d["specs"][0].update(spec=3), r"specs\[0\].spec must be a text, got 3"),
        (lambda d: d["specs"][0].update(inherits="x"), r"specs\[0\].inherits must be a list of texts"),
        (lambda d: one(d, "problems").update(size=0), r"specs\[0\].problems\[0\].size must be a positive integer, got 0"),
        (lambda d: one(d, "problems").update(size="8"), r"size must be a positive integer, got '8'"),
        (lambda d: one(d, "problems").update(size=True), r"size must be a positive integer, got True"),
        (lambda d: one(d, "problems").update(problem=5), r"problems\[0\].problem must be a table of positive integers by seq"),
        (lambda d: one(d, "problems").update(problem={"sequences": "x"}), "got {'sequences': 'x'}"),
        (lambda d: one(d, "problems").update(problem={"T": 1}), "got {'T': 1}"),
        (lambda d: one(d, "problems").update(baseline=None), r"baseline must be a table, got None"),
        (lambda d: one(d, "candidates").update(schedule=None), r"specs\[0\].candidates\[0\].schedule must be a table"),
        (lambda d: one(d, "candidates").update(artifact="../../x"), "artifact must be a plain name or null, got '../../x'"),
        (lambda d: one(d, "candidates").update(artifact=7), "artifact must be a plain name or null, got 7"),
        (lambda d: one(d, "candidates").update(reason=7), "reason must be a text, got 7"),
        (lambda d: one(d, "candidates").update(serves=[7]), r"serves must be a list of texts, got \[7\]"),
    ],
)
def test_a_field_that_cannot_be_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    write_merge_plan(tmp_path)
    path = tmp_path / "plan.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    for drop_stale in (False, True):
        with pytest.raises(PlanError, match=rf"{path} is no plan of format 1 \(.*{words}.*\): remove it and make one with .*"):
            read_plan(tmp_path, drop_stale=drop_stale)


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 200_000, b"\xff\xfe", b"{", b"3"])
def test_what_is_no_plan_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json is no plan of format 1 \(it is no (JSON|table)\): remove it and make one"):
        read_plan(tmp_path)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    plan = write_merge_plan(tmp_path)
    (tmp_path / ".plan.json.tmp").symlink_to("/dev/full")
    words = f"{tmp_path}/plan.json cannot be written .No space left on device.: mend that; then the same command again goes on"
    with pytest.raises(PlanError, match=words):
        write_plan(tmp_path, dataclasses.replace(plan, specs=()))
    assert read_plan(tmp_path) == plan and [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "two words"
    (folder / "plan.json").mkdir(parents=True)
    with pytest.raises(PlanError, match=f"plan.json cannot be read .Is a directory.*--prepare {shlex.quote(str(folder))}`"):
        read_plan(folder)


@pytest.mark.parametrize("gone", ["old_kernel[head_dim_k=64]", "intracard_merge[head_dim_k=64]", "intracard_merge[warps=4]"])
def test_a_spec_of_another_version_is_named(tmp_path: Path, gone: str) -> None:
    """Unknown, or not whole, as where a field has come since."""
    plan = write_merge_plan(tmp_path)
    path = tmp_path / "plan.json"
    text = path.read_text()
    path.write_text(text.replace(plan.specs[0].spec, gone))
    words = f"`kda-tl autotune --arch cpu --prepare {tmp_path}`"
    with pytest.raises(PlanError) as raised:
        read_plan(tmp_path)
    assert f"{path} has {gone}, which is no spec of this version" in str(raised.value) and words in str(raised.value)
    assert read_plan(tmp_path, drop_stale=True).specs == ()
    path.write_text(text.replace('"inherits": []', f'"inherits": ["{gone}"]'))
    with pytest.raises(PlanError, match="no spec of this version"):
        read_plan(tmp_path)
    assert read_plan(tmp_path, drop_stale=True) == plan
