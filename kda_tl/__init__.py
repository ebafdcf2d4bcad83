"""Ahead-of-time compiled operators for delta-rule linear attention."""

from kda_tl.ops.chunk_kda import chunk_kda
from kda_tl.ops.explain import explain
from kda_tl.ops.recurrent_gdn import recurrent_gdn
from kda_tl.ops.recurrent_kda import recurrent_kda
from kda_tl.ops.recurrent_rules import (
    recurrent_delta_rule,
    recurrent_gla,
    recurrent_linear_attention,
    recurrent_rwkv6,
    recurrent_simple_gla,
)
from kda_tl.registry import DamagedArtifact, ManifestError, RegistryError
from kda_tl.runtime.errors import ArtifactMissing, EnvironmentConflict, UnsupportedDevice

__version__ = "0.1.0"

__all__ = [
    "ArtifactMissing",
    "DamagedArtifact",
    "EnvironmentConflict",
    "ManifestError",
    "RegistryError",
    "UnsupportedDevice",
    "chunk_kda",
    "explain",
    "recurrent_delta_rule",
    "recurrent_gdn",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_linear_attention",
    "recurrent_rwkv6",
    "recurrent_simple_gla",
]
