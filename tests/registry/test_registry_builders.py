"""Several builders at once, builders that die, and what garbage collection may take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kda_tl.registry import DamagedArtifact, ManifestError, Registry, RegistryError
from kda_tl.registry.locks import temporary_folder

ROOT = Path(__file__).resolve().parents[2]

# The registry stands alone: without the package around it, and so without torch, a process starts at once.
BUILDER = """
import os, signal, sys, time, types
from pathlib import Path
package = sys.modules["kda_tl"] = types.ModuleType("kda_tl")
package.__path__ = [os.path.join(os.environ["PYTHONPATH"].split(os.pathsep)[0], "kda_tl")]
from kda_tl.registry import Registry, store

registry = Registry(sys.argv[1])
"""


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


def builder(registry: Registry, code: str, *args: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER + code, str(registry.root), *args],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def make_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - 7200,) * 2)


DIE = """
store.os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
registry.put("artifacts", "a1", {"lib.so": b"content" * 1000}, {})
"""


def test_a_builder_killed_before_the_rename(registry: Registry) -> None:
    assert builder(registry, DIE).wait(120) == -signal.SIGKILL
    left = names(registry.root / "artifacts")
    assert len(left) == 1 and left[0].startswith(".tmp-")
    assert registry.entries() == []
    assert registry.collect_garbage() == [], "an hour old at least"

    registry.put("artifacts", "a1", {"lib.so": b"content" * 1000}, {})
    assert names(registry.root / "artifacts") == ["a1"]
    registry.verify(registry.root / "artifacts" / "a1")


def test_garbage_collection_clears_up_after_a_dead_builder(registry: Registry) -> None:
    assert builder(registry, DIE).wait(120) == -signal.SIGKILL
    (left,) = (registry.root / "artifacts").iterdir()
    make_old(left)
    assert registry.collect_garbage(dry_run=True) == [left] and left.is_dir()
    assert registry.collect_garbage() == [left] and not left.exists()


def test_a_live_builder_is_left_alone(registry: Registry) -> None:
    parent = registry.root / "artifacts"
    parent.mkdir()
    with temporary_folder(parent) as folder:
        make_old(folder)
        registry.put("artifacts", "a1", {}, {})
        assert registry.collect_garbage(min_age=0) == [parent / "a1"]
        assert folder.is_dir()
    assert names(parent) == []


def test_a_publisher_killed_before_the_replacement(registry: Registry) -> None:
    registry.put("artifacts", "a1", {}, {})
    registry.publish("cpu", {"first": {"id": "a1"}})
    code = """
from kda_tl.registry import manifest
manifest.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
registry.publish("cpu", {"second": {"id": "a1"}})
"""
    assert builder(registry, code).wait(120) == -signal.SIGKILL
    assert list(registry.manifest("cpu").artifacts) == ["first"]
    registry.publish("cpu", {"third": {"id": "a1"}})
    assert sorted(registry.manifest("cpu").artifacts) == ["first", "third"]
    assert names(registry.root / "manifest") == ["cpu.json"]


def test_concurrent_publishing_loses_nothing(registry: Registry) -> None:
    code = """
name = sys.argv[2]
registry.put("artifacts", name, {}, {})
print("ready", flush=True)
go = registry.root / "go"
while not go.exists():
    time.sleep(0.001)
for i in range(60):
    registry.publish("cpu", {f"{name}-{i}": {"id": name}})
"""
    builders = [builder(registry, code, name) for name in ("a1", "b1")]
    for process in builders:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    (registry.root / "go").touch()
    assert [process.wait(120) for process in builders] == [0, 0]
    expected = sorted(f"{name}-{i}" for name in ("a1", "b1") for i in range(60))
    assert sorted(registry.manifest("cpu").artifacts) == expected


def test_concurrent_puts_of_one_artifact(registry: Registry) -> None:
    code = """
print("ready", flush=True)
go = registry.root / "go"
while not go.exists():
    time.sleep(0.001)
for i in range(40):
    registry.verify(registry.put("artifacts", f"a{i}", {"lib.so": bytes(20000)}, {}))
"""
    builders = [builder(registry, code) for _ in range(2)]
    for process in builders:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    (registry.root / "go").touch()
    assert [process.wait(120) for process in builders] == [0, 0]
    assert names(registry.root / "artifacts") == sorted(f"a{i}" for i in range(40))
    assert not (registry.root / "quarantine").exists()


def test_the_faster_builder_wins(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    other, rename = Registry(registry.root), os.rename

    def slow_rename(source: Path, target: Path) -> None:
        monkeypatch.undo()
        other.put("artifacts", "a1", {"lib.so": b"theirs"}, {})
        rename(source, target)

    monkeypatch.setattr("kda_tl.registry.store.os.rename", slow_rename)
    path = registry.put("artifacts", "a1", {"lib.so": b"ours"}, {})
    assert (path / "lib.so").read_bytes() == b"theirs"
    assert names(path.parent) == ["a1"]


def test_verify_spares_an_artifact_that_was_rebuilt_meanwhile(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes see the same damage; the slower one must not move the replacement away."""
    path = registry.put("artifacts", "a1", {"lib.so": b"good"}, {})
    (path / "lib.so").write_bytes(b"evil")
    other, quarantine = Registry(registry.root), Registry._quarantine

    def slow_quarantine(self: Registry, *args: object) -> object:
        monkeypatch.undo()
        with pytest.raises(DamagedArtifact):
            other.verify(path)
        other.put("artifacts", "a1", {"lib.so": b"good"}, {})
        return quarantine(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Registry, "_quarantine", slow_quarantine)
    registry.verify(path)
    assert (path / "lib.so").read_bytes() == b"good"
    assert names(registry.root / "quarantine") == ["a1-1"]


