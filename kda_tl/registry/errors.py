"""What goes wrong with artifacts on disk, and the base of what registry, runtime and compiler raise."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DamagedArtifact", "KdaTlError", "ManifestError", "RegistryError"]


class KdaTlError(Exception):
    """Base of what registry, runtime and compiler raise beside TypeError and ValueError about arguments."""


class RegistryError(KdaTlError, RuntimeError):
    """Base of everything that the registry raises about its content."""


class ManifestError(RegistryError):
    """A manifest that cannot be read, or that a newer version wrote."""


class DamagedArtifact(RegistryError):
    """An artifact whose files are not the ones that were built.

    Attributes:
        path: the folder that was asked for.
        file: the file in it that is missing or wrong.
        moved_to: where the folder lies now; None where it could not be moved, as on a read-only file system.
    """

    def __init__(
        self, message: str, *, path: Path | None = None, file: str | None = None, moved_to: Path | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.file = file
        self.moved_to = moved_to
