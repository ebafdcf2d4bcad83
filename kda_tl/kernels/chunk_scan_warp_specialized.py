"""chunk_scan for sm_90 with a role for every warpgroup; the same spec, arguments and results as `chunk_scan.program`.

    warpgroup  role     per chunk
    0          state    S = Diag(e^G_last) S + ke^T u, in registers; stores S as an operand
    1          value    residual = v - kd S;  u = A_inv residual
    2          output   o = scale (qd S + P u)
    3          gating   warps 0, 1: kd = k e^G and qd = q e^G, down the chunk; warps 2, 3: ke = k e^(G_last - G), up the chunk;
                        one thread issues the TMA loads

mbarriers connect the roles; a buffer has a `full` barrier and a `free` one. A TMA load brings 64 rows whatever the sequence
holds: rows past its end belong to the next sequence, so the gating and value roles clear them.

float16 operands are kept in range by a power of two s that the state role chooses ahead of a chunk, off the critical path: from
the peak of v in that chunk and the peak of S one chunk before it. With that peak scaled to [4, 8), u and S may still grow
8192-fold within the chunk.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.target import LOG2_E
from kda_tl.specs.kernels import ChunkScanSpec
from kda_tl.specs.schedules import ChunkScanSchedule

PEAK_EXPONENT = 2
GATING_UNROLL = 8


def program(spec: ChunkScanSpec, schedule: ChunkScanSchedule, arch: str) -> Any:
    """The PrimFunc; arguments as in `kda_tl.kernels.chunk_scan.program`."""
    C, K, V, dtype, operand_dtype = spec.chunk_size, spec.head_dim_k, spec.head_dim_v, spec.dtype, spec.operand_dtype
    block_v = schedule.block_v
    tiles_v = V // block_v
    raw_stages = schedule.stages
    B, seq_len, H, HV, N, slots, num_offsets = T.dynamic("B, seq_len, H, HV, N, slots, num_offsets")
    q_strides = T.dynamic("q_b, q_t, q_h")
    k_strides = T.dynamic("k_b, k_t, k_h")
    v_strides = T.dynamic("v_b, v_t, v_h")
    g_strides = T.dynamic("g_b, g_t, g_h")
    initial_strides = T.dynamic("i_n, i_h, i_k, i_v")
    final_strides = T.dynamic("f_n, f_h, f_k, f_v")

    @T.prim_func
    def chunk_scan(
        q: T.StridedTensor((B, seq_len, H, K), (*q_strides, 1), dtype),
        k: T.StridedTensor((B, seq_len, H, K), (*k_strides, 1), dtype),
        v: T.StridedTensor((B, seq_len, HV, V), (*v_strides, 1), dtype),
        g: T.StridedTensor((B, seq_len, HV, K), (*g_strides, 1), "float32"),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        A_inv: T.Tensor((slots, HV, C, C), operand_dtype),
        P: T.Tensor((slots, HV, C, C), operand_dtype),
        o: T.Tensor((B, seq_len, HV, V), dtype),
        initial_state: T.StridedTensor((N, HV, K, V), initial_strides, "float32"),
        final_state: T.StridedTensor((N, HV, K, V), final_strides, "float32"),
        scale: T.float32,
        uniform: T.int32,
        has_initial_state: T.int32,
        store_final_state: T.int32,
    ):
        with T.Kernel((N + 1 - uniform) * HV * tiles_v, threads=512) as block:
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
            num_chunks = T.truncdiv(length + (C - 1), C)

            q_raw = T.alloc_shared((raw_stages, C, K), dtype)
            k_raw = T.alloc_shared((raw_stages, C, K), dtype)
            g_raw = T.alloc_shared((raw_stages, C, K), "float32")
            v_tile = T.alloc_shared((2, C, block_v), dtype)
            A_inv_tile = T.alloc_shared((2, C, C), operand_dtype)
            P_tile = T.alloc_shared((2, C, C), operand_dtype)
            q_decayed = T.alloc_shared((C, K), operand_dtype)
            k_decayed = T.alloc_shared((C, K), operand_dtype)
            k_to_end = T.alloc_shared((C, K), operand_dtype)
            state_operand = T.alloc_shared((K, block_v), operand_dtype)
            # The residual, then u in its place: the residual of a chunk waits for the state after the last one, and so for
            # every reader of that one's u.
            u_operand = T.alloc_shared((C, block_v), operand_dtype)
            chunk_decay = T.alloc_shared((K,), "float32", scope="shared")
            value_peaks = T.alloc_shared((2, 2), "float32", scope="shared")
            state_peaks = T.alloc_shared((4,), "float32", scope="shared")
            scales = T.alloc_shared((2,), "float32", scope="shared")

            state = T.alloc_fragment((K, block_v), "float32")
            residual = T.alloc_fragment((C, block_v), "float32")
            u = T.alloc_fragment((C, block_v), "float32")
            out = T.alloc_fragment((C, block_v), "float32")

            raw_full = T.alloc_barrier([32] * raw_stages)
            tile_full = T.alloc_barrier([32] * 2)
            tile_free = T.alloc_barrier([256] * 2)
            gated_full = T.alloc_barrier(64)
            gated_free = T.alloc_barrier(256)
            to_end_full = T.alloc_barrier(64)
            to_end_free = T.alloc_barrier(128)
            state_full = T.alloc_barrier(128)
            state_free = T.alloc_barrier(256)
            u_full = T.alloc_barrier(128)
            u_free = T.alloc_barrier(256)

            tx = T.get_thread_binding()

            if sequence < N:
                if tx < 128:
                    T.set_max_nreg(schedule.state_registers, schedule.state_registers > 128)
                    if has_initial_state != 0:
                        for c, j in T.Parallel(K, block_v):
                            state[c, j] = initial_state[sequence, value_head, c, first_v + j]
                    else:
                        T.clear(state)
                    for i in T.serial(num_chunks):
                        T.barrier_wait(state_free, (i + 1) % 2)
                        T.copy(state, state_operand)
                        T.fence_proxy_async()
                        T.barrier_arrive(state_full)
                        T.barrier_wait(to_end_full, i % 2)
                        for c, j in T.Parallel(K, block_v):
                            state[c, j] = state[c, j] * chunk_decay[c]
                        T.barrier_wait(u_full, i % 2)
                        T.gemm(k_to_end, u_operand, state, transpose_A=True)
                        T.barrier_arrive(u_free)
                        T.barrier_arrive(to_end_free)
                    if store_final_state != 0:
                        for c, j in T.Parallel(K, block_v):
                            final_state[sequence, value_head, c, first_v + j] = state[c, j]
                elif tx < 256:
                    T.set_max_nreg(schedule.value_registers, schedule.value_registers > 128)
                    for i in T.serial(num_chunks):
                        rows = T.min(C, length - i * C)
                        T.barrier_wait(tile_full[i % 2], (i // 2) % 2)
                        T.barrier_wait(gated_full, i % 2)
                        T.barrier_wait(state_full, i % 2)
                        T.gemm(k_decayed, state_operand, residual, clear_accum=True)
                        T.barrier_arrive(gated_free)
                        T.barrier_arrive(state_free)
                        T.barrier_wait(u_free, (i + 1) % 2)
                        for r, j in T.Parallel(C, block_v):
                            u_operand[r, j] = T.if_then_else(r < rows, v_tile[i % 2, r, j] - residual[r, j], 0.0)
                        T.fence_proxy_async()
                        T.sync_threads(1, 128)
                        T.gemm(A_inv_tile[i % 2, :, :], u_operand, u, clear_accum=True)
                        T.barrier_arrive(tile_free[i % 2])
                        T.sync_threads(1, 128)
                        T.copy(u, u_operand)
                        T.fence_proxy_async()
                        T.barrier_arrive(u_full)
                elif tx < 384:
                    T.set_max_nreg(schedule.output_registers, schedule.output_registers > 128)
                    for i in T.serial(num_chunks):
                        start = sequence_start + i * C
                        rows = T.min(C, length - i * C)
                        T.barrier_wait(gated_full, i % 2)
                        T.barrier_wait(state_full, i % 2)
                        T.gemm(q_decayed, state_operand, out, clear_accum=True)
                        T.barrier_arrive(gated_free)
                        T.barrier_arrive(state_free)
                        T.barrier_wait(tile_full[i % 2], (i // 2) % 2)
                        T.barrier_wait(u_full, i % 2)
                        T.gemm(P_tile[i % 2, :, :], u_operand, out)
                        T.barrier_arrive(tile_free[i % 2])
                        T.barrier_arrive(u_free)
                        for r, j in T.Parallel(C, block_v):
                            if r < rows:
                                o[batch, start + r, value_head, first_v + j] = out[r, j] * scale
                else:
                    T.set_max_nreg(schedule.gating_registers, 0)
                    column = (tx % 64) * 2
                    factor = T.alloc_local((2,), "float32")
                    steps = T.alloc_local((GATING_UNROLL, 2), "float32")
                    k_rows = T.alloc_local((GATING_UNROLL, 2), dtype)
                    q_rows = T.alloc_local((GATING_UNROLL, 2), dtype)
                    total = T.alloc_local((2,), "float32")
                    if tx < 416:
                        for ahead in range(raw_stages):
                            if ahead < num_chunks:
                                load_raw(
                                    q,
                                    k,
                                    g,
                                    q_raw,
                                    k_raw,
                                    g_raw,
                                    raw_full,
                                    ahead,
                                    batch,
                                    sequence_start + ahead * C,
                                    head,
                                    value_head,
                                    C,
                                    K,
                                )
                        if num_chunks > 0:
                            load_tiles(
                                v,
                                A_inv,
                                P,
                                v_tile,
                                A_inv_tile,
                                P_tile,
                                tile_full,
                                0,
                                batch,
                                sequence_start,
                                value_head,
                                first_v,
                                block_v,
                                first_slot,
                                C,
                            )
                    for i in T.serial(num_chunks):
                        stage = i % raw_stages
                        rows = T.min(C, length - i * C)
                        if tx < 416:
                            if i + 1 < num_chunks:
                                T.barrier_wait(tile_free[(i + 1) % 2], ((i + 1) // 2 + 1) % 2)
                                load_tiles(
                                    v,
                                    A_inv,
                                    P,
                                    v_tile,
                                    A_inv_tile,
                                    P_tile,
                                    tile_full,
                                    (i + 1) % 2,
                                    batch,
                                    sequence_start + (i + 1) * C,
                                    value_head,
                                    first_v,
                                    block_v,
                                    first_slot + i + 1,
                                    C,
                                )
                        T.barrier_wait(raw_full[stage], (i // raw_stages) % 2)
                        if tx < 448:
                            T.barrier_wait(gated_free, (i + 1) % 2)
                            for j in T.vectorized(2):
                                factor[j] = 1.0
                            for r0 in T.serial(C // GATING_UNROLL):
                                # All loads of a batch before its first store: the compiler may not move a load over a store.
                                for r1 in T.unroll(GATING_UNROLL):
                                    for j in T.vectorized(2):
                                        steps[r1, j] = g_raw[stage, r0 * GATING_UNROLL + r1, column + j]
                                    for j in T.vectorized(2):
                                        k_rows[r1, j] = k_raw[stage, r0 * GATING_UNROLL + r1, column + j]
                                    for j in T.vectorized(2):
                                        q_rows[r1, j] = q_raw[stage, r0 * GATING_UNROLL + r1, column + j]
                                for r1 in T.unroll(GATING_UNROLL):
                                    for j in T.vectorized(2):
                                        steps[r1, j] = T.exp2(steps[r1, j] * LOG2_E)
                                for r1 in T.unroll(GATING_UNROLL):
                                    r = r0 * GATING_UNROLL + r1
                                    for j in T.vectorized(2):
                                        factor[j] = factor[j] * steps[r1, j]
                                    for j in T.vectorized(2):
                                        k_decayed[r, column + j] = T.if_then_else(r < rows, k_rows[r1, j] * factor[j], 0.0)
                                    for j in T.vectorized(2):
                                        q_decayed[r, column + j] = T.if_then_else(r < rows, q_rows[r1, j] * factor[j], 0.0)
                            T.fence_proxy_async()
                            T.barrier_arrive(gated_full)
                        else:
                            T.barrier_wait(to_end_free, (i + 1) % 2)
                            for j in T.vectorized(2):
                                factor[j] = 1.0
                                total[j] = 0.0
                            for r0 in T.serial(C // GATING_UNROLL):
                                last = C - 1 - r0 * GATING_UNROLL
                                for r1 in T.unroll(GATING_UNROLL):
                                    for j in T.vectorized(2):
                                        steps[r1, j] = T.if_then_else(
                                            last - r1 < rows, g_raw[stage, last - r1, column + j], 0.0
                                        )
                                    for j in T.vectorized(2):
                                        k_rows[r1, j] = k_raw[stage, last - r1, column + j]
                                for r1 in T.unroll(GATING_UNROLL):
                                    for j in T.vectorized(2):
                                        total[j] = total[j] + steps[r1, j]
                                    for j in T.vectorized(2):
                                        steps[r1, j] = T.exp2(steps[r1, j] * LOG2_E)
                                for r1 in T.unroll(GATING_UNROLL):
                                    r = last - r1
                                    for j in T.vectorized(2):
                                        k_to_end[r, column + j] = T.if_then_else(r < rows, k_rows[r1, j] * factor[j], 0.0)
                                    for j in T.vectorized(2):
                                        factor[j] = factor[j] * steps[r1, j]
                            for j in T.vectorized(2):
                                chunk_decay[column + j] = T.exp2(total[j] * LOG2_E)
                            T.fence_proxy_async()
                            T.barrier_arrive(to_end_full)
                        T.sync_threads(2, 128)
                        if tx < 416:
                            if i + raw_stages < num_chunks:
                                load_raw(
                                    q,
                                    k,
                                    g,
                                    q_raw,
                                    k_raw,
                                    g_raw,
                                    raw_full,
                                    stage,
                                    batch,
                                    sequence_start + (i + raw_stages) * C,
                                    head,
                                    value_head,
                                    C,
                                    K,
                                )
            else:
                for chunk in T.serial(num_chunks):
                    for r, j in T.Parallel(C, block_v):
                        if chunk * C + r < length:
                            o[batch, sequence_start + chunk * C + r, value_head, first_v + j] = 0.0

    return chunk_scan


@T.macro
def load_raw(q, k, g, q_raw, k_raw, g_raw, full, stage, batch, start, head, value_head, C, K):
    T.tma_copy(q[batch, start : start + C, head, 0:K], q_raw[stage, :, :], barrier=full[stage])
    T.tma_copy(k[batch, start : start + C, head, 0:K], k_raw[stage, :, :], barrier=full[stage])
    T.tma_copy(g[batch, start : start + C, value_head, 0:K], g_raw[stage, :, :], barrier=full[stage])
    T.barrier_arrive(full[stage])


@T.macro
def load_tiles(v, A_inv, P, v_tile, A_inv_tile, P_tile, full, stage, batch, start, value_head, first_v, block_v, slot, C):
    T.tma_copy(v[batch, start : start + C, value_head, first_v : first_v + block_v], v_tile[stage, :, :], barrier=full[stage])
    T.tma_copy(A_inv[slot, value_head, 0:C, 0:C], A_inv_tile[stage, :, :], barrier=full[stage])
    T.tma_copy(P[slot, value_head, 0:C, 0:C], P_tile[stage, :, :], barrier=full[stage])
    T.barrier_arrive(full[stage])