def test_garbage_collection(registry: Registry) -> None:
    paths = {id: registry.put("artifacts", id, {"lib.so": id.encode()}, {}) for id in ("used", "old", "fresh", "again")}
    support = {id: registry.put("support", id, {"lib.so": id.encode()}, {}) for id in ("s_used", "s_old")}
    registry.publish("cpu", {"key": {"id": "used"}}, support="s_used")
    make_old(*(path for id, path in paths.items() if id != "fresh"), *support.values())
    registry.put("artifacts", "again", {}, {})  # a second builder is about to publish it

    garbage = [paths["old"], support["s_old"]]
    assert registry.collect_garbage(dry_run=True) == garbage
    assert all(path.is_dir() for path in [*paths.values(), *support.values()])
    assert registry.collect_garbage() == garbage
    assert names(registry.root / "artifacts") == ["again", "fresh", "used"]
    assert names(registry.root / "support") == ["s_used"]
    assert registry.collect_garbage(min_age=0) == [paths["again"], paths["fresh"]]
    registry.verify(paths["used"])


def test_a_quarantine_is_kept_unless_asked_for(registry: Registry) -> None:
    path = registry.put("artifacts", "a1", {"lib.so": b"good"}, {})
    (path / "lib.so").write_bytes(b"evil")
    with pytest.raises(DamagedArtifact) as caught:
        registry.verify(path)
    moved_to = caught.value.moved_to
    assert registry.collect_garbage(min_age=0) == []
    assert registry.collect_garbage(True, quarantine=True) == [moved_to] == registry.collect_garbage(quarantine=True)
    assert not moved_to.exists()


def test_a_complete_registry_is_read_without_a_lock(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only file system."""
    registry.put("artifacts", "a1", {"lib.so": b"x"}, {})
    registry.put("support", "s1", {"lib.so": b"x"}, {})
    entries = {"key": {"id": "a1", "built": "2026-01-02"}}
    registry.publish("sm_90", entries, "s1")
    before = {path: path.stat().st_mtime_ns for path in registry.root.rglob("*")}
    monkeypatch.setattr(Registry, "_lock", lambda self: pytest.fail("locked"))
    again = Registry(registry.root)
    assert again.has("artifacts", "a1") and again.has("support", "s1") and not again.has("artifacts", "a2")
    assert again.publish("sm_90", entries, "s1") == again.publish("sm_90", entries) == registry.manifest("sm_90")
    assert {path: path.stat().st_mtime_ns for path in registry.root.rglob("*")} == before


@pytest.mark.parametrize("change", [{"other": {"id": "a1"}}, {"key": {"id": "a1", "built": "2026-02-03"}}])
def test_news_are_published(registry: Registry, change: dict[str, dict[str, str]]) -> None:
    registry.put("artifacts", "a1", {}, {})
    registry.publish("sm_90", {"key": {"id": "a1", "built": "2026-01-02"}})
    assert registry.publish("sm_90", change).artifacts.items() >= change.items()
    registry.put("support", "s1", {}, {})
    assert registry.publish("sm_90", change, "s1").support == "s1"
    (registry.root / "artifacts" / "a1" / "meta.json").unlink()
    with pytest.raises(RegistryError, match="cannot publish a1"):
        registry.publish("sm_90", change, "s1")


def test_what_a_builder_is_about_to_publish_counts_as_new(registry: Registry) -> None:
    path = registry.put("artifacts", "a1", {"lib.so": b"good"}, {})
    make_old(path)
    assert registry.has("artifacts", "a1")
    assert registry.collect_garbage() == []
    (path / "lib.so").write_bytes(b"evil")
    assert not registry.has("artifacts", "a1") and not path.exists()


def test_garbage_collection_stops_at_a_damaged_manifest(registry: Registry) -> None:
    path = registry.put("artifacts", "a1", {}, {})
    registry.publish("cpu", {"key": {"id": "a1"}})
    (registry.root / "manifest" / "cpu.json").write_text("{")
    for dry_run in (True, False):
        with pytest.raises(ManifestError):
            registry.collect_garbage(dry_run, min_age=0)
    assert path.is_dir()
