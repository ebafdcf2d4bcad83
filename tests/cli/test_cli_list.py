from __future__ import annotations

import json
import shutil


def test_empty_says_where_it_looked_and_how_to_build(run, roots) -> None:
    result = run("list")
    assert result.exit_code == 0
    assert all(str(root) in result.output for root in roots) and "kda-tl build --arch ARCH" in result.output
    assert json.loads(run("list", "--json").stdout) == []
    assert "kda-tl build --arch sm_80" in run("list", "--arch", "sm_80").output


def test_given_folder_is_the_only_one_looked_at(run, roots, fill, tmp_path) -> None:
    fill(roots[0])
    result = run("list", "--registry", tmp_path / "other")
    assert str(roots[0]) not in result.output
    assert f"kda-tl build --arch ARCH --registry {tmp_path / 'other'}" in result.output


def test_all_registries_in_search_order(run, roots, fill) -> None:
    for root in reversed(roots):
        fill(root)
    lines = run("list").output.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [str(root) for root in roots]
    assert lines[1].split() == ["arch", "built", "size", "artifact", "spec"]
    assert lines[5].startswith("  Together") and lines[5].endswith(": cpu 2, sm_90 1")
    row = next(line for line in lines if "k[two]" in line).split()
    assert row[0] == "cpu" and row[1] == "2026-01-02" and row[5:] == ["cpu-two", "k[two]"]


def test_bars_compare_sizes(run, roots, fill) -> None:
    registry = fill(roots[0])
    registry.put("artifacts", "big", {"lib.so": bytes(10**6)}, {})
    registry.publish("cpu", {"k[big]": {"id": "big", "kernel": "k", "built": "2026-01-02"}})
    lengths = {line.split()[-1]: len(line.split()[4]) for line in run("list").output.splitlines() if line.endswith("]")}
    assert lengths == {"k[big]": 12, "k[one]": 1, "k[two]": 1}


def test_json_has_every_field_and_honours_arch(run, roots, fill) -> None:
    registry = fill(roots[1])
    entries = json.loads(run("list", "--json").stdout)
    assert [(entry["arch"], entry["id"]) for entry in entries] == [("cpu", "cpu-one"), ("cpu", "cpu-two"), ("sm_90", "gpu-one")]
    (entry,) = json.loads(run("list", "--json", "--arch", "sm_90").stdout)
    files = (registry.root / "artifacts" / "gpu-one").iterdir()
    assert entry == {
        "registry": str(roots[1]),
        "arch": "sm_90",
        "spec": "k[one]",
        "up_to": None,
        "id": "gpu-one",
        "bytes": sum(file.stat().st_size for file in files),
        "built": "2026-01-02",
    }


def test_classes_have_a_line_each(run, roots, fill) -> None:
    registry = fill(roots[0])
    classes = [{"up_to": 33, "id": "cpu-one"}, {"up_to": None, "id": "cpu-two"}]
    registry.publish("cpu", {"k[sized]": {"kernel": "k", "built": "2026-01-02", "classes": classes}})
    lines = [line.split() for line in run("list").output.splitlines() if "k[sized]" in line]
    assert [(line[5], " ".join(line[6:])) for line in lines] == [
        ("cpu-one", "k[sized] up to size 33"),
        ("cpu-two", "k[sized] beyond that"),
    ]
    entries = json.loads(run("list", "--json", "--arch", "cpu").stdout)
    assert [entry["up_to"] for entry in entries if entry["spec"] == "k[sized]"] == [33, None]


def test_artifact_whose_folder_is_gone(run, roots, fill) -> None:
    registry = fill(roots[0])
    shutil.rmtree(registry.root / "artifacts" / "cpu-one")
    row = next(line for line in run("list").output.splitlines() if "k[one]" in line)
    assert "MISSING" in row
    assert [entry["bytes"] is None for entry in json.loads(run("list", "--json", "--arch", "cpu").stdout)] == [True, False]


def test_damaged_manifest_is_named_and_the_rest_shown(run, roots, fill) -> None:
    registry = fill(roots[0])
    manifest = registry.root / "manifest" / "cpu.json"
    manifest.write_text("{")
    result = run("list")
    assert result.exit_code == 1
    assert str(manifest) in result.output and "gpu-one" in result.output and "cpu-one" not in result.output


def test_listing_moves_nothing(run, roots, fill) -> None:
    registry = fill(roots[0])
    damaged = registry.root / "artifacts" / "cpu-one" / "lib.so"
    damaged.write_bytes(b"changed")
    assert run("list").exit_code == 0
    assert damaged.exists()
