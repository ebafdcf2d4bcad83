"""manifest/ARCH.json: which artifact serves which spec, by the size of the problem where there are several.

An entry names one artifact, {"id": ID, ...}, or one per size class, smallest first:

    {"classes": [{"up_to": SIZE, "id": ID, ...}, {"up_to": null, "id": ID, ...}], ...}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import ManifestError

__all__ = ["FORMAT", "Manifest", "SizedArtifact", "check_name", "read_manifest", "sized_artifacts", "write_manifest"]

FORMAT = 2
READABLE = (1, 2)  # in format 1 no entry has classes
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class SizedArtifact:
    """One artifact of a spec: the largest size that it serves (None: any that is larger), its id, and what was published."""

    up_to: int | None
    id: str
    fields: Mapping[str, Any]


def sized_artifacts(entry: Mapping[str, Any]) -> tuple[SizedArtifact, ...]:
    """The artifacts that an entry names, smallest size first.

    Raises:
        ValueError: an id cannot be a folder's name, or the sizes do not rise to one class without a limit.
    """
    if "classes" not in entry:
        return (SizedArtifact(None, check_name("id", entry.get("id")), entry),)
    given = entry["classes"]
    if not isinstance(given, list | tuple) or not given or not all(isinstance(one, Mapping) for one in given):
        raise ValueError(f"classes must be a list of tables, got {given!r}")
    found = tuple(SizedArtifact(one.get("up_to"), check_name("id", one.get("id")), one) for one in given)
    bounds = [one.up_to for one in found]
    numbers = [bound for bound in bounds[:-1] if type(bound) is int]
    if bounds[-1] is not None or len(numbers) != len(bounds) - 1 or sorted(set(numbers)) != numbers:
        raise ValueError(f"up_to must rise from class to class and be null in the last one alone, got {bounds}")
    return found


@dataclass(frozen=True)
class Manifest:
    """What is built for one arch.

    Attributes:
        arch: the arch as users write it (sm_90).
        artifacts: spec key -> {"id": ..., "kernel": ..., "built": ...}, or "classes" for "id"; whatever else a builder added
            is kept.
        support: id of the shared native libraries that these artifacts load with.
    """

    arch: str
    artifacts: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    support: str | None = None

    def ids(self) -> set[str]:
        """Of all artifacts that it names."""
        return {one.id for entry in self.artifacts.values() for one in sized_artifacts(entry)}


def check_name(what: str, name: object) -> str:
    """`name`, if it can be one folder or file inside the registry; ids come from files that others may have written."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{what} must be letters, digits, '.', '_' and '-', not starting with '.' or '-', got {name!r}")
    return name


def read_manifest(path: Path, arch: str) -> Manifest:
    """The manifest at `path`, empty where there is none.

    Raises:
        ManifestError: the file cannot be read, is not a manifest of `arch`, or has a newer format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Manifest(arch)
    except OSError as error:
        raise ManifestError(f"cannot read the manifest {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _corrupt(path, arch, "it is not JSON") from None
    if not isinstance(data, dict) or not isinstance(data.get("format"), int):
        raise _corrupt(path, arch, "it does not state its format")
    if data["format"] not in READABLE:
        raise ManifestError(
            f"the manifest {path} has format {data['format']}, this version of kda-tl reads up to format {FORMAT}: "
            "upgrade kda-tl, or name another registry with KDA_TL_REGISTRY"
        )
    if data.get("arch") != arch:
        raise _corrupt(path, arch, f"it is the manifest of {data.get('arch')!r}")
    artifacts, support = data.get("artifacts"), data.get("support")
    if not isinstance(artifacts, dict) or not all(isinstance(entry, dict) for entry in artifacts.values()):
        raise _corrupt(path, arch, "it has no artifacts table")
    try:
        for entry in artifacts.values():
            sized_artifacts(entry)
        if support is not None:
            check_name("support", support)
    except ValueError as error:
        raise _corrupt(path, arch, str(error)) from None
    frozen = {key: MappingProxyType(entry) for key, entry in artifacts.items()}
    return Manifest(arch, MappingProxyType(frozen), support)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replaces the file at once. The caller holds the registry's lock: the temporary name is fixed."""
    data: dict[str, Any] = {"format": FORMAT, "arch": manifest.arch}
    if manifest.support is not None:
        data["support"] = manifest.support
    data["artifacts"] = {key: dict(sorted(manifest.artifacts[key].items())) for key in sorted(manifest.artifacts)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _corrupt(path: Path, arch: str, reason: str) -> ManifestError:
    return ManifestError(
        f"the manifest {path} is damaged: {reason}. Remove it and run `kda-tl build --arch {arch}` to write it again"
    )
