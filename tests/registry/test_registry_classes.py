"""Several artifacts of one spec, by the size of the problem."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from kda_tl.registry import DamagedArtifact, Registry, RegistryError, export_bundle, import_bundle

CLASSES = [{"up_to": 33, "id": "few", "source": "model"}, {"up_to": None, "id": "many", "source": "measured"}]


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """ "scan" has two artifacts, "wy" one, and "stray" serves nothing."""
    registry = Registry(tmp_path / "registry")
    for name in ("few", "many", "wy", "stray"):
        registry.put("artifacts", name, {"lib.so": name.encode()}, {"arch": "sm_90"})
    registry.publish("sm_90", {"scan": {"kernel": "chunk_scan", "classes": CLASSES}, "wy": {"id": "wy", "kernel": "chunk_wy"}})
    return registry


def test_what_serves_which_size(registry: Registry) -> None:
    folder = registry.root / "artifacts"
    found = registry.classes("sm_90", "scan")
    assert [(one.up_to, one.path) for one in found] == [(33, folder / "few"), (None, folder / "many")]
    assert [one.fields["source"] for one in found] == ["model", "measured"]
    assert [(one.up_to, one.path) for one in registry.classes("sm_90", "wy")] == [(None, folder / "wy")]
    assert registry.classes("sm_90", "merge") == () == registry.classes("sm_80", "scan")
    assert registry.find("sm_90", "scan") == folder / "many" and registry.find("sm_90", "merge") is None
    listed = [(entry.spec_key, entry.up_to, entry.id, entry.fields["kernel"]) for entry in registry.entries("sm_90")]
    assert listed == [("scan", 33, "few", "chunk_scan"), ("scan", None, "many", "chunk_scan"), ("wy", None, "wy", "chunk_wy")]
    stored = json.loads((registry.root / "manifest" / "sm_90.json").read_text())
    assert stored["format"] == 2 and stored["artifacts"]["scan"]["classes"] == CLASSES


@pytest.mark.parametrize("gone", ["few", "many"])
def test_without_one_of_its_artifacts_a_spec_is_not_served(registry: Registry, gone: str) -> None:
    shutil.rmtree(registry.root / "artifacts" / gone)
    assert registry.classes("sm_90", "scan") == () and registry.find("sm_90", "scan") is None
    assert registry.classes("sm_90", "wy")


def test_every_class_is_kept_by_garbage_collection(registry: Registry) -> None:
    assert [path.name for path in registry.collect_garbage(min_age=0)] == ["stray"]
    assert len(registry.classes("sm_90", "scan")) == 2


def test_publishing_the_same_again_writes_nothing(registry: Registry) -> None:
    path = registry.root / "manifest" / "sm_90.json"
    before = path.stat().st_ino
    registry.publish("sm_90", {"scan": {"kernel": "chunk_scan", "classes": [dict(one) for one in CLASSES]}})
    assert path.stat().st_ino == before
    registry.publish("sm_90", {"scan": {"kernel": "chunk_scan", "classes": [{**CLASSES[0], "up_to": 34}, CLASSES[1]]}})
    assert registry.classes("sm_90", "scan")[0].up_to == 34


def test_what_cannot_be_published(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="cannot publish nowhere for sm_90"):
        registry.publish("sm_90", {"scan": {"classes": [CLASSES[0], {"up_to": None, "id": "nowhere"}]}})
    for classes in ([], CLASSES[:1], [CLASSES[1], CLASSES[0]], [{"up_to": None, "id": "../few"}]):
        with pytest.raises(ValueError):
            registry.publish("sm_90", {"scan": {"classes": classes}})
    assert len(registry.classes("sm_90", "scan")) == 2


@pytest.mark.parametrize("id", ["few", "many"])
def test_damage_of_one_class_names_the_arch(registry: Registry, id: str) -> None:
    path = registry.root / "artifacts" / id
    (path / "lib.so").write_bytes(b"other")
    assert registry.has("artifacts", "wy")
    with pytest.raises(DamagedArtifact, match="kda-tl build --arch sm_90"):
        registry.verify(path)
    assert registry.classes("sm_90", "scan") == ()


def test_a_bundle_carries_every_class(registry: Registry, tmp_path: Path) -> None:
    out = export_bundle(registry, tmp_path / "all.tar")
    assert (out.archs, out.folders) == ({"sm_90": 2}, 3)
    target = Registry(tmp_path / "to")
    import_bundle(out.file, target)
    assert [one.path.name for one in target.classes("sm_90", "scan")] == ["few", "many"]
    assert sorted(os.listdir(target.root / "artifacts")) == ["few", "many", "wy"]
    os.remove(registry.root / "artifacts" / "few" / "meta.json")
    with pytest.raises(RegistryError):
        export_bundle(registry, tmp_path / "broken.tar")
