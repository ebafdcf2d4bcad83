"""A registry as one file: what goes out comes in, and nothing else does."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kda_tl.registry import BundleError, DamagedArtifact, ManifestError, Registry, RegistryError, export_bundle, import_bundle

Edit = Callable[[list[tuple[tarfile.TarInfo, bytes]]], list[tuple[tarfile.TarInfo, bytes]]]


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Two archs that share support libraries, and an artifact that no manifest names."""
    registry = Registry(tmp_path / "from")
    for name in ("a1", "a2", "stray"):
        registry.put(
            "artifacts", name, {"lib.so": os.urandom(2000), "kernel.cu": name.encode()}, {"abi": "tvm_ffi", "n": [1, 2]}
        )
    registry.put("support", "s1", {"lib.so": os.urandom(100), "NOTICE": b"theirs"}, {})
    registry.publish("sm_80", {"one": {"id": "a1", "built": "2026-01-02"}}, "s1")
    registry.publish("sm_90", {"two": {"id": "a2"}, "three": {"id": "a2"}}, "s1")
    return registry


def content(registry: Registry) -> dict[str, bytes]:
    files = (path for path in registry.root.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(registry.root)): path.read_bytes() for path in files}


def test_what_goes_out_comes_in(registry: Registry, tmp_path: Path) -> None:
    file, target = tmp_path / "all.tar", Registry(tmp_path / "to")
    out = export_bundle(registry, file)
    assert (out.file, out.archs, out.folders, out.size) == (file, {"sm_80": 1, "sm_90": 2}, 3, file.stat().st_size)
    assert out.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert import_bundle(file, target, out.sha256.upper()) == out
    assert content(target) == {name: data for name, data in content(registry).items() if "stray" not in name}
    for path in target.root.glob("*/[as]*"):
        if path.is_dir():
            target.verify(path)
    assert import_bundle(file, target).archs == out.archs, "twice is the same as once"


def test_equal_registries_give_equal_bytes(registry: Registry, tmp_path: Path) -> None:
    first, again = tmp_path / "first.tar", tmp_path / "again.tar"
    export_bundle(registry, first)
    copied = Registry(tmp_path / "copied")
    import_bundle(first, copied)
    for path in copied.root.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    export_bundle(copied, again)
    assert first.read_bytes() == again.read_bytes()


def test_one_arch_joins_what_is_there(registry: Registry, tmp_path: Path) -> None:
    export_bundle(registry, tmp_path / "one.tar", ["sm_90"])
    target = Registry(tmp_path / "to")
    target.put("artifacts", "mine", {}, {})
    target.publish("sm_90", {"two": {"id": "mine"}, "mine": {"id": "mine"}})
    import_bundle(tmp_path / "one.tar", target)
    assert target.archs() == ["sm_90"] and target.support_dir("sm_90") == target.root / "support" / "s1"
    assert {key: entry["id"] for key, entry in target.manifest("sm_90").artifacts.items()} == {
        "mine": "mine",
        "two": "a2",
        "three": "a2",
    }


def test_there_must_be_something_to_export(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="no artifacts for cpu to export"):
        export_bundle(registry, tmp_path / "x.tar", ["sm_80", "cpu"])
    with pytest.raises(RegistryError, match="no artifacts to export"):
        export_bundle(Registry(tmp_path / "empty"), tmp_path / "x.tar")
    assert not (tmp_path / "x.tar").exists()


def test_a_damaged_artifact_is_not_exported(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "x.tar"
    file.write_bytes(b"older")
    (registry.root / "artifacts" / "a1" / "lib.so").write_bytes(b"spoilt")
    with pytest.raises(DamagedArtifact):
        export_bundle(registry, file)
    assert file.read_bytes() == b"older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from", "x.tar"]


