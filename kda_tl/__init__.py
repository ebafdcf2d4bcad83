"""Ahead-of-time compiled operators for delta-rule linear attention."""

from kda_tl.distributed import ContextParallel, ContextParallelError
from kda_tl.ops.chunk_delta_rule import chunk_delta_rule
from kda_tl.ops.chunk_gdn import chunk_gated_delta_rule, chunk_gdn
from kda_tl.ops.chunk_gla import chunk_gla
from kda_tl.ops.chunk_kda import chunk_kda
from kda_tl.ops.chunk_linear_attention import chunk_linear_attention, chunk_linear_attn
from kda_tl.ops.chunk_rwkv6 import chunk_rwkv6
from kda_tl.ops.chunk_simple_gla import chunk_simple_gla
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
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attention",
    "chunk_linear_attn",
    "chunk_rwkv6",
    "chunk_simple_gla",
    "explain",
]
