from __future__ import annotations

import os
import time
from pathlib import Path

from kda_tl.registry import Registry


def make_old(registry: Registry) -> None:
    for path in registry.root.glob("*/*"):
        os.utime(path, (time.time() - 7200,) * 2)


def test_what_no_manifest_names_is_removed(run, fill, tmp_path: Path) -> None:
    registry = fill(tmp_path)
    stray = registry.put("artifacts", "stray", {"lib.so": bytes(2048)}, {})
    assert "0 folders" in run("gc", "--registry", tmp_path).output, "a build may be about to publish it"
    make_old(registry)

    result = run("gc", "--dry-run", "--registry", tmp_path)
    assert result.exit_code == 0 and "artifacts/stray" in result.output and "would be removed" in result.output
    assert stray.is_dir()
    result = run("gc", "--registry", tmp_path)
    assert result.exit_code == 0 and "artifacts/stray" in result.output and "1 folder," in result.output
    assert not stray.exists() and run("verify", "--registry", tmp_path).exit_code == 0
    assert len(registry.entries()) == 3


def test_the_age_can_be_given(run, fill, tmp_path: Path) -> None:
    registry = fill(tmp_path)
    stray = registry.put("artifacts", "stray", {}, {})
    assert "1 folder," in run("gc", "--min-age", 0, "--registry", tmp_path).output and not stray.exists()


def test_quarantine_goes_when_asked(run, fill, tmp_path: Path) -> None:
    registry = fill(tmp_path)
    (registry.root / "artifacts" / "gpu-one" / "lib.so").write_bytes(b"spoilt")
    assert run("verify", "--registry", tmp_path).exit_code == 1
    (quarantined,) = (registry.root / "quarantine").iterdir()
    assert "0 folders" in run("gc", "--registry", tmp_path).output and quarantined.exists()
    assert "1 folder," in run("gc", "--quarantine", "--dry-run", "--registry", tmp_path).output and quarantined.exists()
    assert f"quarantine/{quarantined.name}" in run("gc", "--quarantine", "--registry", tmp_path).output
    assert not quarantined.exists()


def test_a_damaged_manifest_stops_it(run, fill, tmp_path: Path) -> None:
    registry = fill(tmp_path)
    registry.put("artifacts", "stray", {}, {})
    (tmp_path / "manifest" / "cpu.json").write_text("{")
    result = run("gc", "--min-age", 0, "--registry", tmp_path)
    assert result.exit_code == 1 and "cpu.json is damaged" in result.output
    assert (tmp_path / "artifacts" / "stray").is_dir()


def test_no_age_is_nan(run, tmp_path: Path) -> None:
    result = run("gc", "--min-age", "nan", "--registry", tmp_path)
    assert result.exit_code == 2 and "'nan' is no number of minutes" in result.output


def test_an_empty_folder(run, tmp_path: Path) -> None:
    result = run("gc", "--registry", tmp_path / "none")
    assert result.exit_code == 0 and "0 folders, 0 B removed" in result.output and not (tmp_path / "none").exists()


def test_candidates_of_the_tuner_are_not_its_business(run, fill, tmp_path: Path) -> None:
    """Its plan names them, no manifest does."""
    registry = fill(tmp_path)
    candidate = registry.put("artifacts", "candidate", {}, {})
    (tmp_path / "plan.json").write_text("{}")
    result = run("gc", "--min-age", 0, "--registry", tmp_path)
    assert result.exit_code == 1 and "holds candidates of `kda-tl autotune`" in result.output and candidate.is_dir()
