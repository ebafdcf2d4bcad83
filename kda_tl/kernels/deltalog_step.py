"""deltalog_step: the decode step proper, one token per request, in one launch and straight through; see `deltalog_decode`.

Nothing is looped over, so no address has to outlive its use, and three barriers are all: log and token are there; weights are
there; sums over the log are there. A fold takes the log as it lies weighted in shared memory and the token from registers,
and reads the base again.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.deltalog_replay import (
    PAD,
    ROW_LANES,
    BaseTile,
    elements,
    fetch_token,
    fetch_value,
    fold_log,
    load_base,
    log_products,
    publish_token,
    read_base,
    read_log,
    scale_token,
    stage,
    staged,
    store_cursor,
    weigh_log,
)
from kda_tl.kernels.tiles.gates import inverse_norm, write_strength
from kda_tl.kernels.tiles.lanes import groups, lanes, own, private, sync, wide
from kda_tl.kernels.tiles.target import TileTarget, assume_multiples, run_time_strides
from kda_tl.specs.deltalog import CURSOR_ROWS, DeltaLogDecodeSchedule, DeltaLogDecodeSpec


def program(spec: DeltaLogDecodeSpec, schedule: DeltaLogDecodeSchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments as for `deltalog_decode.program`, T = 1, without tokens, may_fold and reserve."""
    t = TileTarget(arch)
    K, V, D, dtype, capacity = spec.head_dim_k, spec.head_dim_v, spec.decay_size, spec.dtype, spec.capacity
    block_v, delta, read_first = min(schedule.block_v, V), spec.delta, spec.read_first
    threads = min(schedule.threads, ROW_LANES * block_v)
    tile = BaseTile(t, threads, block_v * ROW_LANES // threads, K, spec.state_dtype)
    per_key = D > 1
    tiles_v, copies = V // block_v, block_v // CURSOR_ROWS
    n, seq_len, H, HV, slots = T.dynamic("n, seq_len, H, HV, slots")
    q_strides, k_strides, v_strides = (run_time_strides(name, "nth") for name in "qkv")
    g_strides, g_wide_strides = run_time_strides("g", "nthk"), run_time_strides("gw", "nthk")
    beta_strides, beta_wide_strides = run_time_strides("b", "nth"), run_time_strides("bw", "nth")
    o_strides = run_time_strides("o", "nth")
    # Rows of one log lie side by side: with their distance known, a thread's accesses are one address and offsets to it.
    u_strides, log_k_strides, d_strides = (run_time_strides(name, "sh") for name in ("u", "lk", "d"))
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
        log_k: T.StridedTensor((slots, HV, capacity, K), (*log_k_strides, K, 1), dtype),
        log_u: T.StridedTensor((slots, HV, capacity, V), (*u_strides, V, 1), "float32"),
        log_d: T.StridedTensor((slots, HV, capacity, D), (*d_strides, D, 1), "float32"),
        cursor: T.Tensor((slots, HV, V // CURSOR_ROWS, 2), "int32"),
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
            assume_multiples((*u_strides, 0), 8)
            assume_multiples(o_strides, 8)
            assume_multiples((*log_k_strides, 0), 8)
            if per_key:
                assume_multiples((*d_strides, 0), 8)
            where = T.alloc_local((4,), "int32")
            where[0] = T.truncdiv(block, tiles_v)
            where[1] = (block - where[0] * tiles_v) * block_v
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
                t, threads, narrow, wide_row, q, k, g, g_wide, A_log, dt_bias, bonus, request, 0, head, value_head, gate_form,
                has_dt_bias, wide_gates, K, D, read_first,
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
                weighted = t.shared((capacity, K), "float32")
                entry_decay = t.shared((capacity, 1), "float32")
                writes = t.shared((capacity, block_v + PAD), "float32")
                now = t.shared((2, K), "float32")
                decay = t.shared((D,), "float32")
                bonus_row = t.shared((K,), "float32")
                base_weight = t.shared((K,), "float32")
                scaled = t.shared((2, K), "float32")
                dots = t.shared((capacity, 2), "float32")
                sums = t.shared((3,), "float32")
                values = t.shared((block_v,), "float32")
                k_sums = private(t, threads, (tile.rows,), "float32")
                q_sums = private(t, threads, (tile.rows,), "float32")
                k_total = T.alloc_local((tile.rows,), "float32")
                q_total = T.alloc_local((tile.rows,), "float32")
                u = private(t, threads // ROW_LANES, (tile.rows,), "float32")
                out = T.alloc_local((tile.rows,), dtype)
                count = T.alloc_var("int32", init=0)
                window = T.alloc_var("int32", init=0)
                folds = T.alloc_var("int32", init=0)
                k_norm = T.alloc_var("float32", init=1.0)
                q_norm = T.alloc_var("float32", init=1.0)
                strength = T.alloc_var("float32", init=1.0)
                first_copy = T.truncdiv(first_v, CURSOR_ROWS)

                count = cursor[slot, value_head, first_copy, 0]
                window = cursor[slot, value_head, first_copy, 1]
                load_base(tile, held, base, slot, value_head, first_v)
                count = T.max(0, T.min(capacity, count))
                stage(t, threads, keys, log_k, slot, value_head, 0, count, capacity, K, elements(dtype))
                if per_key:
                    stage(t, threads, weighted, log_d, slot, value_head, 0, count, capacity, K, 4)
                else:
                    for thread in lanes(t, threads):
                        if thread < count:
                            entry_decay[thread, 0] = log_d[slot, value_head, thread, 0]
                stage(t, threads, writes, log_u, slot, value_head, first_v, count, capacity, block_v, 4)
                publish_token(
                    t, threads, narrow, wide_row, now, decay, bonus_row, gate_form, lower_bound, has_dt_bias, wide_gates, K, D,
                    read_first,
                )  # fmt: skip
                for x in lanes(t, threads):
                    if x < block_v:
                        values[x] = narrow_value[own(t, x), 0]
                    if delta:
                        strength = wide_strength[own(t, x), 0]
                        if wide_gates == 0:
                            strength = narrow_value[own(t, x), 1]
                if delta:
                    strength = write_strength(beta_form, strength)
                folds = 0
                if (count + 1 >= window) | (count >= capacity):
                    folds = 1
                staged(t)
                sync(t)
                weigh_log(t, threads, weighted, keys, entry_decay, base_weight, decay, not read_first, count, K, per_key)
                scale_token(t, threads, scaled, now, base_weight, K)
                sync(t)
                log_products(t, threads, weighted, now, dots, sums, bonus_row, count, K, delta, read_first)
                read_base(tile, held, scaled, k_sums, q_sums, delta)
                sync(t)
                k_norm = 1.0
                q_norm = 1.0
                if normalize != 0:
                    k_norm = inverse_norm(sums[0])
                    q_norm = inverse_norm(sums[1])
                for group in groups(t, threads, ROW_LANES):
                    read_log(tile, dots, writes, count, group, k_sums, q_sums, k_total, q_total, delta)
                    mine = own(t, group)
                    first_row = group * tile.rows
                    for first in list(range(0, tile.rows, 4)):
                        for e in wide(t, min(4, tile.rows)):
                            u[mine, first + e] = values[first_row + first + e]
                    for r in T.unroll(tile.rows):
                        if delta:
                            u[mine, r] = strength * (u[mine, r] - k_total[r] * k_norm)
                        out[r] = scale * q_norm * (q_total[r] + sums[2] * k_norm * u[mine, r])
                        # The raw key goes into the log: its norm travels with the write.
                        u[mine, r] = u[mine, r] * k_norm
                    for lane in lanes(t, ROW_LANES):
                        if lane == 0:
                            for first in list(range(0, tile.rows, 4)):
                                for e in wide(t, min(4, tile.rows)):
                                    o[request, 0, value_head, first_v + first_row + first + e] = out[first + e]
                                if folds == 0:
                                    for e in wide(t, min(4, tile.rows)):
                                        log_u[slot, value_head, count, first_v + first_row + first + e] = u[mine, first + e]
                if folds != 0:
                    fold_log(
                        tile, base, weighted, base_weight, writes, slot, value_head, first_v, count, (u, now, decay), D,
                        read_first,
                    )  # fmt: skip
                    count = -1
                    window = merge_every
                else:
                    if first_v == 0:
                        for step in list(range(-(-K // threads))):
                            for thread in lanes(t, threads):
                                c = step * threads + thread
                                if c < K:
                                    log_k[slot, value_head, count, c] = now[0, c]
                                if c < D:
                                    log_d[slot, value_head, count, c] = decay[c]
                store_cursor(t, threads, cursor, slot, value_head, first_copy, copies, count + 1, window)
            else:
                for x in lanes(t, threads):
                    if x < block_v:
                        o[request, 0, value_head, first_v + x] = 0.0

    return deltalog_decode_step
