"""What a caller can meet between a tensor and a kernel. The registry's errors are named here too: all stand in one place.

Every message names the argument, file or device, what came, and what is allowed or which command helps.
"""

from __future__ import annotations

from kda_tl.registry import DamagedArtifact, ManifestError, RegistryError
from kda_tl.registry.errors import KdaTlError

__all__ = [
    "ArtifactMissing",
    "BuildOnMissFailed",
    "DamagedArtifact",
    "DriverTooOld",
    "EnvironmentConflict",
    "KdaTlError",
    "ManifestError",
    "RegistryError",
    "UnsupportedDevice",
]


class ArtifactMissing(KdaTlError, RuntimeError):
    """No registry holds the kernel that a call needs. The message names the command that builds it."""


class BuildOnMissFailed(ArtifactMissing):
    """KDA_TL_ON_MISS=build could not, or may not here, build the missing kernel. The message holds the build's own words."""


class UnsupportedDevice(KdaTlError, RuntimeError):
    """The tensors lie on a device that no arch serves. The message lists the archs."""


class DriverTooOld(UnsupportedDevice):
    """The NVIDIA driver cannot load what nvcc made. The message names both versions."""


class EnvironmentConflict(KdaTlError, RuntimeError):
    """Something installed beside this package would abort the process. The message names it and what to do."""
