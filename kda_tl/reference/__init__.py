"""What every op means, in plain torch: float64-capable, on any device, differentiable, with no kernels.

Layouts are those of the ops: q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K] natural-log decay; beta [B, T, HV];
state [N, HV, K, V]. `recurrent_kda` is the definition; `chunk_kda` is what kernels compute, with its intermediates.
"""

from .chunk import (
    ChunkIntermediates,
    chunk_affine,
    chunk_kda,
    chunk_wy,
    compose,
    decay_products,
    triangular_inverse,
)
from .deltalog import DeltaLogState, deltalog_kda, deltalog_rwkv6
from .gates import beta_sigmoid, kda_gate, l2norm
from .recurrent import recurrent_kda

__all__ = [
    "ChunkIntermediates",
    "DeltaLogState",
    "beta_sigmoid",
    "chunk_affine",
    "chunk_kda",
    "chunk_wy",
    "compose",
    "decay_products",
    "deltalog_kda",
    "deltalog_rwkv6",
    "kda_gate",
    "l2norm",
    "recurrent_kda",
    "triangular_inverse",
]
