"""chunk_scan: affine state passing and output. One block walks the chunks of one (sequence, value head, V tile).

With the state S before the chunk, and A_inv, P from chunk_wy, per chunk:

    residual = v - (k e^G) S
    u        = A_inv residual                       (= U - W S: the product with A_inv after the subtraction needs neither)
    o        = scale ((q e^G) S + P u)
    S        = Diag(e^G_last) S + (k e^(G_last - G))^T u

S stays in registers in float32. Every e^G here is a running product of decays d = exp(g) in [0, 1], from the chunk's first row
down or from its last row up, so no exponent is ever positive; only e^G_last, which acts on the state once per chunk and would
gather rounding over a long sequence, is the exponential of a sum.

Which plan. One bfloat16 [T, HV, 128] tensor is a unit, 0.047 ms at 96 heads, T 8192 and the 4.27 TB/s that a copy moves on
one NVIDIA H200. With g in float32 the lean plan (chunk_wy stores A_inv and P, this kernel reads q, k, g and v again) moves 5
+ 7 units. A wide plan (chunk_wy stores W, U, P, the gated q and k) would move 9.5 + 5.5, and round to operands what the
residual here keeps in float32: 0.21 ms more for chunk_wy, 0.07 less for the scan. So the lean plan, for many heads; for few,
where everything sits in L2, the wide one is not tried yet. The warp-specialized scan takes 0.69 ms at 96 heads (V tile 128)
and 0.41 ms at 32 (V tile 32), `tools/bench_chunk_kda.py`. Its profile shows gating, not the products, as the longest chain:
of 3.6 microseconds per chunk with V tile 64, waiting for q, k and g takes 1.4 and their running products 1.9. Two chunks of
them in flight, loaded by a warp of its own, would overlap the two.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.scaling import range_scale
from kda_tl.kernels.tiles.target import LOG2_E, TileTarget, run_time_strides
from kda_tl.specs.kernels import ChunkScanSpec
from kda_tl.specs.schedules import ChunkScanSchedule


def program(spec: ChunkScanSpec, schedule: ChunkScanSchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments, in order:

    q, k [B, T, H, K] dtype; v [B, T, HV, V] dtype; g [B, T, HV, K] float32, natural log; cu_seqlens [N + 1] int32 (any
    one-element tensor where uniform); A_inv, P [slots, HV, C, C] dtype, as chunk_wy wrote them; o [B, T, HV, V] dtype, out;
    initial_state, final_state [N, HV, K, V] float32 with any strides (so both layouts are one program);
    scale: float32; uniform: int32, 1 for a dense batch; has_initial_state, store_final_state: int32.
    Packed batches run one more sequence, the tokens past cu_seqlens[N], whose outputs are zero.
    """
    if schedule.variant == "warp_specialized":
        from kda_tl.kernels import chunk_scan_warp_specialized

        return chunk_scan_warp_specialized.program(spec, schedule, arch)
    t = TileTarget(arch)
    C, K, V, dtype, operand_dtype = spec.chunk_size, spec.head_dim_k, spec.head_dim_v, spec.dtype, spec.operand_dtype
    narrow = operand_dtype == "float16"
    block_v, threads = schedule.block_v, schedule.threads
    tiles_v = V // block_v
    B, seq_len, H, HV, N, slots, num_offsets = T.dynamic("B, seq_len, H, HV, N, slots, num_offsets")
    q_strides, k_strides = run_time_strides("q", "bth"), run_time_strides("k", "bth")
    v_strides, g_strides, o_strides = run_time_strides("v", "bth"), run_time_strides("g", "bth"), run_time_strides("o", "bth")
    initial_strides = run_time_strides("i", "nhkv")
    final_strides = run_time_strides("f", "nhkv")

    @T.prim_func
    def chunk_scan(
        q: T.StridedTensor((B, seq_len, H, K), (*q_strides, 1), dtype),
        k: T.StridedTensor((B, seq_len, H, K), (*k_strides, 1), dtype),
        v: T.StridedTensor((B, seq_len, HV, V), (*v_strides, 1), dtype),
        g: T.StridedTensor((B, seq_len, HV, K), (*g_strides, 1), "float32"),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        A_inv: T.Tensor((slots, HV, C, C), operand_dtype),
        P: T.Tensor((slots, HV, C, C), operand_dtype),
        o: T.StridedTensor((B, seq_len, HV, V), (*o_strides, 1), dtype),
        initial_state: T.StridedTensor((N, HV, K, V), initial_strides, "float32"),
        final_state: T.StridedTensor((N, HV, K, V), final_strides, "float32"),
        scale: T.float32,
        uniform: T.int32,
        has_initial_state: T.int32,
        store_final_state: T.int32,
    ):
        with T.Kernel((N + 1 - uniform) * HV * tiles_v, threads=threads) as block:
            where = T.alloc_local((7,), "int32")
            where[0] = T.truncdiv(block, tiles_v)
            where[1] = T.truncdiv(where[0], HV)
            sequence = where[1]
            value_head = where[0] - where[1] * HV
            first_v = (block - where[0] * tiles_v) * block_v
            where[2] = T.truncdiv(value_head, T.truncdiv(HV, H))
            where[3] = 0
            where[4] = 0
            where[5] = seq_len
            where[6] = sequence * T.truncdiv(seq_len + (C - 1), C)
            if uniform == 0:
                where[4] = cu_seqlens[sequence]
                if sequence < N:
                    where[5] = cu_seqlens[sequence + 1] - where[4]
                else:
                    where[5] = seq_len - where[4]
                where[6] = T.truncdiv(where[4], C) + sequence
            else:
                where[3] = sequence
            head, batch, sequence_start, length, first_slot = where[2], where[3], where[4], where[5], where[6]

            if sequence < N:
                state = t.fragment((K, block_v), "float32")
                state_operand = t.shared((K, block_v), operand_dtype)
                q_decayed = t.shared((C, K), operand_dtype)
                k_decayed = t.shared((C, K), operand_dtype)
                k_to_end = t.shared((C, K), operand_dtype)
                chunk_decay = t.shared((K,), "float32")
                A_inv_tile = t.shared((C, C), operand_dtype)
                P_tile = t.shared((C, C), operand_dtype)
                residual_operand = t.shared((C, block_v), operand_dtype)
                u_operand = t.shared((C, block_v), operand_dtype)
                residual = t.fragment((C, block_v), "float32")
                u = t.fragment((C, block_v), "float32")
                out = t.fragment((C, block_v), "float32")
                state_peaks = t.fragment((K,), "float32")
                value_peaks = t.fragment((C,), "float32")
                peaks = t.shared((K + C,), "float32")
                row_peaks = t.fragment((K,), "float32")
                peak = t.fragment((1,), "float32")
                down = T.alloc_var("float32", init=1.0)

                if has_initial_state != 0:
                    for c, j in t.parallel(K, block_v):
                        state[c, j] = initial_state[sequence, value_head, c, first_v + j]
                else:
                    T.clear(state)
                for chunk in T.serial(T.truncdiv(length + (C - 1), C)):
                    start = sequence_start + chunk * C
                    rows = T.min(C, length - chunk * C)
                    for c in t.parallel(K):
                        factor = T.alloc_var("float32", init=1.0)
                        total = T.alloc_var("float32", init=0.0)
                        factor = 1.0
                        total = 0.0
                        for i in T.serial(C):
                            if i < rows:
                                step = g[batch, start + i, value_head, c] * LOG2_E
                                total = total + step
                                factor = factor * T.exp2(step)
                                k_decayed[i, c] = -k[batch, start + i, head, c] * factor
                                q_decayed[i, c] = q[batch, start + i, head, c] * factor
                            else:
                                k_decayed[i, c] = 0.0
                                q_decayed[i, c] = 0.0
                        chunk_decay[c] = T.exp2(total)
                        factor = 1.0
                        for s in T.serial(C):
                            i = C - 1 - s
                            if i < rows:
                                k_to_end[i, c] = k[batch, start + i, head, c] * factor
                                factor = factor * T.exp2(g[batch, start + i, value_head, c] * LOG2_E)
                            else:
                                k_to_end[i, c] = 0.0
                    for i, j in t.parallel(C, C):
                        A_inv_tile[i, j] = A_inv[first_slot + chunk, value_head, i, j]
                        P_tile[i, j] = P[first_slot + chunk, value_head, i, j]
                    for i, j in t.parallel(C, block_v):
                        residual[i, j] = T.if_then_else(i < rows, v[batch, start + i, value_head, first_v + j], 0.0)
                    if narrow:
                        T.reduce_absmax(state, state_peaks, dim=1)
                        T.reduce_absmax(residual, value_peaks, dim=1)
                        for c in t.parallel(K):
                            peaks[c] = state_peaks[c]
                        for i in t.parallel(C):
                            peaks[K + i] = value_peaks[i]
                        for c in t.parallel(K):
                            row_peaks[c] = T.max(peaks[c], peaks[K + c % C])
                        T.reduce_max(row_peaks, peak, dim=0)
                        down = range_scale(peak[0])
                    for i, j in t.parallel(C, block_v):
                        residual[i, j] = residual[i, j] * down
                    for c, j in t.parallel(K, block_v):
                        state[c, j] = state[c, j] * down
                        state_operand[c, j] = state[c, j]
                    T.gemm(k_decayed, state_operand, residual)
                    for i, j in t.parallel(C, block_v):
                        residual_operand[i, j] = residual[i, j]
                    T.clear(u)
                    T.gemm(A_inv_tile, residual_operand, u)
                    for i, j in t.parallel(C, block_v):
                        u_operand[i, j] = u[i, j]
                    T.clear(out)
                    T.gemm(q_decayed, state_operand, out)
                    T.gemm(P_tile, u_operand, out)
                    for i, j in t.parallel(C, block_v):
                        if i < rows:
                            o[batch, start + i, value_head, first_v + j] = out[i, j] * (scale / down)
                    for c, j in t.parallel(K, block_v):
                        state[c, j] = state[c, j] * chunk_decay[c]
                    T.gemm(k_to_end, u_operand, state, transpose_A=True)
                    for c, j in t.parallel(K, block_v):
                        state[c, j] = state[c, j] / down
                if store_final_state != 0:
                    for c, j in t.parallel(K, block_v):
                        final_state[sequence, value_head, c, first_v + j] = state[c, j]
            else:
                for chunk in T.serial(T.truncdiv(length + (C - 1), C)):
                    for i, j in t.parallel(C, block_v):
                        if chunk * C + i < length:
                            o[batch, sequence_start + chunk * C + i, value_head, first_v + j] = 0.0

    return chunk_scan
