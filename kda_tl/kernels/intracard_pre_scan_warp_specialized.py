"""intracard_pre_scan for sm_90 with a role for every warpgroup; the same spec, arguments and results as its portable variant.

    warpgroup  role     per chunk
    0          state    X = Diag(chunk_decay) X + k_to_end^T u, in registers; stores X as an operand
    1          value    residual = v - k_decayed X;  u = A_inv residual
    2          load     its first warp issues the TMA loads of the chunks ahead; two others look at their v

What chunk_scan_warp_specialized does, without its outputs; how float16 operands are kept in range is told there. Columns of M
have no v: nothing is loaded for them, and its peak is 0.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda_tl.kernels.chunk_scan_warp_specialized import HIGHEST_PEAK, load_end_tile, max4, store_state_peak, store_value_peak
from kda_tl.kernels.tiles.chunks import locate_segment
from kda_tl.kernels.tiles.scaling import inverse_power_of_two, range_scale
from kda_tl.kernels.tiles.target import run_time_strides
from kda_tl.specs.intracard import IntracardPreScanSchedule, IntracardPreScanSpec

THREADS = 384
LAUNCH_REGISTERS = 168  # per thread, before the roles take and give


def program(spec: IntracardPreScanSpec, schedule: IntracardPreScanSchedule, arch: str) -> Any:
    """The PrimFunc; arguments as in `kda_tl.kernels.intracard_pre_scan.program`."""
    C, K, V, dtype, operand_dtype = (
        spec.chunk_size, spec.head_dim_k, spec.head_dim_v, spec.dtype, spec.operand_dtype,
    )  # fmt: skip
    delta, columns, stages = spec.delta, schedule.block, schedule.stages
    tiles_k = K // columns if delta else 0
    tiles = tiles_k + V // columns
    B, seq_len, HV, slots, num_offsets, cut_seqs, cuts, a, b = T.dynamic(
        "B, seq_len, HV, slots, num_offsets, cut_seqs, cuts, a, b"
    )
    delta_slots, delta_heads = (slots, HV) if delta else (a, b)
    v_strides = run_time_strides("v", "bth")

    @T.prim_func
    def intracard_pre_scan(
        v: T.StridedTensor((B, seq_len, HV, V), (*v_strides, 1), dtype),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        k_decayed: T.Tensor((delta_slots, delta_heads, C, K), operand_dtype),
        k_to_end: T.Tensor((slots, HV, C, K), operand_dtype),
        chunk_decay: T.Tensor((slots, HV, K), "float32"),
        A_inv: T.Tensor((delta_slots, delta_heads, C, C), operand_dtype),
        transitions: T.Tensor((cut_seqs, cuts, HV, K if delta else 1, K), "float32"),
        biases: T.Tensor((cut_seqs, cuts, HV, K, V), "float32"),
        num_seqs: T.int32,
        uniform: T.int32,
        segments: T.int32,
        segment_chunks: T.int32,
        every: T.int32,
    ):
        # As in chunk_scan: the roles synchronize by hand.
        T.annotate_pass_configs({"tl.disable_thread_storage_sync": True})
        with T.Kernel(num_seqs * segments * HV * tiles, threads=THREADS) as block:
            where = T.alloc_local((10,), "int32")
            locate_segment(block, tiles, HV, segments, segment_chunks, uniform, seq_len, num_seqs, cu_seqlens, C, 0, cu_seqlens,
                           -1, 0, where)  # fmt: skip
            value_head, sequence, segment, batch = where[1], where[2], where[3], where[4]
            first, length, first_slot, ends = where[5], where[6], where[7], where[8]
            num_chunks = T.truncdiv(length + (C - 1), C)
            of_bias = T.if_then_else(where[0] >= tiles_k, 1, 0)
            first_column = (where[0] - of_bias * tiles_k) * columns

            k_tile = T.alloc_shared((stages, C, K), operand_dtype)
            end_tile = T.alloc_shared((stages, C, K), operand_dtype)
            v_tile = T.alloc_shared((stages, C, columns), dtype)
            A_inv_tile = T.alloc_shared((stages, C, C), operand_dtype)
            state_operand = T.alloc_shared((K, columns), operand_dtype)
            u_operand = T.alloc_shared((C, columns), operand_dtype)  # the residual, then u in its place
            decay_tile = T.alloc_shared((2, K), "float32", scope="shared")
            peaks = T.alloc_shared((4, 4), "float32", scope="shared")  # of v (two warps), of X (four): two chunks each
            scales = T.alloc_shared((2,), "float32", scope="shared")

            state = T.alloc_fragment((K, columns), "float32")
            values = T.alloc_fragment((C, columns), "float32")
            residual = T.alloc_fragment((C, columns), "float32")
            u = T.alloc_fragment((C, columns), "float32")

            value_full = T.alloc_barrier([32] * stages)
            value_free = T.alloc_barrier([128] * stages)
            end_full = T.alloc_barrier([32] * stages)
            end_free = T.alloc_barrier([128] * stages)
            seen = T.alloc_barrier([64] * 2)
            seen_free = T.alloc_barrier([128] * 2)
            state_full = T.alloc_barrier(128)
            state_free = T.alloc_barrier(128)
            u_full = T.alloc_barrier(128)
            u_free = T.alloc_barrier(128)

            T.annotate_layout({v_tile: make_swizzled_layout(v_tile)})

            tx = T.get_thread_binding()

            if length > 0 and (ends == 0 or every != 0):
                if tx < 128:
                    T.set_max_nreg(schedule.state_registers, schedule.state_registers > LAUNCH_REGISTERS)
                    current = T.alloc_var("float32", init=1.0)
                    chosen = T.alloc_var("float32", init=1.0)
                    peak = T.alloc_var("float32", init=0.0)
                    new_peak = T.alloc_var("float32", init=0.0)
                    last_peak = T.alloc_var("float32", init=0.0)
                    whole_decay = T.alloc_var("float32", init=1.0)
                    for d, j in T.Parallel(K, columns):
                        state[d, j] = T.if_then_else(of_bias == 0 and d == first_column + j, 1.0, 0.0)
                    store_state_peak(state, peaks, 3, tx, K, columns)
                    T.sync_threads(4, 128)
                    for i in T.serial(num_chunks):
                        T.barrier_wait(seen[i % 2], (i // 2) % 2)
                        new_peak = T.max(peaks[i % 2, 0], peaks[i % 2, 1])
                        peak = T.max(T.max(new_peak, last_peak), max4(peaks, 2 + (i + 1) % 2) * inverse_power_of_two(current))
                        last_peak = new_peak
                        chosen = range_scale(peak, HIGHEST_PEAK)
                        if chosen != current:
                            for d, j in T.Parallel(K, columns):
                                state[d, j] = state[d, j] * inverse_power_of_two(current) * chosen
                            current = chosen
                        T.barrier_wait(state_free, (i + 1) % 2)
                        scales[i % 2] = current
                        T.copy(state, state_operand)
                        T.fence_proxy_async()
                        T.barrier_arrive(state_full)
                        for d, j in T.Parallel(K, columns):
                            state[d, j] = state[d, j] * decay_tile[i % 2, d]
                        if not delta:
                            whole_decay = whole_decay * decay_tile[i % 2, tx % K]
                        T.barrier_arrive(seen_free[i % 2])
                        store_state_peak(state, peaks, 2 + i % 2, tx, K, columns)
                        T.barrier_wait(end_full[i % stages], (i // stages) % 2)
                        T.barrier_wait(u_full, i % 2)
                        T.gemm(end_tile[i % stages, :, :], u_operand, state, transpose_A=True)
                        T.barrier_arrive(u_free)
                        T.barrier_arrive(end_free[i % stages])
                        T.sync_threads(4, 128)
                    if of_bias != 0:
                        for d, j in T.Parallel(K, columns):
                            biases[sequence, segment, value_head, d, first_column + j] = state[d, j] * inverse_power_of_two(
                                current
                            )
                    if delta:
                        if of_bias == 0:
                            for d, j in T.Parallel(K, columns):
                                transitions[sequence, segment, value_head, first_column + j, d] = state[
                                    d, j
                                ] * inverse_power_of_two(current)
                    elif first_column == 0:
                        if tx < K:
                            transitions[sequence, segment, value_head, 0, tx] = whole_decay
                elif tx < 256:
                    T.set_max_nreg(schedule.value_registers, schedule.value_registers > LAUNCH_REGISTERS)
                    for i in T.serial(num_chunks):
                        rows = T.min(C, length - i * C) * of_bias
                        T.barrier_wait(value_full[i % stages], (i // stages) % 2)
                        for r, j in T.Parallel(C, columns):
                            values[r, j] = T.if_then_else(r < rows, v_tile[i % stages, r, j], 0.0)
                        T.barrier_wait(state_full, i % 2)
                        if delta:
                            T.gemm(k_tile[i % stages, :, :], state_operand, residual, clear_accum=True)
                        else:
                            T.clear(residual)
                        T.barrier_arrive(state_free)
                        T.barrier_wait(u_free, (i + 1) % 2)
                        for r, j in T.Parallel(C, columns):
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
                else:
                    T.set_max_nreg(schedule.load_registers, 0)
                    decays = T.alloc_local((2,), "float32")
                    if tx < 288:
                        for ahead in list(range(stages)):
                            if ahead < num_chunks:
                                load_value_tiles(k_decayed, v, A_inv, k_tile, v_tile, A_inv_tile, value_full, ahead, batch,
                                                 first + ahead * C, value_head, first_column, columns, first_slot + ahead, C, K,
                                                 delta, of_bias)  # fmt: skip
                                load_end_tile(k_to_end, end_tile, end_full, ahead, value_head, first_slot + ahead, C, K)
                        for i in T.serial(T.max(num_chunks - stages, 0)):
                            stage, phase, following = i % stages, (i // stages) % 2, i + stages
                            T.barrier_wait(value_free[stage], phase)
                            load_value_tiles(k_decayed, v, A_inv, k_tile, v_tile, A_inv_tile, value_full, stage, batch,
                                             first + following * C, value_head, first_column, columns, first_slot + following,
                                             C, K, delta, of_bias)  # fmt: skip
                            T.barrier_wait(end_free[stage], phase)
                            load_end_tile(k_to_end, end_tile, end_full, stage, value_head, first_slot + following, C, K)
                    elif tx < 352:
                        for i in T.serial(num_chunks):
                            # The state role has taken over what was seen two chunks ago.
                            T.barrier_wait(seen_free[i % 2], (i // 2 + 1) % 2)
                            for d in T.vectorized(2):
                                decays[d] = chunk_decay[first_slot + i, value_head, tx % 64 * 2 % K + d]
                            T.barrier_wait(value_full[i % stages], (i // stages) % 2)
                            store_value_peak(v_tile, peaks, tx, i % stages, i % 2, T.min(C, length - i * C) * of_bias, C,
                                             columns)  # fmt: skip
                            for d in T.vectorized(2):
                                decay_tile[i % 2, tx % 64 * 2 % K + d] = decays[d]
                            T.barrier_arrive(seen[i % 2])

    return intracard_pre_scan


@T.macro
def load_value_tiles(k_decayed, v, A_inv, k_tile, v_tile, A_inv_tile, full, stage, batch, start, value_head, first_column,
                     columns, slot, C, K, delta, of_bias):  # fmt: skip
    if delta:
        T.tma_copy(k_decayed[slot, value_head, 0:C, 0:K], k_tile[stage, :, :], barrier=full[stage])
        T.tma_copy(A_inv[slot, value_head, 0:C, 0:C], A_inv_tile[stage, :, :], barrier=full[stage])
    if of_bias != 0:
        T.tma_copy(
            v[batch, start : start + C, value_head, first_column : first_column + columns],
            v_tile[stage, :, :],
            barrier=full[stage],
        )
    T.barrier_arrive(full[stage])
