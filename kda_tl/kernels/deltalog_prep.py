"""deltalog_prep: ReplayPrep, what all V tiles of a slot and value head share, computed once instead of once per tile.

Gate, decays, norms, k w_base and q w_base, the sums p_j = k_j w_j . k and s_j = k_j w_j . q; and the token's key and decay go
into the log, where there is room, so that `deltalog_append` has only values to add. The cursor stays as it is: that launch
moves it."""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.deltalog_replay import (
    elements,
    fetch_token,
    log_products,
    publish_token,
    scale_token,
    stage,
    staged,
    weigh_log,
)
from kda_tl.kernels.tiles.gates import write_strength
from kda_tl.kernels.tiles.lanes import lanes, private, sync
from kda_tl.kernels.tiles.target import TileTarget, run_time_strides
from kda_tl.specs.candidates import Block, Candidate, objection, space
from kda_tl.specs.deltalog import DeltaLogPrepSchedule, DeltaLogPrepSpec


def candidates(spec: DeltaLogPrepSpec, arch: str) -> list[Candidate]:
    """By threads of a block: an entry of the log is a warp's job."""
    shared = (spec.capacity + 1) * 4 * (spec.head_dim_k + spec.decay_size) + 24 * spec.head_dim_k

    def judge(schedule: DeltaLogPrepSchedule) -> str | None:
        return objection(Block(schedule.threads, shared, 72), arch)

    return space(DeltaLogPrepSchedule, judge, threads=(64, 128, 256))


def program(spec: DeltaLogPrepSpec, schedule: DeltaLogPrepSchedule, arch: str) -> Any:
    """The PrimFunc, for one token per request. Positional arguments, in order; D is K, or 1 with one decay for all keys:

    q, k [n, 1, H, K], g [n, 1, HV, D], beta [n, 1, HV] dtype; g_wide, beta_wide: the same in float32, read where `wide_gates`
    is 1; A_log [HV], dt_bias [HV, D], bonus [HV, K] float32; log_k [slots * HV, capacity, K] dtype; log_d [slots * HV,
    capacity, D] float32; cursor [slots * HV, copies, 2], state_indices, valid [n] int32; prepared [n, HV,
    4 K + 2 (capacity + 1) + 4] float32, out: rows k w_base, q w_base, k, d; sums p, s; then 1 / |k|, 1 / |q|, q . k / |k|,
    beta; lower_bound: float32; int32: gate_form, beta_form, has_dt_bias, normalize, wide_gates, has_valid, null_index.
    """
    t = TileTarget(arch)
    K, D, dtype, capacity, threads = spec.head_dim_k, spec.decay_size, spec.dtype, spec.capacity, schedule.threads
    delta, read_first, per_key = spec.delta, spec.read_first, D > 1
    sums_at = 4 * K
    numbers_at = sums_at + 2 * (capacity + 1)
    n, seq_len, H, HV, rows, copies = T.dynamic("n, seq_len, H, HV, rows, copies")
    q_strides, k_strides = run_time_strides("q", "nth"), run_time_strides("k", "nth")
    g_strides, g_wide_strides = run_time_strides("g", "nthk"), run_time_strides("gw", "nthk")
    beta_strides, beta_wide_strides = run_time_strides("b", "nth"), run_time_strides("bw", "nth")
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
        log_k: T.Tensor((rows, capacity, K), dtype),
        log_d: T.Tensor((rows, capacity, D), "float32"),
        cursor: T.Tensor((rows, copies, 2), "int32"),
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
        with T.Kernel(n, HV, threads=threads) as (request, value_head):
            where = T.alloc_local((2,), "int32")
            where[0] = T.truncdiv(value_head * H, HV)
            where[1] = state_indices[request]
            head, slot = where[0], where[1]
            narrow = private(t, threads, (-(-K // threads), 3), dtype)
            wide_row = private(t, threads, (-(-K // threads), 4), "float32")
            live = T.alloc_var("int32", init=0)
            live = 0
            if (slot >= 0) & (slot < T.truncdiv(rows, HV)) & (slot != null_index):
                live = 1
                if has_valid != 0:
                    if valid[request] < 1:
                        live = 0
            if live != 0:
                keys = t.shared((capacity, K), dtype)
                weighted = t.shared((capacity, K), "float32")
                entry_decay = t.shared((capacity, 1), "float32")
                now = t.shared((2, K), "float32")
                decay = t.shared((D,), "float32")
                bonus_row = t.shared((K,), "float32")
                base_weight = t.shared((K,), "float32")
                scaled = t.shared((2, K), "float32")
                dots = t.shared((capacity, 2), "float32")
                numbers = t.shared((3,), "float32")
                count = T.alloc_var("int32", init=0)
                strength = T.alloc_var("float32", init=1.0)
                row = T.alloc_var("int64", init=0)
                row = T.cast(slot, "int64") * HV + value_head
                for thread in lanes(t, threads):
                    count = cursor[row, thread % copies, 0]
                fetch_token(
                    t, threads, narrow, wide_row, q, k, g, g_wide, A_log, dt_bias, bonus, request, 0, head, value_head,
                    gate_form, has_dt_bias, wide_gates, K, D, read_first,
                )  # fmt: skip
                count = T.max(0, T.min(capacity, count))
                stage(t, threads, keys, log_k, row, 0, count, capacity, K, elements(dtype))
                if per_key:
                    stage(t, threads, weighted, log_d, row, 0, count, capacity, K, 4)
                else:
                    for thread in lanes(t, threads):
                        if thread < count:
                            entry_decay[thread, 0] = log_d[row, thread, 0]
                publish_token(
                    t, threads, narrow, wide_row, now, decay, bonus_row, gate_form, lower_bound, has_dt_bias, wide_gates, K, D,
                    read_first,
                )  # fmt: skip
                strength = 1.0
                if delta:
                    if wide_gates != 0:
                        strength = beta_wide[request, 0, value_head]
                    else:
                        strength = beta[request, 0, value_head]
                    strength = write_strength(beta_form, strength)
                staged(t)
                sync(t)
                weigh_log(t, threads, weighted, keys, entry_decay, base_weight, decay, not read_first, count, K, per_key)
                scale_token(t, threads, scaled, now, base_weight, K)
                sync(t)
                log_products(
                    t, threads, weighted, now, dots, numbers, bonus_row, count, K, delta, read_first, 1.0, normalize
                )  # fmt: skip
                sync(t)
                for step in list(range(-(-K // threads))):
                    for thread in lanes(t, threads):
                        c = step * threads + thread
                        if c < K:
                            prepared[request, value_head, c] = scaled[0, c]
                            prepared[request, value_head, K + c] = scaled[1, c]
                            prepared[request, value_head, 2 * K + c] = now[0, c]
                            prepared[request, value_head, 3 * K + c] = decay[c if per_key else 0]
                            if count < capacity:
                                log_k[row, count, c] = now[0, c]
                        if c < D:
                            if count < capacity:
                                log_d[row, count, c] = decay[c]
                for thread in lanes(t, threads):
                    if thread < count:
                        prepared[request, value_head, sums_at + thread] = dots[thread, 0]
                        prepared[request, value_head, sums_at + capacity + 1 + thread] = dots[thread, 1]
                    if thread < 3:
                        prepared[request, value_head, numbers_at + thread] = numbers[thread]
                    if thread == 0:
                        prepared[request, value_head, numbers_at + 3] = strength

    return deltalog_prep
