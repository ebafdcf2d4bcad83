"""chunk_scan for sm_90 with a role for every warpgroup; the same spec, arguments and results as `chunk_scan.program`.

    warpgroup  role     per chunk
    0          state    S = Diag(chunk_decay) S + k_to_end^T u, in registers; stores S as an operand
    1          value    residual = v - k_decayed S;  u = A_inv residual
    2          output   o = scale (q_decayed S + P u)
    3          load     its first warp issues the TMA loads of the chunks ahead; two others look at their v

mbarriers connect the roles: a buffer has a `full` barrier and a `free` one. A TMA load brings 64 rows whatever the sequence
holds. Those of the workspace past its end are zero; those of v belong to the next sequence, and the value role clears them.

float16 operands are kept in range by a power of two s that the state role chooses per chunk, off the critical path: from the
peaks of v in the chunk, which the load role sees ahead, and in the chunk before, and the peak that S had before that one.
They bound S up to a small factor; s is 1 while all stay within [2^-10, 2^9), and S and u may then still grow 128-fold.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda_tl.kernels.tiles.chunks import locate_segment
from kda_tl.kernels.tiles.scaling import inverse_power_of_two, range_scale
from kda_tl.kernels.tiles.target import run_time_strides
from kda_tl.specs.kernels import ChunkScanSpec
from kda_tl.specs.schedules import ChunkScanSchedule

HIGHEST_PEAK = 8  # exponent of the largest peak that is not scaled


def program(spec: ChunkScanSpec, schedule: ChunkScanSchedule, arch: str) -> Any:
    """The PrimFunc; arguments as in `kda_tl.kernels.chunk_scan.program`."""
    C, K, V, dtype, state_dtype, operand_dtype = (
        spec.chunk_size, spec.head_dim_k, spec.head_dim_v, spec.dtype, spec.state_dtype, spec.operand_dtype,
    )  # fmt: skip
    delta, block_v, stages = spec.delta, schedule.block_v, schedule.stages
    tiles_v = V // block_v
    B, seq_len, HV, slots, num_offsets = T.dynamic("B, seq_len, HV, slots, num_offsets")
    initials, finals, num_indices, num_masks, cut_seqs, cuts, state_slots, a, b = T.dynamic(
        "initials, finals, num_indices, num_masks, cut_seqs, cuts, state_slots, a, b"
    )
    delta_slots, delta_heads = (slots, HV) if delta else (a, b)
    v_strides, o_strides = run_time_strides("v", "bth"), run_time_strides("o", "bth")
    initial_strides = run_time_strides("i", "nhkv")
    final_strides = run_time_strides("f", "nhkv")

    @T.prim_func
    def chunk_scan(
        v: T.StridedTensor((B, seq_len, HV, V), (*v_strides, 1), dtype),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        q_decayed: T.Tensor((slots, HV, C, K), operand_dtype),
        k_decayed: T.Tensor((delta_slots, delta_heads, C, K), operand_dtype),
        k_to_end: T.Tensor((slots, HV, C, K), operand_dtype),
        chunk_decay: T.Tensor((slots, HV, K), "float32"),
        A_inv: T.Tensor((delta_slots, delta_heads, C, C), operand_dtype),
        P: T.Tensor((slots, HV, C, C), operand_dtype),
        o: T.StridedTensor((B, seq_len, HV, V), (*o_strides, 1), dtype),
        initial_state: T.StridedTensor((initials, HV, K, V), initial_strides, state_dtype),
        final_state: T.StridedTensor((finals, HV, K, V), final_strides, state_dtype),
        state_indices: T.Tensor((num_indices,), "int32"),
        has_initial_state: T.Tensor((num_masks,), "uint8"),
        segment_states: T.Tensor((cut_seqs, cuts, HV, K, V), "float32"),
        states: T.Tensor((state_slots, HV, K, V), "float32"),
        scale: T.float32,
        num_seqs: T.int32,
        uniform: T.int32,
        load_state: T.int32,
        masked: T.int32,
        store_final_state: T.int32,
        indexed: T.int32,
        store_states: T.int32,
        null_index: T.int32,
        segments: T.int32,
        segment_chunks: T.int32,
    ):
        # The roles synchronize by hand. TileLang would put a barrier before every store of the residual.
        T.annotate_pass_configs({"tl.disable_thread_storage_sync": True})
        with T.Kernel((num_seqs + 1 - uniform) * segments * HV * tiles_v, threads=512) as block:
            where = T.alloc_local((10,), "int32")
            locate_segment(block, tiles_v, HV, segments, segment_chunks, uniform, seq_len, num_seqs, cu_seqlens, C, indexed,
                           state_indices, null_index, T.if_then_else(load_state != 0, initials, finals), where)  # fmt: skip
            value_head, sequence, segment, batch = where[1], where[2], where[3], where[4]
            first, length, first_slot, ends, state_slot = where[5], where[6], where[7], where[8], where[9]
            first_v = where[0] * block_v
            num_chunks = T.truncdiv(length + (C - 1), C)

            q_tile = T.alloc_shared((stages, C, K), operand_dtype)
            k_tile = T.alloc_shared((stages, C, K), operand_dtype)
            end_tile = T.alloc_shared((stages, C, K), operand_dtype)
            v_tile = T.alloc_shared((stages, C, block_v), dtype)
            A_inv_tile = T.alloc_shared((stages, C, C), operand_dtype)
            P_tile = T.alloc_shared((stages, C, C), operand_dtype)
            state_operand = T.alloc_shared((K, block_v), operand_dtype)
            # The residual, then u in its place: the residual of a chunk waits for the state after the last one, and so for
            # every reader of that one's u.
            u_operand = T.alloc_shared((C, block_v), operand_dtype)
            o_tile = T.alloc_shared((C, block_v), dtype)
            decay_tile = T.alloc_shared((2, K), "float32", scope="shared")
            peaks = T.alloc_shared((4, 4), "float32", scope="shared")  # of v (two warps), of S (four): two chunks each
            scales = T.alloc_shared((2,), "float32", scope="shared")

            state = T.alloc_fragment((K, block_v), "float32")
            values = T.alloc_fragment((C, block_v), "float32")
            residual = T.alloc_fragment((C, block_v), "float32")
            u = T.alloc_fragment((C, block_v), "float32")
            out = T.alloc_fragment((C, block_v), "float32")

            # A tile goes back, to be loaded again, as soon as its own role is done with it.
            value_full = T.alloc_barrier([32] * stages)
            value_free = T.alloc_barrier([128] * stages)
            output_full = T.alloc_barrier([32] * stages)
            output_free = T.alloc_barrier([128] * stages)
            end_full = T.alloc_barrier([32] * stages)
            end_free = T.alloc_barrier([128] * stages)
            seen = T.alloc_barrier([64] * 2)
            seen_free = T.alloc_barrier([128] * 2)
            state_full = T.alloc_barrier(128)
            state_free = T.alloc_barrier(256)
            u_full = T.alloc_barrier(128)
            u_free = T.alloc_barrier(256)

            # What TMA moves in rows, fragments use in columns: a linear tile would serve 8 rows from one bank.
            T.annotate_layout({v_tile: make_swizzled_layout(v_tile), o_tile: make_swizzled_layout(o_tile)})

            tx = T.get_thread_binding()

            if sequence < num_seqs and state_slot >= 0:
                if tx < 128:
                    T.set_max_nreg(schedule.state_registers, schedule.state_registers > 128)
                    current = T.alloc_var("float32", init=1.0)
                    chosen = T.alloc_var("float32", init=1.0)
                    peak = T.alloc_var("float32", init=0.0)
                    new_peak = T.alloc_var("float32", init=0.0)
                    last_peak = T.alloc_var("float32", init=0.0)
                    starts = T.alloc_var("int32", init=0)
                    starts = load_state
                    if masked != 0:
                        starts = T.if_then_else(T.cast(has_initial_state[sequence], "int32") != 0, load_state, 0)
                    if segments > 1:
                        for d, j in T.Parallel(K, block_v):
                            state[d, j] = segment_states[sequence, segment, value_head, d, first_v + j]
                    elif starts != 0:
                        for d, j in T.Parallel(K, block_v):
                            state[d, j] = initial_state[state_slot, value_head, d, first_v + j]
                    else:
                        T.clear(state)
                    store_state_peak(state, peaks, 3, tx, K, block_v)
                    T.sync_threads(4, 128)
                    for i in T.serial(num_chunks):
                        if store_states != 0:
                            for d, j in T.Parallel(K, block_v):
                                states[first_slot + i, value_head, d, first_v + j] = state[d, j] * inverse_power_of_two(current)
                        T.barrier_wait(seen[i % 2], (i // 2) % 2)
                        new_peak = T.max(peaks[i % 2, 0], peaks[i % 2, 1])
                        # S now is at most a few times what was left of it a chunk ago, or what v was then.
                        peak = T.max(T.max(new_peak, last_peak), max4(peaks, 2 + (i + 1) % 2) * inverse_power_of_two(current))
                        last_peak = new_peak
                        chosen = range_scale(peak, HIGHEST_PEAK)
                        if chosen != current:
                            for d, j in T.Parallel(K, block_v):
                                state[d, j] = state[d, j] * inverse_power_of_two(current) * chosen
                            current = chosen
                        T.barrier_wait(state_free, (i + 1) % 2)
                        scales[i % 2] = current
                        T.copy(state, state_operand)
                        T.fence_proxy_async()
                        T.barrier_arrive(state_full)
                        # The decays are read after S is handed over, and the peak is that of the decayed S: the compiler would
                        # otherwise look for it first, while the value role waits.
                        for d, j in T.Parallel(K, block_v):
                            state[d, j] = state[d, j] * decay_tile[i % 2, d]
                        T.barrier_arrive(seen_free[i % 2])
                        store_state_peak(state, peaks, 2 + i % 2, tx, K, block_v)
                        T.barrier_wait(end_full[i % stages], (i // stages) % 2)
                        T.barrier_wait(u_full, i % 2)
                        T.gemm(end_tile[i % stages, :, :], u_operand, state, transpose_A=True)
                        T.barrier_arrive(u_free)
                        T.barrier_arrive(end_free[i % stages])
                        T.sync_threads(4, 128)
                    if store_final_state != 0 and ends != 0:
                        for d, j in T.Parallel(K, block_v):
                            final_state[state_slot, value_head, d, first_v + j] = state[d, j] * inverse_power_of_two(current)
                elif tx < 256:
                    T.set_max_nreg(schedule.value_registers, schedule.value_registers > 128)
                    for i in T.serial(num_chunks):
                        rows = T.min(C, length - i * C)
                        T.barrier_wait(value_full[i % stages], (i // stages) % 2)
                        for r, j in T.Parallel(C, block_v):
                            values[r, j] = T.if_then_else(r < rows, v_tile[i % stages, r, j], 0.0)
                        T.barrier_wait(state_full, i % 2)
                        if delta:
                            T.gemm(k_tile[i % stages, :, :], state_operand, residual, clear_accum=True)
                        else:
                            T.clear(residual)
                        T.barrier_arrive(state_free)
                        T.barrier_wait(u_free, (i + 1) % 2)
                        for r, j in T.Parallel(C, block_v):
                            residual[r, j] = values[r, j] * scales[i % 2] - residual[r, j]
                        T.copy(residual, u_operand)
                        T.fence_proxy_async()
                        if delta:
                            T.sync_threads(1, 128)
                            T.gemm(A_inv_tile[i % stages, :, :], u_operand, u, clear_accum=True)
                            T.barrier_arrive(value_free[i % stages])
                            T.sync_threads(1, 128)
                            T.copy(u, u_operand)
                            T.fence_proxy_async()
                        else:
                            T.barrier_arrive(value_free[i % stages])
                        T.barrier_arrive(u_full)
                elif tx < 384:
                    T.set_max_nreg(schedule.output_registers, schedule.output_registers > 128)
                    for i in T.serial(num_chunks):
                        start = first + i * C
                        rows = T.min(C, length - i * C)
                        T.barrier_wait(output_full[i % stages], (i // stages) % 2)
                        T.barrier_wait(state_full, i % 2)
                        T.gemm(q_tile[i % stages, :, :], state_operand, out, clear_accum=True)
                        T.barrier_arrive(state_free)
                        T.barrier_wait(u_full, i % 2)
                        T.gemm(P_tile[i % stages, :, :], u_operand, out)
                        T.barrier_arrive(output_free[i % stages])
                        for r, j in T.Parallel(C, block_v):
                            out[r, j] = out[r, j] * (scale * inverse_power_of_two(scales[i % 2]))
                        T.barrier_arrive(u_free)
                        T.copy(out, o_tile)
                        T.fence_proxy_async()
                        T.sync_threads(3, 128)
                        if rows == C:
                            T.copy(o_tile, o[batch, start : start + C, value_head, first_v : first_v + block_v])
                        else:
                            # A TMA store would overwrite the next sequence's rows.
                            for r, j in T.Parallel(C, block_v):
                                if r < rows:
                                    o[batch, start + r, value_head, first_v + j] = o_tile[r, j]
                        T.sync_threads(3, 128)
                else:
                    T.set_max_nreg(schedule.load_registers, 0)
                    decays = T.alloc_local((2,), "float32")
                    if tx < 416:
                        for ahead in list(range(stages)):
                            if ahead < num_chunks:
                                load_value_tiles(k_decayed, v, A_inv, k_tile, v_tile, A_inv_tile, value_full, ahead, batch,
                                                 first + ahead * C, value_head, first_v, block_v, first_slot + ahead, C, K,
                                                 delta)  # fmt: skip
                                load_output_tiles(q_decayed, P, q_tile, P_tile, output_full, ahead, value_head,
                                                  first_slot + ahead, C, K)  # fmt: skip
                                load_end_tile(k_to_end, end_tile, end_full, ahead, value_head, first_slot + ahead, C, K)
                        for i in T.serial(T.max(num_chunks - stages, 0)):
                            stage, phase, following = i % stages, (i // stages) % 2, i + stages
                            T.barrier_wait(value_free[stage], phase)
                            load_value_tiles(k_decayed, v, A_inv, k_tile, v_tile, A_inv_tile, value_full, stage, batch,
                                             first + following * C, value_head, first_v, block_v, first_slot + following, C, K,
                                             delta)  # fmt: skip
                            T.barrier_wait(output_free[stage], phase)
                            load_output_tiles(q_decayed, P, q_tile, P_tile, output_full, stage, value_head,
                                              first_slot + following, C, K)  # fmt: skip
                            T.barrier_wait(end_free[stage], phase)
                            load_end_tile(k_to_end, end_tile, end_full, stage, value_head, first_slot + following, C, K)
                    elif tx < 480:
                        for i in T.serial(num_chunks):
                            # The state role has taken over what was seen two chunks ago.
                            T.barrier_wait(seen_free[i % 2], (i // 2 + 1) % 2)
                            for d in T.vectorized(2):
                                decays[d] = chunk_decay[first_slot + i, value_head, tx % 64 * 2 % K + d]
                            T.barrier_wait(value_full[i % stages], (i // stages) % 2)
                            store_value_peak(v_tile, peaks, tx, i % stages, i % 2, T.min(C, length - i * C), C, block_v)
                            for d in T.vectorized(2):
                                decay_tile[i % 2, tx % 64 * 2 % K + d] = decays[d]
                            T.barrier_arrive(seen[i % 2])
            else:
                for chunk in T.serial(num_chunks):
                    for r, j in T.Parallel(C, block_v):
                        if chunk * C + r < length:
                            o[batch, first + chunk * C + r, value_head, first_v + j] = 0.0

    return chunk_scan


@T.macro
def load_value_tiles(k_decayed, v, A_inv, k_tile, v_tile, A_inv_tile, full, stage, batch, start, value_head, first_v, block_v,
                     slot, C, K, delta):  # fmt: skip
    if delta:
        T.tma_copy(k_decayed[slot, value_head, 0:C, 0:K], k_tile[stage, :, :], barrier=full[stage])
    T.tma_copy(v[batch, start : start + C, value_head, first_v : first_v + block_v], v_tile[stage, :, :], barrier=full[stage])
    if delta:
        T.tma_copy(A_inv[slot, value_head, 0:C, 0:C], A_inv_tile[stage, :, :], barrier=full[stage])
    T.barrier_arrive(full[stage])


@T.macro
def load_output_tiles(q_decayed, P, q_tile, P_tile, full, stage, value_head, slot, C, K):
    T.tma_copy(q_decayed[slot, value_head, 0:C, 0:K], q_tile[stage, :, :], barrier=full[stage])
    T.tma_copy(P[slot, value_head, 0:C, 0:C], P_tile[stage, :, :], barrier=full[stage])
    T.barrier_arrive(full[stage])


@T.macro
def load_end_tile(k_to_end, end_tile, full, stage, value_head, slot, C, K):
    T.tma_copy(k_to_end[slot, value_head, 0:C, 0:K], end_tile[stage, :, :], barrier=full[stage])
    T.barrier_arrive(full[stage])


@T.macro
def max4(values, row):
    return T.max(T.max(values[row, 0], values[row, 1]), T.max(values[row, 2], values[row, 3]))


@T.macro
def store_state_peak(state, peaks, row, tx, K, block_v):
    """max |S| over what each warp of the state role holds."""
    peak = T.alloc_var("float32", init=0.0)
    peak = 0.0
    for d, j in T.Parallel(K, block_v):
        peak = T.max(peak, T.abs(state[d, j]))
    peak = T.warp_reduce_max(peak)
    if tx % 32 == 0:
        peaks[row, tx // 32] = peak


@T.macro
def store_value_peak(v_tile, peaks, tx, stage, slot, rows, C, block_v):
    """max |v| over the chunk's rows, a value for each of two warps; 16 bytes a load."""
    peak = T.alloc_var("float32", init=0.0)
    x = T.alloc_local((8,), v_tile.dtype)
    peak = 0.0
    for step in T.unroll(C * block_v // 512):
        r = step * (512 // block_v) + tx % 64 // (block_v // 8)
        if r < rows:
            for j in T.vectorized(8):
                x[j] = v_tile[stage, r, tx % (block_v // 8) * 8 + j]
            for j in list(range(8)):
                peak = T.max(peak, T.abs(T.cast(x[j], "float32")))
    peak = T.warp_reduce_max(peak)
    if tx % 32 == 0:
        peaks[slot, tx % 64 // 32] = peak
