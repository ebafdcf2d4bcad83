"""Round trips, damage and manifests."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kda_tl.registry import DamagedArtifact, ManifestError, Registry, RegistryError

ID = "3f9ac01d"
FILES = {"lib.so": b"\x7fELF" + bytes(range(256)) * 40, "kernel.cu": b"__global__ void k() {}\n"}
META = {"arch": "sm_90", "entry": "chunk_wy", "grid": [1, 2], "shared_memory": 139264}
KEY = "chunk_wy[K=128,V=128,bf16]"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


def put(registry: Registry, id: str = ID, key: str = KEY, arch: str = "sm_90") -> Path:
    path = registry.put("artifacts", id, FILES, META)
    registry.publish(arch, {key: {"id": id, "kernel": "chunk_wy", "built": "2026-01-02T03:04:05Z"}})
    return path


def tree(root: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(root)): (p.stat().st_mtime_ns, p.stat().st_ino) for p in sorted(root.rglob("*"))}


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Mode bits do not bind root, so root steps aside for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_round_trip(registry: Registry, tmp_path: Path) -> None:
    source = tmp_path / "built.so"
    source.write_bytes(FILES["lib.so"])
    path = registry.put("artifacts", ID, {**FILES, "lib.so": source}, META)
    assert path == registry.root / "artifacts" / ID
    assert sorted(p.name for p in path.iterdir()) == ["kernel.cu", "lib.so", "meta.json"]
    assert (path / "lib.so").read_bytes() == FILES["lib.so"]

    meta = registry.load_meta(path)
    assert {key: meta[key] for key in META} == META
    assert meta["id"] == ID
    assert meta["files"] == {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)} for name, content in FILES.items()
    }
    registry.verify(path)
    assert registry.find("sm_90", KEY) is None
    registry.publish("sm_90", {KEY: {"id": ID, "kernel": "chunk_wy", "built": "now"}})
    assert registry.find("sm_90", KEY) == path
    assert registry.find("sm_89", KEY) is None
    assert registry.archs() == ["sm_90"]


def test_support_libraries(registry: Registry) -> None:
    path = put(registry)
    assert registry.support_dir("sm_90") is None
    libraries = registry.put("support", "beef", {"libtvm_runtime.so": b"runtime"}, {})
    registry.publish("sm_90", {}, support="beef")
    assert registry.support_dir("sm_90") == libraries
    put(registry, key="another")
    assert registry.support_dir("sm_90") == libraries, "publish without support keeps it"
    (libraries / "libtvm_runtime.so").write_bytes(b"Runtime")
    with pytest.raises(DamagedArtifact, match=r"libtvm_runtime\.so"):
        registry.verify(libraries)
    assert registry.support_dir("sm_90") is None
    registry.verify(path)


def test_manifest_file_is_readable_and_sorted(registry: Registry) -> None:
    for id, key in (("b1", "z"), ("a1", "a")):
        put(registry, id, key)
    text = (registry.root / "manifest" / "sm_90.json").read_text()
    assert text.endswith("}\n") and text.count("\n") > 8
    data = json.loads(text)
    assert (data["format"], data["arch"], list(data["artifacts"])) == (2, "sm_90", ["a", "z"])
    assert data["artifacts"]["a"] == {"id": "a1", "kernel": "chunk_wy", "built": "2026-01-02T03:04:05Z"}


def test_put_again_changes_nothing(registry: Registry) -> None:
    path = put(registry)
    before = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in path.iterdir()}
    assert registry.put("artifacts", ID, {"lib.so": b"other bytes"}, {}) == path
    assert {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in path.iterdir()} == before


def test_publish_again_changes_nothing(registry: Registry) -> None:
    put(registry)
    before = (registry.root / "manifest" / "sm_90.json").stat()
    put(registry)
    after = (registry.root / "manifest" / "sm_90.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_artifacts_are_readable_by_others(registry: Registry) -> None:
    old = os.umask(0o022)
    try:
        path = put(registry)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o755
    assert {p.stat().st_mode & 0o777 for p in path.iterdir()} == {0o644}


@pytest.mark.parametrize(
    ("kind", "id", "files", "meta"),
    [
        ("objects", ID, {}, {}),
        ("artifacts", "../up", {}, {}),
        ("artifacts", "", {}, {}),
        ("artifacts", ".hidden", {}, {}),
        ("artifacts", ID, {"a/b": b""}, {}),
        ("artifacts", ID, {"meta.json": b""}, {}),
        ("artifacts", ID, {}, {"files": {}}),
        ("artifacts", ID, {}, {"digest": ""}),
        ("artifacts", ID, {}, {"id": "another"}),
        ("artifacts", ID, {}, {"time": float("nan")}),
    ],
)
def test_put_refuses(registry: Registry, kind: str, id: str, files: dict, meta: dict) -> None:
    with pytest.raises(ValueError):
        registry.put(kind, id, files, meta)  # type: ignore[arg-type]
    assert not [p for p in registry.root.rglob("*") if p.is_file()]


def test_a_failed_put_leaves_nothing(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        registry.put("artifacts", ID, {"a.txt": b"first", "lib.so": tmp_path / "missing.so"}, META)
    with pytest.raises(TypeError):
        registry.put("artifacts", ID, FILES, {"not": object()})
    assert list((registry.root / "artifacts").iterdir()) == []


def test_publish_refuses_what_is_not_there(registry: Registry) -> None:
    with pytest.raises(RegistryError, match="cannot publish absent for sm_90"):
        registry.publish("sm_90", {KEY: {"id": "absent"}})
    with pytest.raises(RegistryError, match="cannot publish absent for sm_90"):
        registry.publish("sm_90", {}, support="absent")
    with pytest.raises(ValueError, match="id"):
        registry.publish("sm_90", {KEY: {"kernel": "chunk_wy"}})
    with pytest.raises(ValueError, match="arch"):
        registry.publish("../sm_90", {})
    assert registry.archs() == []


def tamper(path: Path, how: str) -> str:
    """Damages an artifact and returns the file that the error has to name."""
    library, meta = path / "lib.so", path / "meta.json"
    if how == "truncated":
        library.write_bytes(FILES["lib.so"][:-1])
    elif how == "one bit":
        library.write_bytes(bytes([FILES["lib.so"][0] ^ 1]) + FILES["lib.so"][1:])
    elif how == "missing":
        library.unlink()
    elif how == "a folder":
        library.unlink()
        library.mkdir()
    elif how == "meta truncated":
        meta.write_bytes(meta.read_bytes()[:-20])
    elif how == "meta edited":
        meta.write_text(meta.read_text().replace("139264", "139265"))
    elif how == "meta missing":
        meta.unlink()
    elif how == "meta not text":
        meta.write_bytes(b"\xff\xfe{}")
    elif how == "meta a list":
        meta.write_text("[]")
    elif how == "another artifact":
        other = Registry(path.parents[1]).put("artifacts", "0ther", FILES, META)
        shutil.rmtree(path)
        shutil.copytree(other, path)
    return "meta.json" if how.startswith("meta") or how == "another artifact" else "lib.so"


DAMAGE = [
    "truncated",
    "one bit",
    "missing",
    "a folder",
    "meta truncated",
    "meta edited",
    "meta missing",
    "meta not text",
    "meta a list",
    "another artifact",
]


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_named_and_quarantined(registry: Registry, how: str) -> None:
    path = put(registry)
    file = tamper(path, how)
    with pytest.raises(DamagedArtifact) as caught:
        registry.verify(path)
    moved_to = registry.root / "quarantine" / f"{ID}-1"
    assert (caught.value.path, caught.value.file, caught.value.moved_to) == (path, file, moved_to)
    for part in (str(path), file, str(moved_to), "`kda-tl build --arch sm_90`"):
        assert part in str(caught.value)
    assert moved_to.is_dir() and not path.exists()
    assert registry.find("sm_90", KEY) is None

    put(registry)
    registry.verify(path)
    tamper(path, how)
    with pytest.raises(DamagedArtifact, match=f"{ID}-2"):
        registry.verify(path)
    assert sorted(p.name for p in moved_to.parent.iterdir()) == [f"{ID}-1", f"{ID}-2"]


@pytest.mark.parametrize("how", [how for how in DAMAGE if how.startswith("meta")])
def test_load_meta_refuses_damaged_metadata(registry: Registry, how: str) -> None:
    path = put(registry)
    tamper(path, how)
    with pytest.raises(DamagedArtifact, match=r"meta\.json"):
        registry.load_meta(path)
    assert not path.exists()


def test_put_replaces_a_damaged_artifact(registry: Registry) -> None:
    path = put(registry)
    tamper(path, "truncated")
    put(registry)
    registry.verify(path)
    assert (registry.root / "quarantine" / f"{ID}-1" / "lib.so").is_file()


def test_an_absent_artifact_is_damage_too(registry: Registry) -> None:
    path = put(registry)
    shutil.rmtree(path)
    assert registry.find("sm_90", KEY) is None
    with pytest.raises(DamagedArtifact, match="the folder is gone") as caught:
        registry.verify(path)
    assert caught.value.moved_to is None


def test_an_unpublished_artifact_names_its_own_arch(registry: Registry) -> None:
    path = registry.put("artifacts", ID, FILES, {"arch": "sm_80"})
    tamper(path, "truncated")
    with pytest.raises(DamagedArtifact, match="`kda-tl build --arch sm_80`"):
        registry.verify(path)


def test_verify_refuses_a_folder_outside(registry: Registry, tmp_path: Path) -> None:
    put(registry)
    elsewhere = Registry(tmp_path / "elsewhere")
    path = put(elsewhere)
    with pytest.raises(ValueError, match="is not an artifact of"):
        registry.verify(path)
    assert path.is_dir()


def test_a_file_that_may_not_be_read_is_no_damage() -> None:
    root = Path(tempfile.mkdtemp(prefix="kda-tl-test-"))
    try:
        root.chmod(0o755)
        registry = Registry(root / "registry")
        path = put(registry)
        (path / "lib.so").chmod(0)
        with as_ordinary_user(), pytest.raises(RegistryError, match=r"cannot read .*lib\.so") as caught:
            registry.verify(path)
        assert not isinstance(caught.value, DamagedArtifact)
        assert path.is_dir()
    finally:
        shutil.rmtree(root)


def test_read_only_registry() -> None:
    root = Path(tempfile.mkdtemp(prefix="kda-tl-test-"))  # pytest's folders are closed to other users
    try:
        root.chmod(0o755)
        writer = Registry(root)
        path = put(writer)
        shutil.rmtree(root / "quarantine", ignore_errors=True)
        (root / ".lock").unlink()
        for folder in [root, *(p for p in root.rglob("*") if p.is_dir())]:
            folder.chmod(0o555)
        before = tree(root)
        reader = Registry(root)
        with as_ordinary_user():
            assert reader.find("sm_90", KEY) == path
            assert [entry.id for entry in reader.entries()] == [ID]
            assert reader.load_meta(path)["entry"] == "chunk_wy"
            reader.verify(path)
            assert reader.put("artifacts", ID, FILES, META) == path, "nothing to do"
            assert reader.collect_garbage(dry_run=True) == []
            with pytest.raises(PermissionError):
                reader.put("artifacts", "another", FILES, META)
        assert tree(root) == before

        tamper(path, "one bit")
        with as_ordinary_user(), pytest.raises(DamagedArtifact, match="could not be moved away") as caught:
            reader.verify(path)
        assert caught.value.moved_to is None and path.is_dir()
    finally:
        for folder in [root, *(p for p in root.rglob("*") if p.is_dir())]:
            folder.chmod(0o755)
        shutil.rmtree(root)


def test_reading_an_absent_registry_makes_nothing(registry: Registry) -> None:
    assert registry.manifest("sm_90").artifacts == {}
    assert registry.find("sm_90", KEY) is None
    assert registry.support_dir("sm_90") is None
    assert registry.entries() == [] and registry.archs() == []
    assert registry.collect_garbage() == []
    with pytest.raises(DamagedArtifact):
        registry.verify(registry.root / "artifacts" / ID)
    assert not registry.root.exists()


def test_entries(registry: Registry) -> None:
    put(registry, "a1", "second", "sm_90")
    put(registry, "a1", "first", "sm_90")
    put(registry, "b1", "third", "cpu")
    found = [(entry.arch, entry.spec_key, entry.id, entry.path.name) for entry in registry.entries()]
    assert found == [("cpu", "third", "b1", "b1"), ("sm_90", "first", "a1", "a1"), ("sm_90", "second", "a1", "a1")]
    assert [entry.spec_key for entry in registry.entries("cpu")] == ["third"]
    assert registry.entries("cpu")[0].fields["kernel"] == "chunk_wy"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not JSON"),
        ('{"format": 1, "arch": "sm_9', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("[1]", "does not state its format"),
        ("{}", "does not state its format"),
        ('{"format": 1, "arch": "sm_80", "artifacts": {}}', "manifest of 'sm_80'"),
        ('{"format": 1, "arch": "sm_90", "artifacts": []}', "no artifacts table"),
        ('{"format": 1, "arch": "sm_90", "artifacts": {"k": "a1"}}', "no artifacts table"),
        ('{"format": 1, "arch": "sm_90", "artifacts": {"k": {"id": ["a1"]}}}', "id must be"),
        ('{"format": 1, "arch": "sm_90", "artifacts": {"k": {"kernel": "x"}}}', "id must be"),
        ('{"format": 1, "arch": "sm_90", "artifacts": {"k": {"id": "../../etc"}}}', "id must be"),
        ('{"format": 1, "arch": "sm_90", "artifacts": {}, "support": "/lib"}', "support must be"),
        ('{"format": 2, "arch": "sm_90", "artifacts": {"k": {"classes": []}}}', "classes must be a list of tables"),
        ('{"format": 2, "arch": "sm_90", "artifacts": {"k": {"classes": {"id": "a1"}}}}', "classes must be a list of tables"),
        ('{"format": 2, "arch": "sm_90", "artifacts": {"k": {"classes": ["a1"]}}}', "classes must be a list of tables"),
        ('{"format": 2, "arch": "sm_90", "artifacts": {"k": {"classes": [{"id": "../x"}]}}}', "id must be"),
        ('{"format": 2, "arch": "sm_90", "artifacts": {"k": {"classes": [{"id": "a", "up_to": 4}]}}}', "up_to must rise"),
        (
            '{"format": 2, "arch": "sm_90", "artifacts": {"k": {"classes": [{"id": "a"}, {"id": "b", "up_to": null}]}}}',
            "up_to must rise",
        ),
        (
            '{"format": 2, "arch": "sm_90", "artifacts": {"k": {"classes": [{"id": "a", "up_to": 4}, {"id": "b", "up_to": 4}, '
            '{"id": "c"}]}}}',
            "up_to must rise",
        ),
    ],
)
def test_corrupt_manifest(registry: Registry, content: str | bytes, reason: str) -> None:
    put(registry)
    path = registry.root / "manifest" / "sm_90.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (lambda: registry.find("sm_90", KEY), registry.entries, lambda: put(registry)):
        with pytest.raises(ManifestError, match=reason) as caught:
            read()
        assert str(path) in str(caught.value) and "kda-tl build --arch sm_90" in str(caught.value)
        assert caught.value.__context__ is None or caught.value.__suppress_context__
    with pytest.raises(ManifestError):
        registry.collect_garbage(min_age=0)
    assert (registry.root / "artifacts" / ID).is_dir()


def test_a_manifest_of_format_1_is_read_and_rewritten(registry: Registry) -> None:
    put(registry)
    path = registry.root / "manifest" / "sm_90.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    assert registry.find("sm_90", KEY) == registry.root / "artifacts" / ID
    put(registry, "b1", "another")
    assert json.loads(path.read_text())["format"] == 2 and set(registry.manifest("sm_90").artifacts) == {KEY, "another"}


def test_newer_manifest(registry: Registry) -> None:
    put(registry)
    path = registry.root / "manifest" / "sm_90.json"
    path.write_text(json.dumps({"format": 3, "arch": "sm_90", "tables": {}}))
    before = path.read_bytes()
    with pytest.raises(ManifestError, match="format 3, this version of kda-tl reads up to format 2: upgrade kda-tl"):
        registry.manifest("sm_90")
    with pytest.raises(ManifestError):
        put(registry)
    assert path.read_bytes() == before


def test_manifest_is_parsed_once(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    put(registry)
    first = registry.manifest("sm_90")
    monkeypatch.setattr("kda_tl.registry.store.read_manifest", lambda *_: pytest.fail("parsed again"))
    assert registry.manifest("sm_90") is first
    assert registry.find("sm_90", KEY) is not None
    monkeypatch.undo()
    put(Registry(registry.root), "b1", "from another builder")
    assert registry.find("sm_90", "from another builder") is not None


def test_manifest_is_frozen(registry: Registry) -> None:
    put(registry)
    manifest = registry.manifest("sm_90")
    with pytest.raises(TypeError):
        manifest.artifacts["new"] = {}  # type: ignore[index]
    with pytest.raises(TypeError):
        manifest.artifacts[KEY]["id"] = "other"  # type: ignore[index]
