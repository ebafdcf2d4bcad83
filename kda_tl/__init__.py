"""Ahead-of-time compiled operators for delta-rule linear attention."""

from kda_tl.distributed import ContextParallel, ContextParallelError
from kda_tl.ops.chunk_kda import chunk_kda
from kda_tl.ops.explain import explain
from kda_tl.registry import DamagedArtifact, ManifestError, RegistryError
from kda_tl.runtime.errors import ArtifactMissing, EnvironmentConflict, UnsupportedDevice

__version__ = "0.1.0"

__all__ = [
    "ArtifactMissing",
    "ContextParallel",
    "ContextParallelError",
    "DamagedArtifact",
    "EnvironmentConflict",
    "ManifestError",
    "RegistryError",
    "UnsupportedDevice",
    "chunk_kda",
    "explain",
]
