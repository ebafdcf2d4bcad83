"""deltalog_step: the decode step proper, one token per request, in one launch and straight through; see `deltalog_decode`.

Nothing is looped over, so no address has to outlive its use, and three barriers are all: log and token are there; weights are
there; sums over the log are there. A fold takes the log as it lies weighted in shared memory, the token as its newest entry,
behind a barrier of its own, and reads the base again.

Why it is so. A step should cost its traffic: all of a block's loads are on their way before anything waits, and what follows
them is short (`deltalog_quads`), in registers few enough for five blocks of a multiprocessor, each with a whole state where the
base is narrow. Milliseconds on one NVIDIA H200, as `tools/bench_deltalog.py` takes them, 512 requests: where eight lanes share
a row and multiply element by element, and loads wait for slot and beta; this one in four and in five blocks; and the floor of
the bytes moved:

    KDA, bfloat16 base, a fold every 8     0.240   0.226   0.217   (0.174)
    GDN, bfloat16, 12                      0.234   0.218   0.205   (0.162)
    RWKV6, bfloat16, 8                     0.220     ?     0.208   (0.174)
    KDA, float16, 6                        0.218   0.207   0.199   (0.166)
    KDA, float32, 8, half a state          0.356     ?     0.352   (0.306)

Two blocks of 256 threads with a whole float32 state: 0.356. With KDA's bfloat16 base and a fold every 4, 8, 12 and 16: 0.260,
0.217, 0.219, 0.224. Prefetching into L2 what a later block reads loses: 0.261 with its base, 0.280 with its log too.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.deltalog_quads import (
    QUAD,
    QuadTile,
    fold_quads,
    load_quads,
    read_by_mma,
    read_entries,
    split_token,
)
from kda_tl.kernels.deltalog_replay import (
    decay_log,
    elements,
    fetch_token,
    fetch_value,
    log_products,
    publish_token,
    publish_value,
    read_base,
    scale_token,
    stage,
    staged,
    store_cursor,
    weigh_log,
)
from kda_tl.kernels.tiles.lanes import groups, lanes, private, sync
from kda_tl.kernels.tiles.target import TileTarget, assume_multiples, run_time_strides
from kda_tl.specs.deltalog import CURSOR_ROWS, DeltaLogDecodeSchedule, DeltaLogDecodeSpec

PAD = 8  # floats after each row of writes, so that 4 lanes that read 4 entries meet no bank twice


def program(spec: DeltaLogDecodeSpec, schedule: DeltaLogDecodeSchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments as for `deltalog_decode.program`, T = 1, without tokens, may_fold and reserve."""
    t = TileTarget(arch)
    K, V, D, dtype, capacity = spec.head_dim_k, spec.head_dim_v, spec.decay_size, spec.dtype, spec.capacity
    block_v, delta, read_first = min(schedule.block_v, V), spec.delta, spec.read_first
    threads = min(schedule.threads, QUAD * block_v)
    tile = QuadTile(t, threads, block_v * QUAD // threads, K, spec.state_dtype)
    per_key = D > 1
    tiles_v, copies = V // block_v, block_v // CURSOR_ROWS
    n, seq_len, H, HV, slots, rows, low_rows = T.dynamic("n, seq_len, H, HV, slots, rows, low_rows")
    q_strides, k_strides, v_strides = (run_time_strides(name, "nth") for name in "qkv")
    g_strides, g_wide_strides = run_time_strides("g", "nthk"), run_time_strides("gw", "nthk")
    beta_strides, beta_wide_strides = run_time_strides("b", "nth"), run_time_strides("bw", "nth")
    o_strides = run_time_strides("o", "nth")
    base_strides = run_time_strides("base", "shv")
    bias_strides, bonus_strides = run_time_strides("bias", "hk"), run_time_strides("bonus", "hk")

    @T.prim_func
    def deltalog_decode_step(
        q: T.StridedTensor((n, seq_len, H, K), (*q_strides, 1), dtype),
        k: T.StridedTensor((n, seq_len, H, K), (*k_strides, 1), dtype),
        v: T.StridedTensor((n, seq_len, HV, V), (*v_strides, 1), dtype),
        g: T.StridedTensor((n, seq_len, HV, D), g_strides, dtype),
        beta: T.StridedTensor((n, seq_len, HV), beta_strides, dtype),
        g_wide: T.StridedTensor((n, seq_len, HV, D), g_wide_strides, "float32"),
        beta_wide: T.StridedTensor((n, seq_len, HV), beta_wide_strides, "float32"),
        A_log: T.Tensor((HV,), "float32"),
        dt_bias: T.StridedTensor((HV, D), bias_strides, "float32"),
        bonus: T.StridedTensor((HV, K), bonus_strides, "float32"),
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
        lower_bound: T.float32,
        gate_form: T.int32,
        beta_form: T.int32,
        has_dt_bias: T.int32,
        normalize: T.int32,
        wide_gates: T.int32,
        has_valid: T.int32,
        null_index: T.int32,
        merge_every: T.int32,
    ):
        T.annotate_pass_configs({"tl.disable_thread_storage_sync": True})  # as in deltalog_decode
        with T.Kernel(n * tiles_v, HV, threads=threads) as (block, value_head):
            if not t.is_cpu:
                T.annotate_min_blocks_per_sm(schedule.min_blocks)
            assume_multiples(base_strides, 8)
            assume_multiples(o_strides, 8)
            where = T.alloc_local((4,), "int32")
            where[0] = T.truncdiv(block, tiles_v)
            if tiles_v > 1:
                # Of a mask nvcc knows that it is not negative: no register for its upper half. tiles_v is a power of two.
                where[1] = T.bitwise_and(block, tiles_v - 1) * block_v
            else:
                where[1] = (block - where[0]) * block_v  # 0; a plain one makes nvcc order the rest otherwise than was timed
            where[2] = T.truncdiv(value_head * H, HV)
            where[3] = state_indices[where[0]]
            request, first_v, head, slot = where[0], where[1], where[2], where[3]
            T.assume(first_v % CURSOR_ROWS == 0)
            narrow = private(t, threads, (-(-K // threads), 3), dtype)
            wide_row = private(t, threads, (-(-K // threads), 4), "float32")
            narrow_value = private(t, threads, (2,), dtype)
            wide_strength = private(t, threads, (1,), "float32")
            # The token's loads are on their way before the slot is known.
            fetch_token(
                t, threads, narrow, wide_row, q, k, g, g_wide, A_log, dt_bias, bonus, request, 0, head, value_head,
                gate_form, has_dt_bias, wide_gates, K, D, read_first,
            )  # fmt: skip
            fetch_value(
                t, threads, narrow_value, wide_strength, v, beta, beta_wide, request, 0, value_head, first_v, wide_gates,
                block_v, delta,
            )  # fmt: skip
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
                weighted = t.shared((capacity + 1, K), "float32")
                entry_decay = t.shared((capacity, 1), "float32")
                writes = t.shared((capacity + 1, block_v + PAD), "float32")
                now = t.shared((2, K), "float32")
                decay = t.shared((D,), "float32")
                bonus_row = t.shared((K,), "float32")
                base_weight = t.shared((K,), "float32")
                scaled = tile.operand()
                dots = t.shared((capacity, 2), "float32")
                numbers = t.shared((3,), "float32")
                strength = t.shared((1,), "float32")
                values = t.shared((block_v,), "float32")
                # Read back at the end, so that no address of what is written there is kept in registers until then.
                place = t.shared((1,), "int32")
                k_sums = private(t, threads, (tile.rows,), "float32")
                q_sums = private(t, threads, (tile.rows,), "float32")
                k_total = T.alloc_local((tile.rows,), "float32")
                q_total = T.alloc_local((tile.rows,), "float32")
                count = T.alloc_var("int32", init=0)
                window = T.alloc_var("int32", init=0)
                folds = T.alloc_var("int32", init=0)
                first_copy = T.truncdiv(first_v, CURSOR_ROWS)
                # In 64 bits: what follows from it is an address.
                row = T.alloc_var("int64", init=0)
                row = T.cast(slot, "int64") * HV + value_head

                # Any of the block's copies. Read by number of the thread, they are not known to be the same to the compiler,
                # which would wait for a number of the whole block before it issues the loads that follow.
                for thread in lanes(t, threads):
                    count = cursor[row, first_copy + thread % copies, 0]
                    window = cursor[row, first_copy + thread % copies, 1]
                    if thread == 0:
                        place[0] = slot
                load_quads(tile, held, base, slot, value_head, first_v)
                count = T.max(0, T.min(capacity, count))
                stage(t, threads, keys, log_k, row, 0, count, capacity, K, elements(dtype))
                if per_key:
                    stage(t, threads, weighted, log_d, row, 0, count, capacity, K, 4)
                else:
                    for thread in lanes(t, threads):
                        if thread < count:
                            entry_decay[thread, 0] = log_d[row, thread, 0]
                stage(t, threads, writes, log_u, row, first_v, count, capacity, block_v, 4)
                publish_token(
                    t, threads, narrow, wide_row, now, decay, bonus_row, gate_form, lower_bound, has_dt_bias, wide_gates, K, D,
                    read_first,
                )  # fmt: skip
                publish_value(t, threads, narrow_value, wide_strength, values, strength, beta_form, wide_gates, block_v, delta)
                folds = 0
                if (count + 1 >= window) | (count >= capacity):
                    folds = 1
                staged(t)
                sync(t)
                weigh_log(t, threads, weighted, keys, entry_decay, base_weight, decay, not read_first, count, K, per_key)
                if tile.by_mma:
                    split_token(tile, scaled, now, base_weight)
                else:
                    scale_token(t, threads, scaled, now, base_weight, K)
                sync(t)
                log_products(
                    t, threads, weighted, now, dots, numbers, bonus_row, count, K, delta, read_first, scale, normalize
                )  # fmt: skip
                if tile.by_mma:
                    read_by_mma(tile, held, scaled, k_sums, q_sums)
                else:
                    read_base(tile, held, scaled, k_sums, q_sums, delta)
                sync(t)
                out_slot = T.alloc_var("int32", init=0)
                out_row = T.alloc_var("int64", init=0)
                out_slot = place[0]
                out_row = T.cast(out_slot, "int64") * HV + value_head
                for quad in groups(t, threads, QUAD):
                    read_entries(tile, dots, writes, count, quad, k_sums, q_sums, k_total, q_total, delta)
                    # A lane per row: neighbours in memory are stored by neighbours.
                    for lane in lanes(t, QUAD):
                        if lane < tile.rows:
                            of_key = T.alloc_var("float32", init=0.0)
                            of_query = T.alloc_var("float32", init=0.0)
                            write = T.alloc_var("float32", init=0.0)
                            of_key = k_total[0]
                            of_query = q_total[0]
                            for r in list(range(1, tile.rows)):
                                if lane == r:
                                    of_key = k_total[r]
                                    of_query = q_total[r]
                            write = values[tile.row(quad, lane)]
                            if delta:
                                write = strength[0] * (write - of_key * numbers[0])
                            o[request, 0, value_head, first_v + tile.row(quad, lane)] = numbers[1] * (
                                of_query + numbers[2] * write
                            )
                            # The raw key goes into the log: its norm travels with the write.
                            write = write * numbers[0]
                            if folds == 0:
                                log_u[out_row, count, first_v + tile.row(quad, lane)] = write
                            else:
                                writes[count, tile.row(quad, lane)] = write
                if folds != 0:
                    if read_first:
                        decay_log(t, threads, weighted, base_weight, decay, count, K, per_key)
                    for step in list(range(-(-K // threads))):
                        for thread in lanes(t, threads):
                            if step * threads + thread < K:
                                weighted[count, step * threads + thread] = now[0, step * threads + thread]
                    sync(t)
                    fold_quads(
                        tile, base, base_low, out_row, weighted, base_weight, writes, out_slot, value_head, first_v, count + 1
                    )
                    count = -1
                    window = merge_every
                else:
                    if first_v == 0:
                        for step in list(range(-(-K // threads))):
                            for thread in lanes(t, threads):
                                c = step * threads + thread
                                if c < K:
                                    log_k[out_row, count, c] = now[0, c]
                                if c < D:
                                    log_d[out_row, count, c] = decay[c]
                store_cursor(t, threads, cursor, out_row, first_copy, copies, count + 1, window)
            else:
                for x in lanes(t, threads):
                    if x < block_v:
                        o[request, 0, value_head, first_v + x] = 0.0

    return deltalog_decode_step
