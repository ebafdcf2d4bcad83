"""Ahead-of-time compiled operators for delta-rule linear attention."""

from kda_tl.ops.chunk_kda import chunk_kda
from kda_tl.ops.deltalog import DeltaLogCache, deltalog_decode_gdn, deltalog_decode_kda, deltalog_decode_rwkv6
from kda_tl.ops.explain import explain
from kda_tl.registry import DamagedArtifact, ManifestError, RegistryError
from kda_tl.runtime.errors import ArtifactMissing, EnvironmentConflict, UnsupportedDevice

__version__ = "0.1.0"

__all__ = [
    "ArtifactMissing",
    "DamagedArtifact",
    "DeltaLogCache",
    "EnvironmentConflict",
    "ManifestError",
    "RegistryError",
    "UnsupportedDevice",
    "chunk_kda",
    "deltalog_decode_gdn",
    "deltalog_decode_kda",
    "deltalog_decode_rwkv6",
    "explain",
]
