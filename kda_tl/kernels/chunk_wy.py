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
from kda_tl.kernels.tiles.target import LOG2_E, TileTarget, assume_multiples, run_time_strides
from kda_tl.kernels.tiles.triangular_inverse import unit_lower_inverse
from kda_tl.specs.kernels import ChunkWySpec
from kda_tl.specs.schedules import ChunkWySchedule

LOAD_BATCH = 8  # rows that a thread has in flight


def program(spec: ChunkWySpec, schedule: ChunkWySchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments, in order:

    q, k [B, T, H, K] dtype; g [B, T, HV, K] float32, natural log; beta [B, T, HV] float32; cu_seqlens [N + 1] int32 (any
    one-element tensor where uniform); A_inv, P [slots, HV, C, C] operand_dtype, out; uniform: int32, 1 for a dense batch (every
    sequence has T tokens), 0 for a packed one.
    """
    t = TileTarget(arch)
    C, K, dtype, operand_dtype = spec.chunk_size, spec.head_dim_k, spec.dtype, spec.operand_dtype
    B, seq_len, H, HV, slots, num_offsets = T.dynamic("B, seq_len, H, HV, slots, num_offsets")
    q_strides, k_strides = run_time_strides("q", "bth"), run_time_strides("k", "bth")
    g_strides, beta_strides = run_time_strides("g", "bth"), run_time_strides("beta", "bth")

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
        with T.Kernel(slots * HV, threads=K) as block:
            if not t.is_cpu:
                T.annotate_min_blocks_per_sm(schedule.min_blocks)
            assume_multiples(q_strides, 8)
            assume_multiples(k_strides, 8)
            assume_multiples(g_strides, 4)
            where = T.alloc_local((6,), "int32")
            where[5] = T.truncdiv(block, HV)
            where[4] = block - where[5] * HV
            locate_chunk(where[5], uniform, seq_len, num_offsets - 1, cu_seqlens, C, where)
            where[3] = T.truncdiv(where[4], T.truncdiv(HV, H))
            batch, start, rows, head, value_head, slot = where[0], where[1], where[2], where[3], where[4], where[5]
            if rows > 0:
                decay = t.column_pairs(C, K, "float32")
                q_raw = t.column_pairs(2 * LOAD_BATCH, K, dtype)
                k_raw = t.column_pairs(2 * LOAD_BATCH, K, dtype)
                wide = T.alloc_local((2,), "float32")  # float32 in between: TileLang pairs these casts, not bfloat16 to float16
                q_rows = t.column_pairs(C, K, operand_dtype)
                k_rows = t.column_pairs(C, K, operand_dtype)
                middle_decay = t.shared((K,), "float32")
                beta_tile = t.shared((C,), "float32")
                left = t.shared((C, K), operand_dtype)
                right = t.shared((C // 2, K), operand_dtype)
                kk = t.shared((C, C), "float32")
                qk = t.shared((C, C), "float32")
                product = t.fragment((C, C // 2), "float32")
                for part, pair in t.each_column_pair(K):
                    # Rows past the end read the last one instead and are cleared below: without a branch, a batch is in flight.
                    for first in list(range(0, C // 2, LOAD_BATCH)):
                        for r in T.unroll(LOAD_BATCH):
                            i = start + T.min(part * (C // 2) + first + r, rows - 1)
                            for j in t.pair():
                                decay[t.at(part, pair, first + r, j)] = g[batch, i, value_head, pair * 2 + j]
                            for j in t.pair():
                                k_raw[t.at(part, pair, r, j)] = k[batch, i, head, pair * 2 + j]
                            for j in t.pair():
                                q_raw[t.at(part, pair, r, j)] = q[batch, i, head, pair * 2 + j]
                        for r in T.unroll(LOAD_BATCH):
                            row = first + r
                            inside = part * (C // 2) + row < rows
                            for j in t.pair():
                                decay[t.at(part, pair, row, j)] = T.exp2(
                                    T.if_then_else(inside, decay[t.at(part, pair, row, j)] * LOG2_E, 0.0)
                                )
                            for j in t.pair():
                                wide[j] = k_raw[t.at(part, pair, r, j)]
                            for j in t.pair():
                                k_rows[t.at(part, pair, row, j)] = T.if_then_else(inside, wide[j], 0.0)
                            for j in t.pair():
                                wide[j] = q_raw[t.at(part, pair, r, j)]
                            for j in t.pair():
                                q_rows[t.at(part, pair, row, j)] = T.if_then_else(inside, wide[j], 0.0)
                    if part == 1:
                        for j in t.pair():
                            middle_decay[pair * 2 + j] = decay[t.at(part, pair, 0, j)]
                for i in t.parallel(C):
                    if i < rows:
                        beta_tile[i] = beta[batch, start + i, value_head]
                    else:
                        beta_tile[i] = 0.0
                for i, j in t.parallel(C, C):
                    kk[i, j] = 0.0
                    qk[i, j] = 0.0
                decay_products(t, q_rows, k_rows, decay, middle_decay, left, right, product, qk, kk, C, K)
                for i, j in t.parallel(C, C):
                    P[slot, value_head, i, j] = qk[i, j]
                unit_lower_inverse(t, kk, beta_tile, qk, C)
                for i, j in t.parallel(C, C):
                    A_inv[slot, value_head, i, j] = qk[i, j] * beta_tile[j]

    return chunk_wy
