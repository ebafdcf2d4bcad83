"""A registry, or some archs of it, as one file to carry about.

A bundle is an uncompressed tar, since most of its bytes are machine code that hardly shrinks:

    manifest/ARCH.json, artifacts/ID/FILE, support/ID/FILE

in this layout and order, with no times, owners or modes: equal registries give equal bytes. Every file is compared with the
hash it was built with, on the way out and on the way in. That finds damage; who made a bundle, its own sha256 tells.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import RegistryError
from .locks import temporary_folder
from .manifest import Manifest, check_name, read_manifest
from .store import Registry

__all__ = ["BundleError", "Bundled", "export_bundle", "import_bundle"]

_ADDED = ("id", "files", "digest")  # what Registry.put writes into meta.json by itself


class BundleError(RegistryError):
    """A file that is no bundle, a damaged one, or one with content that no export writes."""


@dataclass(frozen=True)
class Bundled:
    """What went in or came out: the file and its sha256, archs with their number of specs, folders, and bytes of the file."""

    file: Path
    sha256: str
    archs: dict[str, int]
    folders: int
    size: int


def export_bundle(registry: Registry, file: Path, archs: Sequence[str] | None = None) -> Bundled:
    """Writes what the manifests of `archs` name (default: all that the registry has), verified, to `file`.

    `file` appears whole or not at all, in place of one that was there.

    Raises:
        DamagedArtifact: an artifact is not what was built; it was quarantined.
        RegistryError: there is nothing to export for an arch, what its manifest names is missing, or `file` cannot be written.
    """
    file = Path(os.path.abspath(file))
    names = registry.archs() if archs is None else list(dict.fromkeys(archs))
    manifests = {name: registry.manifest(name) for name in names}
    empty = [name for name, manifest in manifests.items() if not manifest.artifacts]
    if empty or not manifests:
        raise RegistryError(f"{registry.root} has no artifacts{' for ' + ', '.join(empty) if empty else ''} to export")
    folders = sorted({folder for manifest in manifests.values() for folder in _folders(registry, manifest)})
    for folder in folders:
        registry.verify(folder)
    members = [registry.root / "manifest" / f"{name}.json" for name in sorted(names)]
    members += [path for folder in folders for path in sorted(folder.iterdir())]
    try:
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise RegistryError(f"cannot write to {file.parent}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as stream:
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for path in members:
                    info = tarfile.TarInfo(path.relative_to(registry.root).as_posix())
                    with open(path, "rb") as content:
                        info.size = os.fstat(content.fileno()).st_size
                        tar.addfile(info, content)
            stream.flush()
            os.fsync(stream.fileno())
        result = Bundled(file, _sha256(temporary), _counts(manifests), len(folders), os.path.getsize(temporary))
        os.replace(temporary, file)
        return result
    except BaseException:
        os.unlink(temporary)
        raise


def import_bundle(file: Path, registry: Registry, sha256: str | None = None) -> Bundled:
    """Puts the content of a bundle into a registry, beside what that has, and publishes it.

    Everything is verified before anything is published. Where both serve a spec, the bundle's artifact does from then on.

    Args:
        sha256: what the file's hash must be; default: any.

    Raises:
        BundleError: it is not a bundle, is damaged, or has another hash. The registry serves what it did before.
        ManifestError: the registry's own manifest is damaged.
        RegistryError: the registry cannot be made.
    """
    if os.path.exists(file) and not os.path.isfile(file):  # a device may never end, and a pipe is read once only
        raise BundleError(f"{file} is not a bundle: it must be a file that can be read twice")
    found = _sha256(file)
    if sha256 is not None and found != sha256.lower():
        raise BundleError(f"{file} has sha256 {found}, not {sha256}")
    try:
        registry.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RegistryError(f"cannot make the registry {registry.root}: {error.strerror}") from None
    with temporary_folder(registry.root) as folder:
        unpacked = Registry(folder)
        try:
            _unpack(file, unpacked.root)
            manifests = {name: read_manifest(unpacked.root / "manifest" / f"{name}.json", name) for name in unpacked.archs()}
            named = sorted({path for manifest in manifests.values() for path in _folders(unpacked, manifest)})
            for path in named:
                unpacked.verify(path)
        except BundleError:
            raise
        except RegistryError as error:
            raise BundleError(f"{file} is damaged: {error}".replace(f"{folder}{os.sep}", "")) from None
        if not named:
            raise BundleError(f"{file} is not a bundle: it holds no manifest with artifacts")
        for name in manifests:
            registry.manifest(name)  # a damaged one is noticed before anything is written
        for path in named:
            meta: dict[str, Any] = unpacked.load_meta(path)
            files: dict[str, bytes | Path] = {name: path / name for name in meta["files"]}
            rest = {key: value for key, value in meta.items() if key not in _ADDED}
            registry.put("support" if path.parent.name == "support" else "artifacts", path.name, files, rest)
        for name, manifest in manifests.items():
            registry.publish(name, manifest.artifacts, manifest.support)
    return Bundled(Path(file), found, _counts(manifests), len(named), os.path.getsize(file))


def _folders(registry: Registry, manifest: Manifest) -> Iterator[Path]:
    for id in sorted(manifest.ids()):
        yield registry.root / "artifacts" / id
    if manifest.support is not None:
        yield registry.root / "support" / manifest.support


def _unpack(file: Path, root: Path) -> None:
    """Plain files at the places that an export knows, whatever else the archive says about them."""
    try:
        with tarfile.open(file, mode="r:") as tar:
            for info in tar:
                target = root.joinpath(*_place(file, info).parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(info)
                assert content is not None
                with content, open(target, "xb") as out:
                    while block := content.read(1 << 20):
                        out.write(block)
                if target.stat().st_size != info.size:
                    raise BundleError(f"{file} is damaged: it ends within {info.name}")
    except (tarfile.TarError, EOFError) as error:
        raise BundleError(f"{file} is not a bundle, or damaged: {error}") from None
    except FileExistsError as error:
        raise BundleError(f"{file} is not a bundle: it holds {Path(error.filename).name} twice") from None


def _place(file: Path, info: tarfile.TarInfo) -> PurePosixPath:
    path = PurePosixPath(info.name)
    kind, *rest = path.parts or ("",)
    try:
        for part in rest:
            check_name("a name in it", part)
        allowed = info.isreg() and len(rest) == {"manifest": 1, "artifacts": 2, "support": 2}.get(kind, 0) and bool(rest)
    except ValueError:
        allowed = False
    if not allowed:
        raise BundleError(f"{file} is not a bundle: it holds {info.name!r}, which no export writes")
    return path


def _counts(manifests: dict[str, Manifest]) -> dict[str, int]:
    return {name: len(manifest.artifacts) for name, manifest in sorted(manifests.items())}


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise BundleError(f"cannot read {file}: {error.strerror}") from None
    return digest.hexdigest()
