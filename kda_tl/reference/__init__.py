"""What every op means, in plain torch: float64-capable, on any device, differentiable, with no kernels.

Layouts are those of the ops: q, k [B, T, H, K]; v [B, T, HV, V]; g natural-log decay, [B, T, HV, K] or [B, T, HV]; beta
[B, T, HV]; state [N, HV, K, V]. `recurrent_rule` is the definition of every rule of the family, `recurrent_kda` and its
siblings name them; `chunk_rule` is what kernels compute, with its intermediates; `affine` is what segments and ranks exchange.
"""

from .affine import chunk_affine, compose, merge_affine, segment_affine, segmented_rule, sequence_affine
from .chunk import (
    ChunkIntermediates,
    chunk_gdn,
    chunk_kda,
    chunk_rule,
    chunk_wy,
    decay_products,
    exclusive_decay_products,
    triangular_inverse,
)
from .deltalog import DeltaLogState, deltalog_kda, deltalog_rwkv6
from .gates import beta_sigmoid, check_log_decay, gdn_gate, kda_gate, l2norm
from .recurrent import (
    recurrent_delta_rule,
    recurrent_gdn,
    recurrent_gla,
    recurrent_kda,
    recurrent_linear_attention,
    recurrent_rule,
    recurrent_rwkv6,
    recurrent_simple_gla,
)
from .slots import read_slots, write_slots

__all__ = [
    "ChunkIntermediates",
    "DeltaLogState",
    "beta_sigmoid",
    "check_log_decay",
    "chunk_affine",
    "chunk_gdn",
    "chunk_kda",
    "chunk_rule",
    "chunk_wy",
    "compose",
    "decay_products",
    "deltalog_kda",
    "deltalog_rwkv6",
    "exclusive_decay_products",
    "gdn_gate",
    "kda_gate",
    "l2norm",
    "merge_affine",
    "read_slots",
    "recurrent_delta_rule",
    "recurrent_gdn",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_linear_attention",
    "recurrent_rule",
    "recurrent_rwkv6",
    "recurrent_simple_gla",
    "segment_affine",
    "segmented_rule",
    "sequence_affine",
    "triangular_inverse",
    "write_slots",
]
