"""AppendDecode: the second launch behind `deltalog_prep`, one block per slot, value head and V tile; see `deltalog_decode`.

Only the base, the writes of the log and the prepared sums are read; keys and decays of the log only where it is folded.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.deltalog_replay import (
    PAD,
    ROW_LANES,
    BaseTile,
    elements,
    fold_log,
    load_base,
    read_base,
    read_log,
    stage,
    staged,
    store_cursor,
    weigh_log,
)
from kda_tl.kernels.tiles.lanes import groups, lanes, own, private, sync, wide
from kda_tl.kernels.tiles.target import TileTarget, assume_multiples, run_time_strides
from kda_tl.specs.deltalog import CURSOR_ROWS, DeltaLogDecodeSchedule, DeltaLogDecodeSpec


def program(spec: DeltaLogDecodeSpec, schedule: DeltaLogDecodeSchedule, arch: str) -> Any:
    """The PrimFunc, for one token per request. Positional arguments, in order:

    v [n, 1, HV, V] dtype; prepared, as deltalog_prep wrote it; base, base_low, log_k, log_u, log_d, cursor, state_indices,
    valid as for `deltalog_decode.program`; o [n, 1, HV, V] dtype, out; scale: float32; int32: has_valid, null_index,
    merge_every.
    """
    t = TileTarget(arch)
    K, V, D, dtype, capacity = spec.head_dim_k, spec.head_dim_v, spec.decay_size, spec.dtype, spec.capacity
    block_v, delta, read_first = min(schedule.block_v, V), spec.delta, spec.read_first
    threads = min(schedule.threads, ROW_LANES * block_v)
    tile = BaseTile(t, threads, block_v * ROW_LANES // threads, K, spec.state_dtype)
    tiles_v, copies = V // block_v, block_v // CURSOR_ROWS
    per_key = D > 1
    sums_at = 4 * K
    numbers_at = sums_at + 2 * (capacity + 1)
    n, seq_len, HV, slots, rows, low_rows = T.dynamic("n, seq_len, HV, slots, rows, low_rows")
    v_strides, o_strides = run_time_strides("v", "nth"), run_time_strides("o", "nth")
    base_strides = run_time_strides("base", "shv")

    @T.prim_func
    def deltalog_decode_append(
        v: T.StridedTensor((n, seq_len, HV, V), (*v_strides, 1), dtype),
        prepared: T.Tensor((n, HV, numbers_at + 4), "float32"),
        base: T.StridedTensor((slots, HV, V, K), (*base_strides, 1), spec.state_dtype),
        base_low: T.Tensor((low_rows, V, K // 8), "int32"),
        log_k: T.Tensor((rows, capacity, K), dtype),
        log_u: T.Tensor((rows, capacity, V), "float32"),
        log_d: T.Tensor((rows, capacity, D), "float32"),
        cursor: T.Tensor((rows, V // CURSOR_ROWS, 2), "int32"),
        state_indices: T.Tensor((n,), "int32"),
        valid: T.Tensor((n,), "int32"),
        o: T.StridedTensor((n, seq_len, HV, V), (*o_strides, 1), dtype),
        scale: T.float32,
        has_valid: T.int32,
        null_index: T.int32,
        merge_every: T.int32,
    ):
        T.annotate_pass_configs({"tl.disable_thread_storage_sync": True})  # as in deltalog_decode
        with T.Kernel(n * tiles_v, HV, threads=threads) as (block, value_head):
            if not t.is_cpu:
                T.annotate_min_blocks_per_sm(schedule.min_blocks)
            assume_multiples(base_strides, 8)
            where = T.alloc_local((3,), "int32")
            where[0] = T.truncdiv(block, tiles_v)
            where[1] = (block - where[0] * tiles_v) * block_v
            where[2] = state_indices[where[0]]
            request, first_v, slot = where[0], where[1], where[2]
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
                keys = t.shared((capacity, K), dtype)
                weighted = t.shared((capacity, K), "float32")
                entry_decay = t.shared((capacity, 1), "float32")
                writes = t.shared((capacity, block_v + PAD), "float32")
                base_weight = t.shared((K,), "float32")
                scaled = t.shared((2, K), "float32")
                now = t.shared((2, K), "float32")
                decay = t.shared((D,), "float32")
                dots = t.shared((capacity, 2), "float32")
                numbers = t.shared((4,), "float32")
                values = t.shared((block_v,), "float32")
                k_sums = private(t, threads, (tile.rows,), "float32")
                q_sums = private(t, threads, (tile.rows,), "float32")
                k_total = T.alloc_local((tile.rows,), "float32")
                q_total = T.alloc_local((tile.rows,), "float32")
                u = private(t, threads // ROW_LANES, (tile.rows,), "float32")
                out = T.alloc_local((tile.rows,), dtype)
                count = T.alloc_var("int32", init=0)
                folds = T.alloc_var("int32", init=0)
                window = T.alloc_var("int32", init=0)
                first_copy = T.truncdiv(first_v, CURSOR_ROWS)
                row = T.alloc_var("int64", init=0)
                row = T.cast(slot, "int64") * HV + value_head

                for thread in lanes(t, threads):
                    count = cursor[row, first_copy + thread % copies, 0]
                    window = cursor[row, first_copy + thread % copies, 1]
                load_base(tile, held, base, slot, value_head, first_v)
                count = T.max(0, T.min(capacity, count))
                stage(t, threads, writes, log_u, row, first_v, count, capacity, block_v, 4)
                folds = 0
                if (count + 1 >= window) | (count >= capacity):
                    folds = 1
                    stage(t, threads, keys, log_k, row, 0, count, capacity, K, elements(dtype))
                    if per_key:
                        stage(t, threads, weighted, log_d, row, 0, count, capacity, K, 4)
                    else:
                        for thread in lanes(t, threads):
                            if thread < count:
                                entry_decay[thread, 0] = log_d[row, thread, 0]
                for step in list(range(-(-K // threads))):
                    for thread in lanes(t, threads):
                        c = step * threads + thread
                        if c < K:
                            scaled[0, c] = prepared[request, value_head, c]
                            scaled[1, c] = prepared[request, value_head, K + c]
                            if folds != 0:
                                now[0, c] = prepared[request, value_head, 2 * K + c]
                        if c < D:
                            if folds != 0:
                                decay[c] = prepared[request, value_head, 3 * K + c]
                for thread in lanes(t, threads):
                    if thread < block_v:
                        values[thread] = v[request, 0, value_head, first_v + thread]
                    if thread < 4:
                        numbers[thread] = prepared[request, value_head, numbers_at + thread]
                    if thread < count:
                        dots[thread, 0] = prepared[request, value_head, sums_at + thread]
                        dots[thread, 1] = prepared[request, value_head, sums_at + capacity + 1 + thread]
                staged(t)
                sync(t)
                read_base(tile, held, scaled, k_sums, q_sums, delta)
                for group in groups(t, threads, ROW_LANES):
                    read_log(tile, dots, writes, count, group, k_sums, q_sums, k_total, q_total, delta)
                    mine = own(t, group)
                    first_row = group * tile.rows
                    for first in list(range(0, tile.rows, 4)):
                        for e in wide(t, min(4, tile.rows)):
                            u[mine, first + e] = values[first_row + first + e]
                    for r in T.unroll(tile.rows):
                        if delta:
                            u[mine, r] = numbers[3] * (u[mine, r] - k_total[r] * numbers[0])
                        out[r] = scale * numbers[1] * (q_total[r] + numbers[2] * u[mine, r])
                        u[mine, r] = u[mine, r] * numbers[0]
                    for lane in lanes(t, ROW_LANES):
                        if lane < tile.rows:
                            result = T.alloc_var(dtype, init=0)
                            write = T.alloc_var("float32", init=0.0)
                            result = out[0]
                            write = u[mine, 0]
                            for r in list(range(1, tile.rows)):
                                if lane == r:
                                    result = out[r]
                                    write = u[mine, r]
                            o[request, 0, value_head, first_v + first_row + lane] = result
                            if folds == 0:
                                log_u[row, count, first_v + first_row + lane] = write
                if folds != 0:
                    weigh_log(t, threads, weighted, keys, entry_decay, base_weight, decay, not read_first, count, K, per_key)
                    sync(t)
                    fold_log(
                        tile, base, base_low, row, weighted, base_weight, writes, slot, value_head, first_v, count,
                        (u, now, decay), D, read_first,
                    )  # fmt: skip
                    count = -1
                    window = merge_every
                store_cursor(t, threads, cursor, row, first_copy, copies, count + 1, window)
            else:
                for x in lanes(t, threads):
                    if x < block_v:
                        o[request, 0, value_head, first_v + x] = 0.0

    return deltalog_decode_append
