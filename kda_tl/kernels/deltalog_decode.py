"""deltalog_decode: one or a few tokens per request from a base and a log, in one launch.

A block has block_v rows of one slot and value head, whose base [V, K] rows it reads once, into registers, before it knows
anything else. Then per token (formulas in `kda_tl.reference.deltalog`):

    products over K, a warp per entry:   k w_base, q w_base;  p_j = k_j w_j . k,  s_j = k_j w_j . q;  norms;  q . k
    sums over K and over the log:        r = (k w_base)^T base + sum_j p_j u_j,   the same with q and s_j
    u = beta (v - r),                    o = scale ((q ..) + (q . k) u),          append (k, u, e^g)

and the base is written only where the log is due: the log and the token at hand fold into it, still in registers.

Traffic of a step per slot and value head, KDA, K = V = 128, float32 base: 64 KiB of base, 1.25 KiB per entry, and 64 KiB
more on one step of `merge_every`.

No race. Blocks of one slot share its keys and decays and nothing else: the block of the first rows writes row `count` of
them, others read rows below `count` alone. Each block has its own copies of the cursor. A fold of old entries before new tokens
are appended would break this, so it is a launch of its own (`tokens` = 0).
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.gates import inverse_norm, write_strength
from kda_tl.kernels.tiles.lanes import groups, lanes, sync
from kda_tl.kernels.tiles.replay import (
    ROW_LANES,
    BaseTile,
    fold_log,
    load_base,
    read_row_sums,
    replay_products,
    stage_log,
    stage_token,
    stage_writes,
    store_cursor,
)
from kda_tl.kernels.tiles.target import TileTarget, assume_multiples, run_time_strides
from kda_tl.specs.deltalog import CURSOR_ROWS, DeltaLogDecodeSchedule, DeltaLogDecodeSpec


def program(spec: DeltaLogDecodeSpec, schedule: DeltaLogDecodeSchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments, in order; D is K, or 1 with one decay for all keys:

    q, k [n, T, H, K], v [n, T, HV, V], g [n, T, HV, D], beta [n, T, HV] dtype; g_wide, beta_wide: the same in float32, read
    instead where `wide_gates` is 1; A_log [HV], dt_bias [HV, D], bonus [HV, K] float32;
    base [slots, HV, V, K] state_dtype, in any strides unless state_v_first; log_k [slots, HV, capacity, K] dtype; log_u
    [slots, HV, capacity, V] float32; log_d [slots, HV, capacity, D] float32, each entry's own decay e^g; cursor
    [slots, HV, V / 16, 2] int32: entries, and entries at which the next fold is due; state_indices, valid [n] int32;
    o [n, T, HV, V] dtype, out;
    scale, lower_bound: float32; int32: gate_form, beta_form, has_dt_bias, normalize (l2 norm of q and k), wide_gates,
    has_valid (only the first valid[i] tokens of request i count), null_index, tokens, merge_every (tokens from fold to fold),
    may_fold (0 while tokens are drafts), reserve (entries that must be free: else the log is folded first; or 0).

    With `prepared`, those of `kda_tl.kernels.deltalog_append`.
    """
    if spec.prepared:
        from kda_tl.kernels import deltalog_append

        return deltalog_append.program(spec, schedule, arch)
    t = TileTarget(arch)
    K, V, D, dtype, capacity = spec.head_dim_k, spec.head_dim_v, spec.decay_size, spec.dtype, spec.capacity
    block_v, threads, delta, read_first = min(schedule.block_v, V), schedule.threads, spec.delta, spec.read_first
    threads = min(threads, ROW_LANES * block_v)
    tile = BaseTile(t, threads, block_v * ROW_LANES // threads, K, spec.state_dtype, spec.state_v_first)
    tiles_v, copies = V // block_v, block_v // CURSOR_ROWS
    n, seq_len, H, HV, slots = T.dynamic("n, seq_len, H, HV, slots")
    q_strides, k_strides, v_strides = (run_time_strides(name, "nth") for name in "qkv")
    g_strides, g_wide_strides = run_time_strides("g", "nthk"), run_time_strides("gw", "nthk")
    beta_strides, beta_wide_strides = run_time_strides("b", "nth"), run_time_strides("bw", "nth")
    o_strides = run_time_strides("o", "nth")
    u_strides = run_time_strides("u", "shj")
    base_strides = (*run_time_strides("base", "shv"), 1) if spec.state_v_first else run_time_strides("base", "shvk")
    log_k_strides, d_strides = run_time_strides("lk", "shj"), run_time_strides("d", "shj")
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
        log_k: T.StridedTensor((slots, HV, capacity, K), (*log_k_strides, 1), dtype),
        log_u: T.StridedTensor((slots, HV, capacity, V), (*u_strides, 1), "float32"),
        log_d: T.StridedTensor((slots, HV, capacity, D), (*d_strides, 1), "float32"),
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
        tokens: T.int32,
        merge_every: T.int32,
        may_fold: T.int32,
        reserve: T.int32,
    ):
        # Barriers stand where they are needed; TileLang would put them into loops that not all warps run equally long.
        T.annotate_pass_configs({"tl.disable_thread_storage_sync": True})
        with T.Kernel(n * HV * tiles_v, threads=threads) as block:
            if not t.is_cpu:
                T.annotate_min_blocks_per_sm(schedule.min_blocks)
            if spec.state_v_first:
                assume_multiples(base_strides, 8)
            assume_multiples(u_strides, 8)
            assume_multiples(log_k_strides, 8)
            if D > 1:
                assume_multiples(d_strides, 8)
            where = T.alloc_local((6,), "int32")
            where[0] = T.truncdiv(block, tiles_v)
            where[1] = T.truncdiv(where[0], HV)
            where[2] = where[0] - where[1] * HV
            where[3] = (block - where[0] * tiles_v) * block_v
            where[4] = T.truncdiv(where[2], T.truncdiv(HV, H))
            where[5] = state_indices[where[1]]
            request, value_head, first_v, head, slot = where[1], where[2], where[3], where[4], where[5]
            T.assume(first_v % CURSOR_ROWS == 0)
            if (slot >= 0) & (slot < slots) & (slot != null_index):
                held = tile.alloc()
                keys = t.shared((capacity + 1, K), dtype)
                decays = t.shared((capacity + 1, D), "float32")
                writes = t.shared((capacity + 1, block_v), "float32")
                now = t.shared((2, K), "float32")
                decay = t.shared((D,), "float32")
                bonus_row = t.shared((K,), "float32")
                k_base = t.shared((K,), "float32")
                q_base = t.shared((K,), "float32")
                k_log = t.shared((capacity + 1,), "float32")
                q_log = t.shared((capacity + 1,), "float32")
                sums = t.shared((3,), "float32")
                k_sums = T.alloc_local((tile.rows,), "float32")
                q_sums = T.alloc_local((tile.rows,), "float32")
                values = t.shared((block_v,), "float32")
                count = T.alloc_var("int32", init=0)
                window = T.alloc_var("int32", init=0)
                last = T.alloc_var("int32", init=0)
                folds = T.alloc_var("int32", init=0)
                changes = T.alloc_var("int32", init=0)
                k_norm = T.alloc_var("float32", init=1.0)
                q_norm = T.alloc_var("float32", init=1.0)
                strength = T.alloc_var("float32", init=1.0)
                first_copy = T.truncdiv(first_v, CURSOR_ROWS)

                load_base(tile, held, base, slot, value_head, first_v)
                count = T.max(0, T.min(capacity, cursor[slot, value_head, first_copy, 0]))
                window = cursor[slot, value_head, first_copy, 1]
                last = tokens
                if has_valid != 0:
                    last = T.max(0, T.min(tokens, valid[request]))
                folds = 0
                if (reserve > 0) & (count > 0) & ((count + reserve > capacity) | (count >= window)):
                    folds = 1
                changes = folds
                # A fold that a token brings about stands at the head of the next turn, so that the program has only one.
                for token in T.serial(last + 1):
                    if token < last:
                        stage_token(
                            t, threads, now, decay, bonus_row, q, k, g, g_wide, A_log, dt_bias, bonus, request, token, head,
                            value_head, gate_form, lower_bound, has_dt_bias, wide_gates, K, D, read_first,
                        )  # fmt: skip
                        for x in lanes(t, threads):
                            if x < block_v:
                                values[x] = v[request, token, value_head, first_v + x]
                        if delta:
                            if wide_gates != 0:
                                strength = beta_wide[request, token, value_head]
                            else:
                                strength = beta[request, token, value_head]
                            strength = write_strength(beta_form, strength)
                    if token == 0:
                        stage_log(t, threads, keys, decays, log_k, log_d, slot, value_head, count, K, D)
                        stage_writes(t, threads, writes, log_u, slot, value_head, first_v, count, block_v)
                    sync(t)
                    if folds != 0:
                        fold_log(tile, held, base, keys, decays, writes, slot, value_head, first_v, count, D)
                        count = 0
                        window = merge_every
                        folds = 0
                    if token < last:
                        replay_products(
                            t, threads, keys, decays, now, decay, k_base, q_base, k_log, q_log, sums, bonus_row, count, K, D,
                            (delta, read_first),
                        )  # fmt: skip
                        sync(t)
                        k_norm = 1.0
                        q_norm = 1.0
                        if normalize != 0:
                            k_norm = inverse_norm(sums[0])
                            q_norm = inverse_norm(sums[1])
                        if ((may_fold != 0) & (count + 1 >= window)) | (count >= capacity):
                            folds = 1
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
                                            u = strength * (u - k_sums[r] * k_norm)
                                        o[request, token, value_head, first_v + row] = (
                                            scale * q_norm * (q_sums[r] + sums[2] * k_norm * u)
                                        )
                                        # The raw key goes into the log: its norm travels with the write.
                                        writes[count, row] = u * k_norm
                                        if folds == 0:
                                            log_u[slot, value_head, count, first_v + row] = u * k_norm
                        for step in list(range(-(-K // threads))):
                            for thread in lanes(t, threads):
                                c = step * threads + thread
                                if c < K:
                                    keys[count, c] = now[0, c]
                                    if (folds == 0) & (first_v == 0):
                                        log_k[slot, value_head, count, c] = now[0, c]
                                if c < D:
                                    decays[count, c] = decay[c]
                                    if (folds == 0) & (first_v == 0):
                                        log_d[slot, value_head, count, c] = decay[c]
                        count = count + 1
                        changes = 1
                        sync(t)
                if changes != 0:
                    store_cursor(t, threads, cursor, slot, value_head, first_copy, copies, count, window)
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
