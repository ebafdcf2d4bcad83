"""The content-addressed store.

    ROOT/manifest/ARCH.json   which artifact serves which spec
    ROOT/artifacts/ID/        lib.so, kernel.cu or kernel.c, meta.json
    ROOT/support/ID/          native libraries that artifacts share
    ROOT/quarantine/ID-N/     what failed verification; kept for inspection

meta.json lists the sha256 and size of every other file, and its own digest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import DamagedArtifact, ManifestError, RegistryError
from .locks import exclusive, remove_stale, remove_tree, temporary_folder
from .manifest import Manifest, check_name, read_manifest, sized_artifacts, write_manifest

__all__ = ["ARTIFACT_FORMAT", "Entry", "Registry", "Served"]

ARTIFACT_FORMAT = 1
"""Of what a builder writes into meta.json and a loader reads from it."""

Kind = Literal["artifacts", "support"]
_KINDS: tuple[Kind, ...] = ("artifacts", "support")
_META = "meta.json"
_GRACE = 3600.0  # seconds between the put and the publish of one build, at most


@dataclass(frozen=True)
class Entry:
    """One artifact that a manifest names: `fields` is what the builder published of its spec, `path` the artifact's folder,
    `up_to` the largest problem that it serves, None for any that is larger than those of the spec's other artifacts."""

    arch: str
    spec_key: str
    id: str
    path: Path
    fields: Mapping[str, Any]
    up_to: int | None = None


@dataclass(frozen=True)
class Served:
    """A size class of a spec: the largest problem of it, its artifact's folder, unverified, and what the builder published."""

    up_to: int | None
    path: Path
    fields: Mapping[str, Any]


