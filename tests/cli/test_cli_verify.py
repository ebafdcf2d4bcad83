from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


def test_all_well(run, roots, fill) -> None:
    fill(roots[0])
    fill(roots[1])
    result = run("verify")
    assert result.exit_code == 0 and "8 artifacts" in result.output


def test_nothing_there_is_no_success(run, roots, fill) -> None:
    result = run("verify")
    assert result.exit_code == 1 and all(str(root) in result.output for root in roots)
    fill(roots[0])
    result = run("verify", "--arch", "sm_80")
    assert result.exit_code == 1 and "kda-tl build --arch sm_80" in result.output


@pytest.mark.parametrize(
    ("folder", "file", "arch"),
    [
        ("artifacts/cpu-one", "lib.so", "cpu"),
        ("artifacts/gpu-one", "meta.json", "sm_90"),
        ("support/libraries", "libtvm_runtime.so", "sm_90"),
    ],
)
def test_what_was_changed_is_named_and_quarantined(run, roots, fill, folder: str, file: str, arch: str) -> None:
    registry = fill(roots[0])
    path = registry.root / folder / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    other = "sm_90" if arch == "cpu" else "cpu"
    assert run("verify", "--arch", other).exit_code == 0
    result = run("verify")
    assert result.exit_code == 1
    assert "1 of 4" in result.output and str(registry.root / folder) in result.output
    assert f"kda-tl build --arch {arch}" in result.output
    assert list((registry.root / "quarantine").iterdir())


def test_every_damaged_one_is_named(run, roots, fill) -> None:
    for root in roots:
        registry = fill(root)
        (registry.root / "artifacts" / "cpu-two" / "lib.so").unlink()
    result = run("verify", "--arch", "cpu")
    assert result.exit_code == 1
    assert all(str(root / "artifacts" / "cpu-two") in result.output for root in roots)


def test_what_the_manifest_names_and_is_gone(run, roots, fill) -> None:
    registry = fill(roots[0])
    shutil.rmtree(registry.root / "artifacts" / "cpu-one")
    result = run("verify")
    assert result.exit_code == 1 and "cpu-one" in result.output


def test_what_no_manifest_names_is_verified_too(run, roots, fill) -> None:
    registry = fill(roots[0])
    (registry.put("artifacts", "spare", {"lib.so": b"x"}, {}) / "lib.so").write_bytes(b"y")
    assert run("verify", "--arch", "cpu").exit_code == 0
    result = run("verify")
    assert result.exit_code == 1 and "spare" in result.output


@pytest.mark.parametrize("damage", [False, True])
def test_json(run, roots, fill, damage: bool) -> None:
    registry = fill(roots[0])
    if damage:
        (registry.root / "artifacts" / "cpu-one" / "lib.so").unlink()
    result = run("verify", "--json")
    report = json.loads(result.stdout)
    assert (report["ok"], report["checked"], result.exit_code) == (not damage, 4, int(damage))
    assert [(failure["registry"], Path(failure["path"]).name) for failure in report["failures"]] == (
        [(str(roots[0]), "cpu-one")] if damage else []
    )
    assert not damage or "is damaged" in report["failures"][0]["error"]


def test_json_of_nothing(run, roots) -> None:
    result = run("verify", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout) == {"ok": False, "checked": 0, "failures": []}


def test_damaged_manifest(run, roots, fill) -> None:
    registry = fill(roots[0])
    manifest = registry.root / "manifest" / "sm_90.json"
    manifest.write_text("[]")
    result = run("verify")
    assert result.exit_code == 1 and str(manifest) in result.output


def test_a_manifest_that_cannot_be_read_is_no_artifact(run, roots, fill) -> None:
    registry = fill(roots[0])
    (registry.root / "manifest" / "cpu.json").write_text("{")
    result = run("verify")
    assert result.exit_code == 1 and result.output.startswith("Error: manifests that cannot be read: 1\n")
