"""Ahead-of-time compiled operators for delta-rule linear attention."""

from kda_tl.distributed import ContextParallel, ContextParallelError
from kda_tl.ops.chunk_delta_rule import chunk_delta_rule
from kda_tl.ops.chunk_gdn import chunk_gated_delta_rule, chunk_gdn
from kda_tl.ops.chunk_gla import chunk_gla
from kda_tl.ops.chunk_kda import chunk_kda
from kda_tl.ops.chunk_linear_attention import chunk_linear_attention, chunk_linear_attn
from kda_tl.ops.chunk_rwkv6 import chunk_rwkv6
from kda_tl.ops.chunk_simple_gla import chunk_simple_gla
from kda_tl.ops.deltalog import DeltaLogCache, deltalog_decode_gdn, deltalog_decode_kda, deltalog_decode_rwkv6
from kda_tl.ops.explain import explain, workspace_bytes
from kda_tl.ops.recurrent_gdn import recurrent_gdn
from kda_tl.ops.recurrent_kda import recurrent_kda
from kda_tl.ops.recurrent_rules import (
    recurrent_delta_rule,
    recurrent_gla,
    recurrent_linear_attention,
    recurrent_rwkv6,
    recurrent_simple_gla,
)
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
    "ContextParallel",
    "ContextParallelError",
    "Counters",
    "DamagedArtifact",
    "DeltaLogCache",
    "DriverTooOld",
    "EnvironmentConflict",
    "KdaTlError",
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
    "counters",
    "deltalog_decode_gdn",
    "deltalog_decode_kda",
    "deltalog_decode_rwkv6",
    "explain",
    "recurrent_delta_rule",
    "recurrent_gdn",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_linear_attention",
    "recurrent_rwkv6",
    "recurrent_simple_gla",
    "reset_counters",
    "warmup",
    "workspace_bytes",
]
