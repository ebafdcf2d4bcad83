"""chunk_wy: gates to triangular inverse, parallel over chunks and value heads.

Reads q, k, g, beta of one chunk; stores the two [C, C] blocks that chunk_scan needs and nothing else (the lean plan:
W and U would be two more [T, HV, 128] tensors to write and to read back):

    A_inv = (I + Diag(beta) A)^-1 Diag(beta),    A strictly lower, decay products of k with k
    P                                            lower with its diagonal, decay products of q with k

Formulas and names as in `kda_tl.reference.chunk`.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.chunks import locate_chunk
from kda_tl.kernels.tiles.decay_products import decay_products
from kda_tl.kernels.tiles.target import LOG2_E, TileTarget
from kda_tl.kernels.tiles.triangular_inverse import unit_lower_inverse
from kda_tl.specs.kernels import ChunkWySpec
from kda_tl.specs.schedules import ChunkWySchedule


def program(spec: ChunkWySpec, schedule: ChunkWySchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments, in order:

    q, k [B, T, H, K] dtype; g [B, T, HV, K] float32, natural log; beta [B, T, HV] float32; cu_seqlens [N + 1] int32 (any
    one-element tensor where uniform); A_inv, P [slots, HV, C, C] operand_dtype, out; uniform: int32, 1 for a dense batch (every
    sequence has T tokens), 0 for a packed one.
    """
    t = TileTarget(arch)
    C, K, dtype, operand_dtype = spec.chunk_size, spec.head_dim_k, spec.dtype, spec.operand_dtype
    B, seq_len, H, HV, slots, num_offsets = T.dynamic("B, seq_len, H, HV, slots, num_offsets")
    q_strides = T.dynamic("q_b, q_t, q_h")
    k_strides = T.dynamic("k_b, k_t, k_h")
    g_strides = T.dynamic("g_b, g_t, g_h")
    beta_strides = T.dynamic("beta_b, beta_t, beta_h")

    @T.prim_func
    def chunk_wy(
        q: T.StridedTensor((B, seq_len, H, K), (*q_strides, 1), dtype),
        k: T.StridedTensor((B, seq_len, H, K), (*k_strides, 1), dtype),
        g: T.StridedTensor((B, seq_len, HV, K), (*g_strides, 1), "float32"),
        beta: T.StridedTensor((B, seq_len, HV), beta_strides, "float32"),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        A_inv: T.Tensor((slots, HV, C, C), operand_dtype),
        P: T.Tensor((slots, HV, C, C), operand_dtype),
        uniform: T.int32,
    ):
        with T.Kernel(slots * HV, threads=schedule.threads) as block:
            where = T.alloc_local((5,), "int32")
            where[3] = T.truncdiv(block, HV)
            where[4] = block - where[3] * HV
            locate_chunk(where[3], uniform, seq_len, num_offsets - 1, cu_seqlens, C, where)
            where[3] = T.truncdiv(where[4], T.truncdiv(HV, H))
            batch, start, rows, head, value_head = where[0], where[1], where[2], where[3], where[4]
            if rows > 0:
                decay = t.shared((C, K), "float32")
                left = t.shared((C, K), operand_dtype)
                right = t.shared((C // 2, K), operand_dtype)
                kk = t.shared((C, C), "float32")
                qk = t.shared((C, C), "float32")
                product = t.fragment((C, C // 2), "float32")
                for c in t.parallel(K):
                    for i in T.serial(C):
                        decay[i, c] = T.if_then_else(i < rows, T.exp2(g[batch, start + i, value_head, c] * LOG2_E), 1.0)
                for i, j in t.parallel(C, C):
                    kk[i, j] = 0.0
                    qk[i, j] = 0.0
                decay_products(t, q, k, decay, batch, start, rows, head, left, right, product, qk, kk, C, K)
                for i in t.parallel(C):
                    total = T.alloc_var("float32", init=0.0)
                    total = 0.0
                    if i < rows:
                        for c in T.serial(K):
                            total = total + T.cast(q[batch, start + i, head, c], "float32") * T.cast(
                                k[batch, start + i, head, c], "float32"
                            )
                    qk[i, i] = total
                for i, j in t.parallel(C, C):
                    P[block // HV, value_head, i, j] = qk[i, j]
                for i, j in t.parallel(C, C):
                    kk[i, j] = kk[i, j] * T.if_then_else(i < rows, beta[batch, start + i, value_head], 0.0)
                unit_lower_inverse(t, kk, qk, C)
                for i, j in t.parallel(C, C):
                    A_inv[block // HV, value_head, i, j] = qk[i, j] * T.if_then_else(
                        j < rows, beta[batch, start + j, value_head], 0.0
                    )

    return chunk_wy
