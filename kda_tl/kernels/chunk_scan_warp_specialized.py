"""chunk_scan for sm_90 with a role for every warpgroup; the same spec, arguments and results as `chunk_scan.program`.

    warpgroup  role     per chunk
    0          state    S = Diag(e^G_last) S + ke^T u, in registers; stores S as an operand
    1          value    residual = v - kd S;  u = A_inv residual
    2          output   ke = k e^(G_last - G), up the chunk;  o = scale (qd S + P u)
    3          gating   kd = k e^G and qd = q e^G, down the chunk; its first warp issues the TMA loads

mbarriers connect the roles: a buffer has a `full` barrier and a `free` one. A TMA load brings 64 rows whatever the sequence
holds; rows past its end belong to the next sequence, so the roles that read them clear them.

float16 operands are kept in range by a power of two s that the state role chooses per chunk, off the critical path: from the
peaks of v in the chunk, which the gating role sees ahead, and in the chunk before, and the peak that S had before that one.
They bound S up to a small factor; s is 1 while all stay within [2^-10, 2^9), and S and u may then still grow 128-fold.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda_tl.kernels.tiles.scaling import range_scale
from kda_tl.kernels.tiles.target import LOG2_E, run_time_strides
from kda_tl.specs.kernels import ChunkScanSpec
from kda_tl.specs.schedules import ChunkScanSchedule

BATCH = 8  # rows that a gating thread has in flight
HIGHEST_PEAK = 8  # exponent of the largest peak that is not scaled


def program(spec: ChunkScanSpec, schedule: ChunkScanSchedule, arch: str) -> Any:
    """The PrimFunc; arguments as in `kda_tl.kernels.chunk_scan.program`."""
    C, K, V, dtype, operand_dtype = spec.chunk_size, spec.head_dim_k, spec.head_dim_v, spec.dtype, spec.operand_dtype
    block_v, raw_stages, tile_stages = schedule.block_v, schedule.raw_stages, schedule.tile_stages
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
        # The roles synchronize by hand. TileLang would put a barrier before every store of the residual.
        T.annotate_pass_configs({"tl.disable_thread_storage_sync": True})
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
            v_tile = T.alloc_shared((tile_stages, C, block_v), dtype)
            A_inv_tile = T.alloc_shared((tile_stages, C, C), operand_dtype)
            P_tile = T.alloc_shared((tile_stages, C, C), operand_dtype)
            q_decayed = T.alloc_shared((C, K), operand_dtype)
            k_decayed = T.alloc_shared((C, K), operand_dtype)
            k_to_end = T.alloc_shared((C, K), operand_dtype)
            state_operand = T.alloc_shared((K, block_v), operand_dtype)
            # The residual, then u in its place: the residual of a chunk waits for the state after the last one, and so for
            # every reader of that one's u.
            u_operand = T.alloc_shared((C, block_v), operand_dtype)
            chunk_decay = T.alloc_shared((K,), "float32", scope="shared")
            value_peaks = T.alloc_shared((4,), "float32", scope="shared")
            state_peaks = T.alloc_shared((4,), "float32", scope="shared")
            scales = T.alloc_shared((2,), "float32", scope="shared")

            state = T.alloc_fragment((K, block_v), "float32")
            residual = T.alloc_fragment((C, block_v), "float32")
            u = T.alloc_fragment((C, block_v), "float32")
            out = T.alloc_fragment((C, block_v), "float32")

            raw_full = T.alloc_barrier([32] * raw_stages)
            raw_free = T.alloc_barrier([256] * raw_stages)
            tile_full = T.alloc_barrier([32] * tile_stages)
            tile_free = T.alloc_barrier([384] * tile_stages)
            gated_full = T.alloc_barrier(128)
            gated_free = T.alloc_barrier(384)
            to_end_full = T.alloc_barrier(128)
            to_end_free = T.alloc_barrier(128)
            state_full = T.alloc_barrier(128)
            state_free = T.alloc_barrier(256)
            u_full = T.alloc_barrier(128)
            u_free = T.alloc_barrier(256)

            # What TMA brings in rows is read in columns of a fragment; a linear tile would serve 8 rows from one bank.
            T.annotate_layout({v_tile: make_swizzled_layout(v_tile)})

            tx = T.get_thread_binding()

            if sequence < N:
                if tx < 128:
                    T.set_max_nreg(schedule.state_registers, schedule.state_registers > 128)
                    current = T.alloc_var("float32", init=1.0)
                    chosen = T.alloc_var("float32", init=1.0)
                    peak = T.alloc_var("float32", init=0.0)
                    new_peak = T.alloc_var("float32", init=0.0)
                    last_peak = T.alloc_var("float32", init=0.0)
                    if has_initial_state != 0:
                        for c, j in T.Parallel(K, block_v):
                            state[c, j] = initial_state[sequence, value_head, c, first_v + j]
                    else:
                        T.clear(state)
                    store_state_peak(state, state_peaks, tx, K, block_v)
                    T.sync_threads(4, 128)
                    for i in T.serial(num_chunks):
                        T.barrier_wait(gated_full, i % 2)
                        new_peak = max4(value_peaks)
                        T.barrier_arrive(gated_free)
                        # S now is at most a few times what it was a chunk ago, or what v was then.
                        peak = T.max(T.max(new_peak, last_peak), max4(state_peaks) / current)
                        last_peak = new_peak
                        chosen = range_scale(peak, HIGHEST_PEAK)
                        if chosen != current:
                            for c, j in T.Parallel(K, block_v):
                                state[c, j] = state[c, j] / current * chosen
                            current = chosen
                        T.barrier_wait(state_free, (i + 1) % 2)
                        scales[i % 2] = current
                        T.copy(state, state_operand)
                        T.fence_proxy_async()
                        T.barrier_arrive(state_full)
                        # Everyone has read the last peaks.
                        T.sync_threads(4, 128)
                        store_state_peak(state, state_peaks, tx, K, block_v)
                        T.barrier_wait(to_end_full, i % 2)
                        for c, j in T.Parallel(K, block_v):
                            state[c, j] = state[c, j] * chunk_decay[c]
                        T.barrier_wait(u_full, i % 2)
                        T.gemm(k_to_end, u_operand, state, transpose_A=True)
                        T.barrier_arrive(u_free)
                        T.barrier_arrive(to_end_free)
                        T.sync_threads(4, 128)
                    if store_final_state != 0:
                        for c, j in T.Parallel(K, block_v):
                            final_state[sequence, value_head, c, first_v + j] = state[c, j] / current
                elif tx < 256:
                    T.set_max_nreg(schedule.value_registers, schedule.value_registers > 128)
                    for i in T.serial(num_chunks):
                        rows = T.min(C, length - i * C)
                        T.barrier_wait(tile_full[i % tile_stages], (i // tile_stages) % 2)
                        T.barrier_wait(gated_full, i % 2)
                        T.barrier_wait(state_full, i % 2)
                        T.gemm(k_decayed, state_operand, residual, clear_accum=True)
                        T.barrier_arrive(gated_free)
                        T.barrier_arrive(state_free)
                        T.barrier_wait(u_free, (i + 1) % 2)
                        for r, j in T.Parallel(C, block_v):
                            u_operand[r, j] = T.if_then_else(
                                r < rows, v_tile[i % tile_stages, r, j] * scales[i % 2] - residual[r, j], 0.0
                            )
                        T.fence_proxy_async()
                        T.sync_threads(1, 128)
                        T.gemm(A_inv_tile[i % tile_stages, :, :], u_operand, u, clear_accum=True)
                        T.barrier_arrive(tile_free[i % tile_stages])
                        T.sync_threads(1, 128)
                        T.copy(u, u_operand)
                        T.fence_proxy_async()
                        T.barrier_arrive(u_full)
                elif tx < 384:
                    T.set_max_nreg(schedule.output_registers, schedule.output_registers > 128)
                    for i in T.serial(num_chunks):
                        start = sequence_start + i * C
                        rows = T.min(C, length - i * C)
                        T.barrier_wait(raw_full[i % raw_stages], (i // raw_stages) % 2)
                        T.barrier_wait(to_end_free, (i + 1) % 2)
                        if rows == C:
                            gate_up(k_raw, g_raw, k_to_end, chunk_decay, tx, i % raw_stages, rows, C, K, False)
                        else:
                            gate_up(k_raw, g_raw, k_to_end, chunk_decay, tx, i % raw_stages, rows, C, K, True)
                        T.fence_proxy_async()
                        T.barrier_arrive(to_end_full)
                        T.barrier_arrive(raw_free[i % raw_stages])
                        T.barrier_wait(gated_full, i % 2)
                        T.barrier_wait(state_full, i % 2)
                        T.gemm(q_decayed, state_operand, out, clear_accum=True)
                        T.barrier_arrive(gated_free)
                        T.barrier_arrive(state_free)
                        T.barrier_wait(tile_full[i % tile_stages], (i // tile_stages) % 2)
                        T.barrier_wait(u_full, i % 2)
                        T.gemm(P_tile[i % tile_stages, :, :], u_operand, out)
                        for r, j in T.Parallel(C, block_v):
                            out[r, j] = out[r, j] * (scale / scales[i % 2])
                        T.barrier_arrive(u_free)
                        # u_full came after the value role's last read of v: the output takes its place on the way out.
                        T.copy(out, v_tile[i % tile_stages, :, :])
                        T.fence_proxy_async()
                        T.sync_threads(3, 128)
                        if rows == C:
                            T.copy(
                                v_tile[i % tile_stages, :, :],
                                o[batch, start : start + C, value_head, first_v : first_v + block_v],
                            )
                        else:
                            # A TMA store would overwrite the next sequence's rows.
                            for r, j in T.Parallel(C, block_v):
                                if r < rows:
                                    o[batch, start + r, value_head, first_v + j] = v_tile[i % tile_stages, r, j]
                        T.barrier_arrive(tile_free[i % tile_stages])
                else:
                    T.set_max_nreg(schedule.gating_registers, 0)
                    if tx < 416 and num_chunks > 0:
                        for ahead in list(range(raw_stages)):
                            if ahead < num_chunks:
                                load_raw(q, k, g, q_raw, k_raw, g_raw, raw_full, ahead, batch, sequence_start + ahead * C, head,
                                         value_head, C, K)  # fmt: skip
                        load_tiles(v, A_inv, P, v_tile, A_inv_tile, P_tile, tile_full, 0, batch, sequence_start, value_head,
                                   first_v, block_v, first_slot, C)  # fmt: skip
                    for i in T.serial(num_chunks):
                        rows = T.min(C, length - i * C)
                        # The stage that the last chunk gave back; the first stages are loaded above.
                        if tx < 416 and i > 0 and i - 1 + raw_stages < num_chunks:
                            T.barrier_wait(raw_free[(i - 1) % raw_stages], ((i - 1) // raw_stages) % 2)
                            load_raw(q, k, g, q_raw, k_raw, g_raw, raw_full, (i - 1) % raw_stages, batch,
                                     sequence_start + (i - 1 + raw_stages) * C, head, value_head, C, K)  # fmt: skip
                        T.barrier_wait(raw_full[i % raw_stages], (i // raw_stages) % 2)
                        T.barrier_wait(gated_free, (i + 1) % 2)
                        if rows == C:
                            gate_down(q_raw, k_raw, g_raw, q_decayed, k_decayed, tx, i % raw_stages, rows, C, K, False)
                        else:
                            gate_down(q_raw, k_raw, g_raw, q_decayed, k_decayed, tx, i % raw_stages, rows, C, K, True)
                        T.fence_proxy_async()
                        T.barrier_arrive(raw_free[i % raw_stages])
                        T.barrier_wait(tile_full[i % tile_stages], (i // tile_stages) % 2)
                        store_value_peak(v_tile, value_peaks, tx, i % tile_stages, rows, C, block_v)
                        T.barrier_arrive(tile_free[i % tile_stages])
                        T.barrier_arrive(gated_full)
                        if tx < 416 and i + 1 < num_chunks:
                            T.barrier_wait(tile_free[(i + 1) % tile_stages], ((i + 1) // tile_stages + 1) % 2)
                            following = sequence_start + (i + 1) * C
                            load_tiles(v, A_inv, P, v_tile, A_inv_tile, P_tile, tile_full, (i + 1) % tile_stages, batch,
                                       following, value_head, first_v, block_v, first_slot + i + 1, C)  # fmt: skip
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


@T.macro
def max4(values):
    return T.max(T.max(values[0], values[1]), T.max(values[2], values[3]))


@T.macro
def store_state_peak(state, peaks, tx, K, block_v):
    """max |S| over what each warp of the state role holds."""
    peak = T.alloc_var("float32", init=0.0)
    peak = 0.0
    for c, j in T.Parallel(K, block_v):
        peak = T.max(peak, T.abs(state[c, j]))
    peak = T.warp_reduce_max(peak)
    if tx % 32 == 0:
        peaks[tx // 32] = peak


@T.macro
def store_value_peak(v_tile, peaks, tx, stage, rows, C, block_v):
    """max |v| over the chunk's rows, a value per warp of the calling warpgroup."""
    peak = T.alloc_var("float32", init=0.0)
    peak = 0.0
    for step in T.unroll(C * block_v // 256):
        r = step * (256 // block_v) + tx % 128 // (block_v // 2)
        for j in T.unroll(2):
            peak = T.max(
                peak, T.if_then_else(r < rows, T.abs(T.cast(v_tile[stage, r, tx % (block_v // 2) * 2 + j], "float32")), 0.0)
            )
    peak = T.warp_reduce_max(peak)
    if tx % 32 == 0:
        peaks[tx % 128 // 32] = peak


@T.macro
def gate_down(q_raw, k_raw, g_raw, q_decayed, k_decayed, tx, stage, rows, C, K, masked):
    """k e^G and q e^G, first row to last; rows from `rows` on are 0 where `masked`. A thread: two columns, half of the rows."""
    column = tx % (K // 2) * 2
    first = tx % K // (K // 2) * (C // 2)
    factor = T.alloc_local((2,), "float32")
    decay = T.alloc_local((BATCH, 2), "float32")
    k_rows = T.alloc_local((BATCH, 2), k_raw.dtype)
    q_rows = T.alloc_local((BATCH, 2), q_raw.dtype)
    for j in T.vectorized(2):
        factor[j] = 0.0
    if first > 0:
        for r in T.unroll(C // 2):
            for j in T.vectorized(2):
                factor[j] = factor[j] + g_raw[stage, r, column + j]
    for j in T.vectorized(2):
        factor[j] = T.exp2(factor[j] * LOG2_E)
    for batch in T.serial(C // 2 // BATCH):
        # All loads of a batch before its first store: the compiler may not move a load over a store.
        for r in T.unroll(BATCH):
            for j in T.vectorized(2):
                decay[r, j] = g_raw[stage, first + batch * BATCH + r, column + j]
            for j in T.vectorized(2):
                k_rows[r, j] = k_raw[stage, first + batch * BATCH + r, column + j]
            for j in T.vectorized(2):
                q_rows[r, j] = q_raw[stage, first + batch * BATCH + r, column + j]
        for r in T.unroll(BATCH):
            for j in T.vectorized(2):
                decay[r, j] = T.exp2(decay[r, j] * LOG2_E)
        for r in T.unroll(BATCH):
            row = first + batch * BATCH + r
            for j in T.vectorized(2):
                factor[j] = factor[j] * decay[r, j]
            if masked:
                for j in T.vectorized(2):
                    k_decayed[row, column + j] = T.if_then_else(row < rows, k_rows[r, j] * factor[j], 0.0)
                for j in T.vectorized(2):
                    q_decayed[row, column + j] = T.if_then_else(row < rows, q_rows[r, j] * factor[j], 0.0)
            else:
                for j in T.vectorized(2):
                    k_decayed[row, column + j] = k_rows[r, j] * factor[j]
                for j in T.vectorized(2):
                    q_decayed[row, column + j] = q_rows[r, j] * factor[j]


@T.macro
def gate_up(k_raw, g_raw, k_to_end, chunk_decay, tx, stage, rows, C, K, masked):
    """k e^(G_last - G), last row to first, and e^G_last as the exponential of a sum. Threads as in `gate_down`."""
    column = tx % (K // 2) * 2
    first = tx % K // (K // 2) * (C // 2)
    factor = T.alloc_local((2,), "float32")
    later = T.alloc_local((2,), "float32")
    total = T.alloc_local((2,), "float32")
    decay = T.alloc_local((BATCH, 2), "float32")
    k_rows = T.alloc_local((BATCH, 2), k_raw.dtype)
    for j in T.vectorized(2):
        later[j] = 0.0
        total[j] = 0.0
    if first == 0:
        for r in T.unroll(C // 2):
            for j in T.vectorized(2):
                if masked:
                    later[j] = later[j] + T.if_then_else(C // 2 + r < rows, g_raw[stage, C // 2 + r, column + j], 0.0)
                else:
                    later[j] = later[j] + g_raw[stage, C // 2 + r, column + j]
    for j in T.vectorized(2):
        factor[j] = T.exp2(later[j] * LOG2_E)
    for batch in T.serial(C // 2 // BATCH):
        last = first + C // 2 - 1 - batch * BATCH
        for r in T.unroll(BATCH):
            for j in T.vectorized(2):
                decay[r, j] = g_raw[stage, last - r, column + j]
            for j in T.vectorized(2):
                k_rows[r, j] = k_raw[stage, last - r, column + j]
        for r in T.unroll(BATCH):
            if masked:
                for j in T.vectorized(2):
                    decay[r, j] = T.if_then_else(last - r < rows, decay[r, j], 0.0)
            for j in T.vectorized(2):
                total[j] = total[j] + decay[r, j]
            for j in T.vectorized(2):
                decay[r, j] = T.exp2(decay[r, j] * LOG2_E)
        for r in T.unroll(BATCH):
            if masked:
                for j in T.vectorized(2):
                    k_to_end[last - r, column + j] = T.if_then_else(last - r < rows, k_rows[r, j] * factor[j], 0.0)
            else:
                for j in T.vectorized(2):
                    k_to_end[last - r, column + j] = k_rows[r, j] * factor[j]
            for j in T.vectorized(2):
                factor[j] = factor[j] * decay[r, j]
    if first == 0:
        for j in T.vectorized(2):
            chunk_decay[column + j] = T.exp2((later[j] + total[j]) * LOG2_E)
