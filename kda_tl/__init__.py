"""Ahead-of-time compiled operators for delta-rule linear attention."""

from kda_tl.ops.chunk_kda import chunk_kda
from kda_tl.ops.explain import explain, workspace_bytes
from kda_tl.ops.warmup import warmup
from kda_tl.runtime.counters import Counters, counters, reset_counters
from kda_tl.runtime.errors import (
    ArtifactMissing,
    BuildOnMissFailed,
    DamagedArtifact,
    DriverTooOld,
    EnvironmentConflict,
    KdaTlError,
    ManifestError,
    RegistryError,
    UnsupportedDevice,
)

__version__ = "0.1.0"

__all__ = [
    "ArtifactMissing",
    "BuildOnMissFailed",
    "Counters",
    "DamagedArtifact",
    "DriverTooOld",
    "EnvironmentConflict",
    "KdaTlError",
    "ManifestError",
    "RegistryError",
    "UnsupportedDevice",
    "chunk_kda",
    "counters",
    "explain",
    "reset_counters",
    "warmup",
    "workspace_bytes",
]
