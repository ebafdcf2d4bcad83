"""deltalog_decode: a few tokens per request from a base and a log, in one launch; for one token see `deltalog_step`.

A block has block_v rows of one slot and value head, whose base [V, K] rows it reads once, into registers, before it knows
anything else. Then per token (formulas in `kda_tl.reference.deltalog`):

    weights, a thread per key channel:   k_j w_j of the log's keys, w_base; k w_base, q w_base
    products over K, a warp per entry:   p_j = k_j w_j . k,  s_j = k_j w_j . q;  one more warp: norms, q . k
    sums over K and over the log:        r = (k w_base)^T base + sum_j p_j u_j,   the same with q and s_j
    u = beta (v - r),                    o = scale ((q ..) + (q . k) u),          append (k, u, e^g)

and the base is written only where the log is due: the log and the token at hand fold into it.

What a step costs beside its traffic are round trips to memory, one behind the other: slot, then base, cursor and token, then
log. So nothing may stand before the base's loads, and all copies of the log are in flight at once, whatever its length.

Traffic of a step per slot and value head, KDA, K = V = 128, float32 base: 64 KiB of base, 1.25 KiB per entry, and 64 KiB
more on one step of `merge_every`.

No race. Blocks of one slot share its keys and decays and nothing else: the block of the first rows writes row `count` of
them, others read rows below `count` alone. Each block has its own copies of the cursor. A fold of old entries before new tokens
are appended would break this, so it is a launch of its own (`tokens` = 0).
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.deltalog_replay import (
    PAD,
    ROW_LANES,
    BaseTile,
    decay_log,
    elements,
    fetch_token,
    fetch_value,
    fold_log,
    load_base,
    log_products,
    publish_token,
    publish_value,
    read_base,
    read_log,
    scale_token,
    stage,
    staged,
    store_cursor,
    weigh_log,
)
from kda_tl.kernels.tiles.lanes import groups, lanes, private, sync, wide
from kda_tl.kernels.tiles.target import TileTarget, assume_multiples, run_time_strides
from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.candidates import Block, Candidate, objection, space
from kda_tl.specs.deltalog import CURSOR_ROWS, DeltaLogDecodeSchedule, DeltaLogDecodeSpec


def candidates(spec: DeltaLogDecodeSpec, arch: str) -> list[Candidate]:
    """By rows of the base per block, and blocks in flight; and by the interval between folds, a run-time value, around the
    minimum of the traffic."""
    K, V, D, capacity = spec.head_dim_k, spec.head_dim_v, spec.decay_size, spec.capacity

    def judge(schedule: DeltaLogDecodeSchedule) -> str | None:
        if V % schedule.block_v:
            return f"divisibility: block_v {schedule.block_v} does not divide V = {V}"
        if schedule.merge_every > capacity:
            return f"divisibility: a log has room for {capacity} entries, not for {schedule.merge_every}"
        held = schedule.block_v * K // schedule.threads * (4 if spec.state_dtype == "float32" else 2) // 4
        width = 2 if spec.dtype != "float32" else 4
        shared = (capacity + 1) * (K * width + D * 4 + schedule.block_v * 4) + (5 * K + D + schedule.block_v) * 4 + 256
        shared += 2048 if spec.one_token else 0  # wider padding, and the operand of mma
        strided = 0 if spec.state_v_first else 80  # an address per element
        return objection(Block(schedule.threads, shared, held + 32 + strided, schedule.min_blocks), arch, spare=1)

    if arch_row(arch).is_cpu:
        return space(DeltaLogDecodeSchedule, judge, block_v=(32, 64), merge_every=(4, 8))
    narrow = spec.state_dtype != "float32"
    intervals = (6, 8, 12, 16) if narrow or D == 1 else (6, 8, 10, 12)
    return space(DeltaLogDecodeSchedule, judge, block_v=(16, 32, 64, 128), threads=(128, 256), min_blocks=(1, 2, 3, 4, 5, 6, 7),
                 merge_every=intervals)  # fmt: skip


def program(spec: DeltaLogDecodeSpec, schedule: DeltaLogDecodeSchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments, in order; D is K, or 1 with one decay for all keys:

    q, k [n, T, H, K], v [n, T, HV, V], g [n, T, HV, D], beta [n, T, HV] dtype; g_wide, beta_wide: the same in float32, read
    instead where `wide_gates` is 1; A_log [HV], dt_bias [HV, D], bonus [HV, K] float32;
    base [slots, HV, V, K] state_dtype, in any strides unless state_v_first; base_low [slots * HV, V, K / 8] int32 with a
    bfloat16 base, else any tensor with these last sizes; log_k [slots * HV, capacity, K] dtype; log_u
    [slots * HV, capacity, V] float32; log_d [slots * HV, capacity, D] float32, each entry's own decay e^g; cursor
    [slots * HV, V / 16, 2] int32: entries, and entries at which the next fold is due; state_indices, valid [n] int32;
    o [n, T, HV, V] dtype, out;
    scale, lower_bound: float32; int32: gate_form, beta_form, has_dt_bias, normalize (l2 norm of q and k), wide_gates,
    has_valid (only the first valid[i] tokens of request i count), null_index, tokens, merge_every (tokens from fold to fold),
    may_fold (0 while tokens are drafts), reserve (entries that must be free: else the log is folded first; or 0).

    With `prepared`, those of `kda_tl.kernels.deltalog_append`.
    """
    if spec.prepared:
        from kda_tl.kernels import deltalog_append

        return deltalog_append.program(spec, schedule, arch)
    if spec.one_token:
        from kda_tl.kernels import deltalog_step

        return deltalog_step.program(spec, schedule, arch)
    t = TileTarget(arch)
    K, V, D, dtype, capacity = spec.head_dim_k, spec.head_dim_v, spec.decay_size, spec.dtype, spec.capacity
    block_v, threads, delta, read_first = min(schedule.block_v, V), schedule.threads, spec.delta, spec.read_first
    threads = min(threads, ROW_LANES * block_v)
    tile = BaseTile(t, threads, block_v * ROW_LANES // threads, K, spec.state_dtype, spec.state_v_first)
    per_key = D > 1
    tiles_v, copies = V // block_v, block_v // CURSOR_ROWS
    n, seq_len, H, HV, slots, rows, low_rows = T.dynamic("n, seq_len, H, HV, slots, rows, low_rows")
    q_strides, k_strides, v_strides = (run_time_strides(name, "nth") for name in "qkv")
    g_strides, g_wide_strides = run_time_strides("g", "nthk"), run_time_strides("gw", "nthk")
    beta_strides, beta_wide_strides = run_time_strides("b", "nth"), run_time_strides("bw", "nth")
    o_strides = run_time_strides("o", "nth")
    base_strides = (*run_time_strides("base", "shv"), 1) if spec.state_v_first else run_time_strides("base", "shvk")
    bias_strides, bonus_strides = run_time_strides("bias", "hk"), run_time_strides("bonus", "hk")

    @T.prim_func
    def deltalog_decode(
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
        base: T.StridedTensor((slots, HV, V, K), base_strides, spec.state_dtype),
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
        tokens: T.int32,
        merge_every: T.int32,
        may_fold: T.int32,
        reserve: T.int32,
    ):
        # Barriers stand where they are needed; TileLang would put them into loops that not all warps run equally long.
        T.annotate_pass_configs({"tl.disable_thread_storage_sync": True})
        # No axis of the grid needs a division by a run-time size, and tiles of one head, which share a log, are neighbours.
        with T.Kernel(n * tiles_v, HV, threads=threads) as (block, value_head):
            if not t.is_cpu:
                T.annotate_min_blocks_per_sm(schedule.min_blocks)
            if spec.state_v_first:
                assume_multiples(base_strides, 8)
            assume_multiples(o_strides, 8)
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
            if (slot >= 0) & (slot < slots) & (slot != null_index):
                held = tile.alloc()
                keys = t.shared((capacity, K), dtype)
                weighted = t.shared((capacity + 1, K), "float32")
                entry_decay = t.shared((capacity, 1), "float32")
                writes = t.shared((capacity + 1, block_v + PAD), "float32")
                now = t.shared((2, K), "float32")
                decay = t.shared((D,), "float32")
                bonus_row = t.shared((K,), "float32")
                base_weight = t.shared((K,), "float32")
                scaled = t.shared((2, K), "float32")
                dots = t.shared((capacity, 2), "float32")
                numbers = t.shared((3,), "float32")
                strength = t.shared((1,), "float32")
                values = t.shared((block_v,), "float32")
                k_sums = private(t, threads, (tile.rows,), "float32")
                q_sums = private(t, threads, (tile.rows,), "float32")
                k_total = T.alloc_local((tile.rows,), "float32")
                q_total = T.alloc_local((tile.rows,), "float32")
                u = T.alloc_local((tile.rows,), "float32")
                out = T.alloc_local((tile.rows,), dtype)
                count = T.alloc_var("int32", init=0)
                window = T.alloc_var("int32", init=0)
                last = T.alloc_var("int32", init=0)
                folds = T.alloc_var("int32", init=0)
                folded = T.alloc_var("int32", init=0)
                changes = T.alloc_var("int32", init=0)
                first_copy = T.truncdiv(first_v, CURSOR_ROWS)
                # In 64 bits: what follows from it is an address.
                row = T.alloc_var("int64", init=0)
                row = T.cast(slot, "int64") * HV + value_head

                count = cursor[row, first_copy, 0]
                window = cursor[row, first_copy, 1]
                load_base(tile, held, base, slot, value_head, first_v)
                count = T.max(0, T.min(capacity, count))
                last = tokens
                if has_valid != 0:
                    last = T.max(0, T.min(tokens, valid[request]))
                folds = 0
                if (reserve > 0) & (count > 0) & ((count + reserve > capacity) | (count >= window)):
                    folds = 1
                changes = folds
                folded = 0
                # A fold that a token brings about stands at the head of the next turn, so that the program has only one.
                for token in T.serial(last + 1):
                    if token == 0:
                        stage(t, threads, keys, log_k, row, 0, count, capacity, K, elements(dtype))
                        if per_key:
                            stage(t, threads, weighted, log_d, row, 0, count, capacity, K, 4)
                        else:
                            for thread in lanes(t, threads):
                                if thread < count:
                                    entry_decay[thread, 0] = log_d[row, thread, 0]
                        stage(t, threads, writes, log_u, row, first_v, count, capacity, block_v, 4)
                    if token < last:
                        publish_token(
                            t, threads, narrow, wide_row, now, decay, bonus_row, gate_form, lower_bound, has_dt_bias,
                            wide_gates, K, D, read_first,
                        )  # fmt: skip
                        publish_value(
                            t, threads, narrow_value, wide_strength, values, strength, beta_form, wide_gates, block_v, delta
                        )
                    if token == 0:
                        staged(t)
                    sync(t)
                    if token == 0:
                        # RWKV6 reads before the token's decay; where no token is at hand, no one knows it.
                        weigh_log(
                            t, threads, weighted, keys, entry_decay, base_weight, decay, (last > 0) & (not read_first), count,
                            K, per_key,
                        )  # fmt: skip
                        if folds != 0:
                            sync(t)
                    if folds != 0:
                        fold_log(
                            tile, base, base_low, row, weighted, base_weight, writes, slot, value_head, first_v, count, None, D,
                            False,
                        )  # fmt: skip
                        load_base(tile, held, base, slot, value_head, first_v)
                        count = 0
                        window = merge_every
                        folds = 0
                        folded = 1
                        sync(t)
                    if token < last:
                        if folded != 0:
                            for step in list(range(-(-K // threads))):
                                for thread in lanes(t, threads):
                                    if step * threads + thread < K:
                                        base_weight[step * threads + thread] = 1.0
                            folded = 0
                        if not read_first:
                            if token > 0:
                                decay_log(t, threads, weighted, base_weight, decay, count, K, per_key)
                        scale_token(t, threads, scaled, now, base_weight, K)
                        sync(t)
                        log_products(
                            t, threads, weighted, now, dots, numbers, bonus_row, count, K, delta, read_first, scale, normalize
                        )  # fmt: skip
                        read_base(tile, held, scaled, k_sums, q_sums, delta)
                        sync(t)
                        if ((may_fold != 0) & (count + 1 >= window)) | (count >= capacity):
                            folds = 1
                        for group in groups(t, threads, ROW_LANES):
                            read_log(tile, dots, writes, count, group, k_sums, q_sums, k_total, q_total, delta)
                            first_row = group * tile.rows
                            for first in list(range(0, tile.rows, 4)):
                                for e in wide(t, min(4, tile.rows)):
                                    u[first + e] = values[first_row + first + e]
                            for r in T.unroll(tile.rows):
                                if delta:
                                    u[r] = strength[0] * (u[r] - k_total[r] * numbers[0])
                                out[r] = numbers[1] * (q_total[r] + numbers[2] * u[r])
                                # The raw key goes into the log: its norm travels with the write.
                                u[r] = u[r] * numbers[0]
                            # A lane per row: neighbours in memory are stored by neighbours.
                            for lane in lanes(t, ROW_LANES):
                                if lane < tile.rows:
                                    result = T.alloc_var(dtype, init=0)
                                    write = T.alloc_var("float32", init=0.0)
                                    result = out[0]
                                    write = u[0]
                                    for r in list(range(1, tile.rows)):
                                        if lane == r:
                                            result = out[r]
                                            write = u[r]
                                    o[request, token, value_head, first_v + first_row + lane] = result
                                    writes[count, first_row + lane] = write
                                    if folds == 0:
                                        log_u[row, count, first_v + first_row + lane] = write
                        if read_first:
                            if (folds != 0) | (token + 1 < last):
                                decay_log(t, threads, weighted, base_weight, decay, count, K, per_key)
                        for step in list(range(-(-K // threads))):
                            for thread in lanes(t, threads):
                                c = step * threads + thread
                                if c < K:
                                    weighted[count, c] = now[0, c]
                                    if (folds == 0) & (first_v == 0):
                                        log_k[row, count, c] = now[0, c]
                                if c < D:
                                    if (folds == 0) & (first_v == 0):
                                        log_d[row, count, c] = decay[c]
                        count = count + 1
                        changes = 1
                        if token + 1 < last:
                            fetch_token(
                                t, threads, narrow, wide_row, q, k, g, g_wide, A_log, dt_bias, bonus, request, token + 1, head,
                                value_head, gate_form, has_dt_bias, wide_gates, K, D, read_first,
                            )  # fmt: skip
                            fetch_value(
                                t, threads, narrow_value, wide_strength, v, beta, beta_wide, request, token + 1, value_head,
                                first_v, wide_gates, block_v, delta,
                            )  # fmt: skip
                        if (folds != 0) | (token + 1 < last):
                            sync(t)
                if changes != 0:
                    store_cursor(t, threads, cursor, row, first_copy, copies, count, window)
                for idle in T.serial(tokens - last):
                    for x in lanes(t, threads):
                        if x < block_v:
                            o[request, last + idle, value_head, first_v + x] = 0.0
            else:
                for token in T.serial(tokens):
                    for x in lanes(t, threads):
                        if x < block_v:
                            o[request, token, value_head, first_v + x] = 0.0

    return deltalog_decode
