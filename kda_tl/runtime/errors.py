"""What a caller can meet between a tensor and a kernel."""

from __future__ import annotations

__all__ = ["ArtifactMissing", "EnvironmentConflict", "UnsupportedDevice"]


class ArtifactMissing(RuntimeError):
    """No registry holds the kernel that a call needs. The message names the command that builds it."""


class UnsupportedDevice(RuntimeError):
    """The tensors lie on a device that no arch serves. The message lists the archs."""


class EnvironmentConflict(RuntimeError):
    """Something installed beside this package would abort the process. The message names it and what to do."""
