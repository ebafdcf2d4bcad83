"""AppendDecode: the second launch behind `deltalog_prep`, one block per slot, value head and V tile; see `deltalog_decode`.

Only the base, the writes of the log and the prepared sums are read; keys and decays of the log only where it is folded.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.lanes import groups, lanes, sync
from kda_tl.kernels.tiles.replay import (
    ROW_LANES,
    BaseTile,
    fold_log,
    load_base,
    read_row_sums,
    stage_log,
    stage_writes,
    store_cursor,
)
from kda_tl.kernels.tiles.target import TileTarget, assume_multiples, run_time_strides
from kda_tl.specs.deltalog import CURSOR_ROWS, DeltaLogDecodeSchedule, DeltaLogDecodeSpec


def program(spec: DeltaLogDecodeSpec, schedule: DeltaLogDecodeSchedule, arch: str) -> Any:
    """The PrimFunc, for one token per request. Positional arguments, in order:

    v [n, 1, HV, V] dtype; prepared, as deltalog_prep wrote it; base, log_k, log_u, log_d, cursor, state_indices, valid as for
    `deltalog_decode.program`; o [n, 1, HV, V] dtype, out; scale: float32; int32: has_valid, null_index, merge_every.
    """
    t = TileTarget(arch)
    K, V, D, dtype, capacity = spec.head_dim_k, spec.head_dim_v, spec.decay_size, spec.dtype, spec.capacity
    block_v, delta = min(schedule.block_v, V), spec.delta
    threads = min(schedule.threads, ROW_LANES * block_v)
    tile = BaseTile(t, threads, block_v * ROW_LANES // threads, K, spec.state_dtype)
    tiles_v, copies = V // block_v, block_v // CURSOR_ROWS
    sums_at = 4 * K
    numbers_at = sums_at + 2 * (capacity + 1)
    n, seq_len, HV, slots = T.dynamic("n, seq_len, HV, slots")
    v_strides, o_strides = run_time_strides("v", "nth"), run_time_strides("o", "nth")
    base_strides, u_strides = run_time_strides("base", "shv"), run_time_strides("u", "shj")
    log_k_strides, d_strides = run_time_strides("lk", "shj"), run_time_strides("d", "shj")

    @T.prim_func
    def deltalog_decode_append(
        v: T.StridedTensor((n, seq_len, HV, V), (*v_strides, 1), dtype),
        prepared: T.Tensor((n, HV, numbers_at + 4), "float32"),
        base: T.StridedTensor((slots, HV, V, K), (*base_strides, 1), spec.state_dtype),
        log_k: T.StridedTensor((slots, HV, capacity, K), (*log_k_strides, 1), dtype),
        log_u: T.StridedTensor((slots, HV, capacity, V), (*u_strides, 1), "float32"),
        log_d: T.StridedTensor((slots, HV, capacity, D), (*d_strides, 1), "float32"),
        cursor: T.Tensor((slots, HV, V // CURSOR_ROWS, 2), "int32"),
        state_indices: T.Tensor((n,), "int32"),
        valid: T.Tensor((n,), "int32"),
        o: T.StridedTensor((n, seq_len, HV, V), (*o_strides, 1), dtype),
        scale: T.float32,
        has_valid: T.int32,
        null_index: T.int32,
        merge_every: T.int32,
    ):
        T.annotate_pass_configs({"tl.disable_thread_storage_sync": True})  # as in deltalog_decode
        with T.Kernel(n * HV * tiles_v, threads=threads) as block:
            if not t.is_cpu:
                T.annotate_min_blocks_per_sm(schedule.min_blocks)
            assume_multiples(base_strides, 8)
            assume_multiples(u_strides, 8)
            assume_multiples(log_k_strides, 8)
            if D > 1:
                assume_multiples(d_strides, 8)
            where = T.alloc_local((5,), "int32")
            where[0] = T.truncdiv(block, tiles_v)
            where[1] = T.truncdiv(where[0], HV)
            where[2] = where[0] - where[1] * HV
            where[3] = (block - where[0] * tiles_v) * block_v
            where[4] = state_indices[where[1]]
            request, value_head, first_v, slot = where[1], where[2], where[3], where[4]
            T.assume(first_v % CURSOR_ROWS == 0)
            live = T.alloc_var("int32", init=0)
            live = 0
            if (slot >= 0) & (slot < slots) & (slot != null_index):
                live = 1
                if has_valid != 0:
                    if valid[request] < 1:
                        live = 0
            if live != 0:
                held = tile.alloc()
                keys = t.shared((capacity + 1, K), dtype)
                decays = t.shared((capacity + 1, D), "float32")
                writes = t.shared((capacity + 1, block_v), "float32")
                k_base = t.shared((K,), "float32")
                q_base = t.shared((K,), "float32")
                k_log = t.shared((capacity + 1,), "float32")
                q_log = t.shared((capacity + 1,), "float32")
                numbers = t.shared((4,), "float32")
                values = t.shared((block_v,), "float32")
                k_sums = T.alloc_local((tile.rows,), "float32")
                q_sums = T.alloc_local((tile.rows,), "float32")
                count = T.alloc_var("int32", init=0)
                folds = T.alloc_var("int32", init=0)
                window = T.alloc_var("int32", init=0)
                first_copy = T.truncdiv(first_v, CURSOR_ROWS)

                load_base(tile, held, base, slot, value_head, first_v)
                count = T.max(0, T.min(capacity, cursor[slot, value_head, first_copy, 0]))
                window = cursor[slot, value_head, first_copy, 1]
                for step in list(range(-(-K // threads))):
                    for thread in lanes(t, threads):
                        c = step * threads + thread
                        if c < K:
                            k_base[c] = prepared[request, value_head, c]
                            q_base[c] = prepared[request, value_head, K + c]
                for thread in lanes(t, threads):
                    if thread < block_v:
                        values[thread] = v[request, 0, value_head, first_v + thread]
                    if thread < 4:
                        numbers[thread] = prepared[request, value_head, numbers_at + thread]
                    if thread < count:
                        k_log[thread] = prepared[request, value_head, sums_at + thread]
                        q_log[thread] = prepared[request, value_head, sums_at + capacity + 1 + thread]
                stage_writes(t, threads, writes, log_u, slot, value_head, first_v, count, block_v)
                folds = 0
                if (count + 1 >= window) | (count >= capacity):
                    folds = 1
                    stage_log(t, threads, keys, decays, log_k, log_d, slot, value_head, count, K, D)
                    for step in list(range(-(-K // threads))):
                        for thread in lanes(t, threads):
                            c = step * threads + thread
                            if c < K:
                                keys[count, c] = prepared[request, value_head, 2 * K + c]
                            if c < D:
                                decays[count, c] = prepared[request, value_head, 3 * K + c]
                sync(t)
                for group in groups(t, threads, ROW_LANES):
                    read_row_sums(
                        tile, held, k_base, q_base, k_log, q_log, writes, count, group, k_sums, q_sums, delta
                    )  # fmt: skip
                    for r in T.unroll(tile.rows):
                        row = r * tile.groups + group
                        for lane in lanes(t, ROW_LANES):
                            if lane == 0:
                                u = T.alloc_var("float32", init=0.0)
                                u = values[row]
                                if delta:
                                    u = numbers[3] * (u - k_sums[r] * numbers[0])
                                o[request, 0, value_head, first_v + row] = (
                                    scale * numbers[1] * (q_sums[r] + numbers[2] * numbers[0] * u)
                                )
                                writes[count, row] = u * numbers[0]
                                if folds == 0:
                                    log_u[slot, value_head, count, first_v + row] = u * numbers[0]
                count = count + 1
                if folds != 0:
                    sync(t)
                    fold_log(tile, held, base, keys, decays, writes, slot, value_head, first_v, count, D)
                    count = 0
                    window = merge_every
                store_cursor(t, threads, cursor, slot, value_head, first_copy, copies, count, window)
            else:
                for x in lanes(t, threads):
                    if x < block_v:
                        o[request, 0, value_head, first_v + x] = 0.0

    return deltalog_decode_append
