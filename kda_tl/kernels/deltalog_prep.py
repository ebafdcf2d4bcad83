"""deltalog_prep: ReplayPrep, what all V tiles of a slot and value head share, computed once instead of once per tile.

Gate, decays, norms, k w_base and q w_base, the sums p_j = k_j w_j . k and s_j = k_j w_j . q; and the token's key and decay go
into the log, where there is room, so that `deltalog_append` has only values to add. The cursor stays as it is: that launch
moves it."""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.gates import inverse_norm, write_strength
from kda_tl.kernels.tiles.lanes import lanes, sync
from kda_tl.kernels.tiles.replay import replay_products, stage_log, stage_token
from kda_tl.kernels.tiles.target import TileTarget, assume_multiples, run_time_strides
from kda_tl.specs.deltalog import DeltaLogPrepSchedule, DeltaLogPrepSpec


def program(spec: DeltaLogPrepSpec, schedule: DeltaLogPrepSchedule, arch: str) -> Any:
    """The PrimFunc, for one token per request. Positional arguments, in order; D is K, or 1 with one decay for all keys:

    q, k [n, 1, H, K], g [n, 1, HV, D], beta [n, 1, HV] dtype; g_wide, beta_wide: the same in float32, read where `wide_gates`
    is 1; A_log [HV], dt_bias [HV, D], bonus [HV, K] float32; log_k [slots, HV, capacity, K] dtype; log_d [slots, HV, capacity,
    D] float32; cursor [slots, HV, copies, 2], state_indices, valid [n] int32; prepared [n, HV, 4 K + 2 (capacity + 1) + 4]
    float32, out: rows k w_base, q w_base, k, d; sums p, s; then 1 / |k|, 1 / |q|, q . k, beta;
    lower_bound: float32; int32: gate_form, beta_form, has_dt_bias, normalize, wide_gates, has_valid, null_index.
    """
    t = TileTarget(arch)
    K, D, dtype, capacity, threads = spec.head_dim_k, spec.decay_size, spec.dtype, spec.capacity, schedule.threads
    delta, read_first = spec.delta, spec.read_first
    sums_at = 4 * K
    numbers_at = sums_at + 2 * (capacity + 1)
    n, seq_len, H, HV, slots, copies = T.dynamic("n, seq_len, H, HV, slots, copies")
    q_strides, k_strides = run_time_strides("q", "nth"), run_time_strides("k", "nth")
    g_strides, g_wide_strides = run_time_strides("g", "nthk"), run_time_strides("gw", "nthk")
    beta_strides, beta_wide_strides = run_time_strides("b", "nth"), run_time_strides("bw", "nth")
    log_k_strides, d_strides = run_time_strides("lk", "shj"), run_time_strides("d", "shj")
    bias_strides, bonus_strides = run_time_strides("bias", "hk"), run_time_strides("bonus", "hk")

    @T.prim_func
    def deltalog_prep(
        q: T.StridedTensor((n, seq_len, H, K), (*q_strides, 1), dtype),
        k: T.StridedTensor((n, seq_len, H, K), (*k_strides, 1), dtype),
        g: T.StridedTensor((n, seq_len, HV, D), g_strides, dtype),
        beta: T.StridedTensor((n, seq_len, HV), beta_strides, dtype),
        g_wide: T.StridedTensor((n, seq_len, HV, D), g_wide_strides, "float32"),
        beta_wide: T.StridedTensor((n, seq_len, HV), beta_wide_strides, "float32"),
        A_log: T.Tensor((HV,), "float32"),
        dt_bias: T.StridedTensor((HV, D), bias_strides, "float32"),
        bonus: T.StridedTensor((HV, K), bonus_strides, "float32"),
        log_k: T.StridedTensor((slots, HV, capacity, K), (*log_k_strides, 1), dtype),
        log_d: T.StridedTensor((slots, HV, capacity, D), (*d_strides, 1), "float32"),
        cursor: T.Tensor((slots, HV, copies, 2), "int32"),
        state_indices: T.Tensor((n,), "int32"),
        valid: T.Tensor((n,), "int32"),
        prepared: T.Tensor((n, HV, numbers_at + 4), "float32"),
        lower_bound: T.float32,
        gate_form: T.int32,
        beta_form: T.int32,
        has_dt_bias: T.int32,
        normalize: T.int32,
        wide_gates: T.int32,
        has_valid: T.int32,
        null_index: T.int32,
    ):
        T.annotate_pass_configs({"tl.disable_thread_storage_sync": True})  # as in deltalog_decode
        with T.Kernel(n * HV, threads=threads) as block:
            assume_multiples(log_k_strides, 8)
            if D > 1:
                assume_multiples(d_strides, 8)
            where = T.alloc_local((4,), "int32")
            where[0] = T.truncdiv(block, HV)
            where[1] = block - where[0] * HV
            where[2] = T.truncdiv(where[1], T.truncdiv(HV, H))
            where[3] = state_indices[where[0]]
            request, value_head, head, slot = where[0], where[1], where[2], where[3]
            live = T.alloc_var("int32", init=0)
            live = 0
            if (slot >= 0) & (slot < slots) & (slot != null_index):
                live = 1
                if has_valid != 0:
                    if valid[request] < 1:
                        live = 0
            if live != 0:
                keys = t.shared((capacity + 1, K), dtype)
                decays = t.shared((capacity + 1, D), "float32")
                now = t.shared((2, K), "float32")
                decay = t.shared((D,), "float32")
                bonus_row = t.shared((K,), "float32")
                k_base = t.shared((K,), "float32")
                q_base = t.shared((K,), "float32")
                k_log = t.shared((capacity + 1,), "float32")
                q_log = t.shared((capacity + 1,), "float32")
                sums = t.shared((3,), "float32")
                count = T.alloc_var("int32", init=0)
                strength = T.alloc_var("float32", init=1.0)
                count = T.max(0, T.min(capacity, cursor[slot, value_head, 0, 0]))
                stage_token(
                    t, threads, now, decay, bonus_row, q, k, g, g_wide, A_log, dt_bias, bonus, request, 0, head, value_head,
                    gate_form, lower_bound, has_dt_bias, wide_gates, K, D, read_first,
                )  # fmt: skip
                strength = 1.0
                if delta:
                    if wide_gates != 0:
                        strength = beta_wide[request, 0, value_head]
                    else:
                        strength = beta[request, 0, value_head]
                    strength = write_strength(beta_form, strength)
                stage_log(t, threads, keys, decays, log_k, log_d, slot, value_head, count, K, D)
                sync(t)
                replay_products(
                    t, threads, keys, decays, now, decay, k_base, q_base, k_log, q_log, sums, bonus_row, count, K, D,
                    (delta, read_first),
                )  # fmt: skip
                sync(t)
                for step in list(range(-(-K // threads))):
                    for thread in lanes(t, threads):
                        c = step * threads + thread
                        if c < K:
                            prepared[request, value_head, c] = k_base[c]
                            prepared[request, value_head, K + c] = q_base[c]
                            prepared[request, value_head, 2 * K + c] = now[0, c]
                            prepared[request, value_head, 3 * K + c] = decay[c if D > 1 else 0]
                            if count < capacity:
                                log_k[slot, value_head, count, c] = now[0, c]
                        if c < D:
                            if count < capacity:
                                log_d[slot, value_head, count, c] = decay[c]
                for thread in lanes(t, threads):
                    if thread < count:
                        prepared[request, value_head, sums_at + thread] = k_log[thread]
                        prepared[request, value_head, sums_at + capacity + 1 + thread] = q_log[thread]
                    if thread == 0:
                        prepared[request, value_head, numbers_at + 2] = sums[2]
                        prepared[request, value_head, numbers_at + 3] = strength
                        if normalize != 0:
                            prepared[request, value_head, numbers_at] = inverse_norm(sums[0])
                            prepared[request, value_head, numbers_at + 1] = inverse_norm(sums[1])
                        else:
                            prepared[request, value_head, numbers_at] = 1.0
                            prepared[request, value_head, numbers_at + 1] = 1.0

    return deltalog_prep