class Registry:
    """One registry folder. It need not exist. Reading writes nothing, except that damaged artifacts are moved away."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self._manifests: dict[str, tuple[tuple[int, int, int], Manifest]] = {}

    def __repr__(self) -> str:
        return f"Registry({str(self.root)!r})"

    def put(self, kind: Kind, id: str, files: Mapping[str, bytes | Path], meta: Mapping[str, Any]) -> Path:
        """Stores an artifact under its id and returns its folder.

        An artifact that exists and verifies is left as it is; a damaged one is quarantined and replaced. The folder
        appears by one rename, so nobody sees half of it.

        Args:
            kind: "artifacts" or "support".
            id: the hash of everything that shapes the content.
            files: name -> content, or the file to copy.
            meta: what goes into meta.json, JSON values only. "id", "files" and "digest" are added here.

        Raises:
            ValueError: an id, a file name or a key of `meta` is not allowed.
        """
        if kind not in _KINDS:
            raise ValueError(f"kind must be one of {', '.join(_KINDS)}, got {kind!r}")
        check_name("id", id)
        for name in files:
            if check_name("file name", name) == _META:
                raise ValueError(f"{_META} is written by the registry: pass its content as meta")
        reserved = {"files", "digest"} & meta.keys()
        if reserved or meta.get("id", id) != id:
            raise ValueError(f"meta must leave 'id', 'files' and 'digest' to the registry, got {sorted(meta)}")

        final = self.root / kind / id
        if self._keep_existing(final):
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(final.parent)
        with temporary_folder(final.parent) as folder:
            listed = {}
            for name, content in sorted(files.items()):
                if isinstance(content, bytes):
                    (folder / name).write_bytes(content)
                else:
                    shutil.copyfile(content, folder / name)
                listed[name] = {"sha256": _sha256(folder / name), "size": (folder / name).stat().st_size}
            # Through JSON first: the digest must hold for what a reader parses (tuples are lists there).
            full = json.loads(json.dumps({**meta, "id": id, "files": listed}, allow_nan=False))
            full["digest"] = _digest(full)
            text = json.dumps(full, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
            (folder / _META).write_text(text, encoding="utf-8")
            while True:
                try:
                    os.rename(folder, final)
                    return final
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
                if self._keep_existing(final):  # another builder was faster
                    return final

    def has(self, kind: Kind, id: str) -> bool:
        """Whether a whole artifact of that id is here; a damaged one is quarantined, and is not.

        One that a manifest names is only read. Another one counts as new for garbage collection: the caller will publish it.

        Raises:
            DamagedArtifact: it is damaged and cannot be moved away.
        """
        path = self.root / kind / check_name("id", id)
        if not self._is_named(kind, id):
            return self._keep_existing(path)
        if not path.is_dir():
            return False
        return self._is_whole(path)

    def publish(self, arch: str, entries: Mapping[str, Mapping[str, Any]], support: str | None = None) -> Manifest:
        """Merges entries (spec key -> {"id": ..., "kernel": ..., "built": ...}, or with "classes" in place of "id") into the
        manifest of `arch`.

        Concurrent builders lose nothing. `support` None keeps the support id that the manifest has.

        Raises:
            RegistryError: an id names nothing in this registry.
            ValueError: an entry is none (`kda_tl.registry.manifest`).
            ManifestError: the present manifest is damaged; it is left as it is.
        """
        path = self._manifest_path(arch)
        if self._serves(arch, entries, support):
            return self.manifest(arch)
        with self._lock():
            named = {(self.root / "artifacts", one.id) for entry in entries.values() for one in sized_artifacts(entry)}
            if support is not None:
                named.add((self.root / "support", check_name("support", support)))
            for folder, id in sorted(named):
                if not (folder / id / _META).is_file():
                    raise RegistryError(f"cannot publish {id} for {arch}: {folder} has no such artifact")
            old = read_manifest(path, arch)
            new = Manifest(arch, {**old.artifacts, **entries}, support if support is not None else old.support)
            if new != old:
                write_manifest(path, new)
        return self.manifest(arch)

    def manifest(self, arch: str) -> Manifest:
        """The manifest of `arch`, empty where there is none. Costs one stat while the file does not change.

        Raises:
            ManifestError: it is damaged, or a newer version wrote it.
        """
        path = self._manifest_path(arch)
        try:
            stat = os.stat(path)
        except FileNotFoundError:
            return Manifest(arch)
        except OSError as error:
            if isinstance(error, NotADirectoryError) and not self.root.is_dir():  # a file in the way: no registry either
                return Manifest(arch)
            raise ManifestError(f"cannot read the manifest {path}: {error.strerror}") from None
        # The inode too: each publish makes a new one, and two of them can share a clock tick and a size.
        version = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        cached = self._manifests.get(arch)
        if cached is None or cached[0] != version:
            cached = (version, read_manifest(path, arch))
            self._manifests[arch] = cached
        return cached[1]

    def classes(self, arch: str, spec_key: str) -> tuple[Served, ...]:
        """What serves a spec on `arch`, smallest problems first; nothing where an artifact of it is missing, since then not
        every problem can be served."""
        entry = self.manifest(arch).artifacts.get(spec_key)
        if entry is None:
            return ()
        found = tuple(Served(one.up_to, self.root / "artifacts" / one.id, one.fields) for one in sized_artifacts(entry))
        return found if all(_is_folder(one.path) for one in found) else ()

    def find(self, arch: str, spec_key: str) -> Path | None:
        """The folder of the artifact that serves the largest problems of a spec on `arch`, as `classes`; None for none."""
        found = self.classes(arch, spec_key)
        return found[-1].path if found else None

    def support_dir(self, arch: str) -> Path | None:
        """The folder of the native libraries that the artifacts of `arch` load with, unverified."""
        id = self.manifest(arch).support
        if id is None:
            return None
        path = self.root / "support" / id
        return path if _is_folder(path) else None

    def archs(self) -> list[str]:
        """The archs that have a manifest here. Raises RegistryError where the folder cannot be read."""
        try:
            return sorted(path.stem for path in (self.root / "manifest").glob("[!.]*.json"))
        except OSError as error:
            raise RegistryError(f"cannot read {self.root / 'manifest'}: {error.strerror}") from None

    def entries(self, arch: str | None = None) -> list[Entry]:
        """Every published artifact, of one arch or of all, sorted by arch, spec key and size."""
        return [
            Entry(name, key, one.id, self.root / "artifacts" / one.id, fields, one.up_to)
            for name in (self.archs() if arch is None else [arch])
            for key, fields in sorted(self.manifest(name).artifacts.items())
            for one in sized_artifacts(fields)
        ]

    def load_meta(self, path: Path) -> dict[str, Any]:
        """meta.json of an artifact's folder.

        Raises:
            DamagedArtifact: it is missing, was changed, or belongs to another id; the folder is quarantined.
        """
        return self._check(Path(path), contents=False)

    def verify(self, path: Path) -> None:
        """Compares every file of an artifact's folder with meta.json.

        Raises:
            DamagedArtifact: a file is missing or differs, or the folder holds another id; the folder is quarantined.
        """
        self._check(Path(path), contents=True)

    def collect_garbage(self, dry_run: bool = False, min_age: float = _GRACE, quarantine: bool = False) -> list[Path]:
        """Removes artifacts that no manifest names and the leavings of dead builders; returns their paths.

        Args:
            dry_run: only tell.
            min_age: seconds. Younger folders stay: a builder may be about to publish them.
            quarantine: quarantined artifacts too, of whatever age.

        Raises:
            ManifestError: a manifest is damaged. Nothing is removed then, since nobody knows what it names.
        """
        if dry_run:
            return self._sweep(True, min_age, quarantine)
        if not self.root.is_dir():
            return []
        with self._lock():
            return self._sweep(False, min_age, quarantine)

    def _sweep(self, dry_run: bool, min_age: float, quarantine: bool) -> list[Path]:
        manifests = [read_manifest(self._manifest_path(arch), arch) for arch in self.archs()]
        named: dict[Kind, set[str | None]] = {
            "artifacts": {id for manifest in manifests for id in manifest.ids()},
            "support": {manifest.support for manifest in manifests},
        }
        removed = remove_stale(self.root, min_age, dry_run)
        for kind in _KINDS:
            removed += remove_stale(self.root / kind, min_age, dry_run)
            for path in sorted((self.root / kind).glob("[!.]*")):
                if path.name in named[kind] or time.time() - path.stat().st_mtime < min_age:
                    continue
                if not dry_run:
                    remove_tree(path)
                removed.append(path)
        for path in sorted((self.root / "quarantine").glob("*")) if quarantine else ():
            if not dry_run:
                remove_tree(path)
            removed.append(path)
        return removed

    def _keep_existing(self, path: Path) -> bool:
        """Whether a whole artifact lies at `path`, which then counts as new for garbage collection."""
        if not path.exists():
            return False
        try:
            with self._lock():
                os.utime(path)
        except FileNotFoundError:
            return False
        except OSError:
            pass  # read-only: nobody collects garbage there either
        return self._is_whole(path)

    def _is_whole(self, path: Path) -> bool:
        try:
            self.verify(path)
        except DamagedArtifact as damage:
            if damage.moved_to is None and path.exists():
                raise
            return False
        return True

    def _is_named(self, kind: Kind, id: str) -> bool:
        """Whether a manifest names it; one that is damaged tells nothing."""
        for arch in self.archs():
            with suppress(ManifestError):
                manifest = self.manifest(arch)
                if id == manifest.support if kind == "support" else id in manifest.ids():
                    return True
        return False

    def _serves(self, arch: str, entries: Mapping[str, Mapping[str, Any]], support: str | None) -> bool:
        """Whether the manifest says all of this already, of folders that are there: then nothing is to be written or locked."""
        present = self.manifest(arch)
        folders = [self.root / "artifacts" / one.id for entry in entries.values() for one in sized_artifacts(entry)]
        if support is not None:
            folders.append(self.root / "support" / support)
        return (
            support in (None, present.support)
            and all(present.artifacts.get(key) == entry for key, entry in entries.items())
            and all((folder / _META).is_file() for folder in folders)
        )

    def _check(self, path: Path, contents: bool) -> dict[str, Any]:
        path = Path(os.path.abspath(path))
        if path.parent.parent != self.root or path.parent.name not in _KINDS:
            raise ValueError(f"{path} is not an artifact of {self!r}")
        while True:
            inode = _inode(path)
            damage = _find_damage(path, contents)
            if isinstance(damage, dict):
                return damage
            file, reason = damage
            moved_to, replaced = self._quarantine(path, inode)
            if not replaced:  # else somebody moved it and built it again meanwhile: look at the new one
                raise self._damaged(path, file, reason, moved_to)

    def _quarantine(self, path: Path, inode: int | None) -> tuple[Path | None, bool]:
        """Moves the folder with that inode away. Returns where to, and whether another one has taken its place."""
        if inode is None:
            return None, False
        try:
            with self._lock():
                if _inode(path) != inode:
                    return None, _inode(path) is not None
                folder = self.root / "quarantine"
                folder.mkdir(exist_ok=True)
                n = 1
                while (folder / f"{path.name}-{n}").exists():
                    n += 1
                os.rename(path, folder / f"{path.name}-{n}")
                return folder / f"{path.name}-{n}", False
        except OSError:
            return None, False

    def _damaged(self, path: Path, file: str, reason: str, moved_to: Path | None) -> DamagedArtifact:
        where = f"it was moved to {moved_to}" if moved_to else "it could not be moved away"
        if not path.exists() and moved_to is None:
            where = "the folder is gone"
        arch = self._arch_of(path, moved_to or path)
        return DamagedArtifact(
            f"the artifact {path} is damaged: {file} {reason}; {where}. `kda-tl build --arch {arch}` rebuilds it",
            path=path,
            file=file,
            moved_to=moved_to,
        )

    def _arch_of(self, path: Path, now_at: Path) -> str:
        """The arch to rebuild: from a manifest that names the artifact, else from what is left of its metadata."""
        for arch in self.archs():
            with suppress(ManifestError):
                manifest = self.manifest(arch)
                if path.name in (manifest.ids() if path.parent.name == "artifacts" else {manifest.support}):
                    return arch
        with suppress(OSError, ValueError):
            meta = json.loads((now_at / _META).read_text(encoding="utf-8"))
            if isinstance(meta, dict) and isinstance(meta.get("arch"), str):
                return meta["arch"]
        return "ARCH"

    def _manifest_path(self, arch: str) -> Path:
        return self.root / "manifest" / f"{check_name('arch', arch)}.json"

    def _lock(self) -> AbstractContextManager[None]:
        return exclusive(self.root / ".lock")


def _find_damage(path: Path, contents: bool) -> dict[str, Any] | tuple[str, str]:
    """The metadata of a whole artifact, or (file, what is wrong with it)."""
    file = _META
    try:
        meta = json.loads((path / file).read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or meta.get("digest") != _digest(meta):
            return file, "was changed after it was written"
        if meta.get("id") != path.name:
            return file, f"belongs to the artifact {meta.get('id')}"
        for file, expected in meta["files"].items() if contents else ():
            size = (path / file).stat().st_size
            if size != expected["size"]:
                return file, f"has {size} bytes instead of {expected['size']}"
            found = _sha256(path / file)
            if found != expected["sha256"]:
                return file, f"has sha256 {found} instead of {expected['sha256']}"
        return meta
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return file, "is missing"
    except OSError as error:  # no right to read it, too many open files: that says nothing about the artifact
        raise RegistryError(f"cannot read {path / file}: {error.strerror}") from error
    except (ValueError, RecursionError):
        return file, "is not JSON"


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # no right to look
        raise RegistryError(f"cannot read {path}: {error.strerror}") from None


def _digest(meta: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in meta.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