def rewrite(file: Path, edit: Edit) -> None:
    with tarfile.open(file) as tar:
        members = [(info, tar.extractfile(info).read()) for info in tar]
    with tarfile.open(file, "w") as tar:
        for info, data in edit(members):
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "extra",
    [
        member("../outside"),
        member("/etc/outside"),
        member("artifacts/../outside"),
        member("artifacts/a9/../../outside"),
        member("artifacts/a9/deep/er"),
        member("artifacts/.hidden/lib.so"),
        member("outside"),
        member(".lock"),
        member("quarantine/a1/lib.so"),
        member("artifacts/a9/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("artifacts/a9/link", tarfile.LNKTYPE, "artifacts/a1/lib.so"),
        member("artifacts/a9", tarfile.DIRTYPE),
        member("artifacts/a9/fifo", tarfile.FIFOTYPE),
        member("artifacts/a1/lib.so"),  # a second time
    ],
    ids=lambda info: f"{info.name} {info.type!r}",
)
def test_what_no_export_writes_is_refused(registry: Registry, tmp_path: Path, extra: tarfile.TarInfo) -> None:
    file, target = tmp_path / "x.tar", Registry(tmp_path / "deep" / "to")
    export_bundle(registry, file)
    rewrite(file, lambda members: [*members, (extra, b"")])
    with pytest.raises(BundleError, match="is not a bundle"):
        import_bundle(file, target)
    assert (
        list(target.root.iterdir()) == [] and not (tmp_path / "outside").exists() and not (tmp_path / "deep/outside").exists()
    )


@pytest.mark.parametrize("part", ["artifacts/a1/lib.so", "artifacts/a1/meta.json", "support/s1/NOTICE", "manifest/sm_80.json"])
@pytest.mark.parametrize("how", ["changed", "missing"])
def test_a_damaged_bundle_leaves_the_registry_as_it_was(registry: Registry, tmp_path: Path, part: str, how: str) -> None:
    file, target = tmp_path / "x.tar", Registry(tmp_path / "to")
    target.put("artifacts", "mine", {}, {})
    target.publish("cpu", {"key": {"id": "mine"}})
    before = content(target)
    export_bundle(registry, file)

    def edit(members: list[tuple[tarfile.TarInfo, bytes]]) -> list[tuple[tarfile.TarInfo, bytes]]:
        if how == "missing":
            return [(info, data) for info, data in members if info.name != part]
        return [(info, data[:-1] + b"?" if info.name == part else data) for info, data in members]

    rewrite(file, edit)
    if (part, how) == ("manifest/sm_80.json", "missing"):
        assert import_bundle(file, target).archs == {"sm_90": 2}  # a bundle of that arch alone, with an artifact too many
        return
    with pytest.raises(BundleError) as caught:
        import_bundle(file, target)
    assert str(file) in str(caught.value) and ".tmp-" not in str(caught.value)
    assert content(target) == before


@pytest.mark.parametrize("cut", [0, 100, 513, 3000])
def test_a_bundle_that_was_cut_short(registry: Registry, tmp_path: Path, cut: int) -> None:
    file, target = tmp_path / "x.tar", Registry(tmp_path / "to")
    export_bundle(registry, file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(BundleError, match=str(file)):
        import_bundle(file, target)
    assert list(target.root.iterdir()) == []


def test_no_bundle_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(os.urandom(4000))
    with pytest.raises(BundleError, match="not a bundle"):
        import_bundle(file, Registry(tmp_path / "to"))
    with pytest.raises(BundleError, match="cannot read"):
        import_bundle(tmp_path / "none", Registry(tmp_path / "to"))


def test_folders_that_cannot_be_written_are_named(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=f"cannot write to {tmp_path}/none: No such file or directory"):
        export_bundle(registry, tmp_path / "none" / "out.tar")
    out = export_bundle(registry, tmp_path / "out.tar")
    with pytest.raises(RegistryError, match=f"cannot make the registry {out.file}/registry: Not a directory"):
        import_bundle(out.file, Registry(out.file / "registry"))


def test_what_cannot_be_read_twice_is_no_bundle(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(BundleError, match=f"{file} is not a bundle: it must be a file that can be read twice"):
            import_bundle(file, Registry(tmp_path / "to"))


def test_the_wrong_hash(registry: Registry, tmp_path: Path) -> None:
    out = export_bundle(registry, tmp_path / "x.tar")
    with pytest.raises(BundleError, match=f"has sha256 {out.sha256}, not {'0' * 64}"):
        import_bundle(tmp_path / "x.tar", Registry(tmp_path / "to"), "0" * 64)
    assert not (tmp_path / "to").exists()


def test_a_damaged_manifest_of_the_target_is_noticed_first(registry: Registry, tmp_path: Path) -> None:
    export_bundle(registry, tmp_path / "x.tar")
    target = Registry(tmp_path / "to")
    (target.root / "manifest").mkdir(parents=True)
    (target.root / "manifest" / "sm_90.json").write_text("{")
    with pytest.raises(ManifestError, match=r"sm_90\.json is damaged"):
        import_bundle(tmp_path / "x.tar", target)
    assert not (target.root / "artifacts").exists()
