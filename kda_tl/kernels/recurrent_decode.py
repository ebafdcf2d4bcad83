"""recurrent_decode: one or a few tokens per request, with the state read once and written once.

Every rule of the family is one pass over the state S [K, V] with other coefficients. With the decay d = e^g (1 without one):

    u = beta (v - delta S^T (d k))                 delta: 1 with the delta correction, else 0; beta: 1 without one
    o = scale (S^T qd + c u)                       qd = d q, c = q . k;  RWKV6, which reads first: qd = q, c = (q bonus) . k
    S = Diag(d) S + k u^T

A read after the write is S'^T q = (Diag(d) S)^T q + (q . k) u, so both products look at the state as it was read, and one
reduction over K serves both. The norms of q and k only scale sums, and are applied to these.

A block has one request, one value head and `block_v` columns. A thread holds K / lanes_k x values elements of the state in
registers, in float32; its loads are in flight while the gate is worked out, which every thread does for its share of the K
channels. Nothing else goes through shared memory. At 4.3 TB/s the states are the whole of the time: 2 x 4 K V bytes per value
head and token in float32, against 2 (3 K + 2 V) of everything else.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.gates import gate_rate, inverse_norm, log_decay, write_strength
from kda_tl.kernels.tiles.target import TileTarget, assume_multiples, run_time_strides
from kda_tl.kernels.tiles.threads import WARP, block_sums, each_thread, lane_sums, own, registers, unrolled, vectorized
from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.candidates import Block, Candidate, objection, space
from kda_tl.specs.decode import DecodeFlag, RecurrentDecodeSchedule, RecurrentDecodeSpec

TUNED_V = 128  # V is a run-time value; columns of a block past it would idle


def candidates(spec: RecurrentDecodeSpec, arch: str) -> list[Candidate]:
    """By how a state's rows and columns are spread over threads, and how many blocks a multiprocessor keeps in flight."""
    K = spec.head_dim_k

    def judge(schedule: RecurrentDecodeSchedule) -> str | None:
        rows = K // schedule.lanes_k
        if rows % spec.vector:
            return f"divisibility: {rows} rows of a thread are no whole accesses of {spec.vector} {spec.state_dtype}"
        if schedule.block_v > TUNED_V:
            return f"divisibility: a block of {schedule.block_v} columns passes V = {TUNED_V}"
        held = rows * schedule.values
        return objection(Block(schedule.threads, 4 * (3 * K + 16), held + 56, schedule.min_blocks), arch, spare=2)

    if arch_row(arch).is_cpu:
        return space(RecurrentDecodeSchedule, judge, lanes_k=(4, 8, 16), values=(4, 8), min_blocks=(1,))
    return space(RecurrentDecodeSchedule, judge, threads=(128, 256), lanes_k=(4, 8, 16, 32), values=(4, 8),
                 min_blocks=(1, 2, 3, 4, 5, 6, 7, 8))  # fmt: skip


def has(flags, flag):
    """The run-time condition that a DecodeFlag is set."""
    return (flags & int(flag)) != 0


def program(spec: RecurrentDecodeSpec, schedule: RecurrentDecodeSchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments, in order; all strides are free but where contiguity is named:

    q, k [B, T, H, K], v [B, T, HV, V] dtype; g [B, T, HV, K] dtype, g_wide [..] float32: the one that flags name is read;
    beta, beta_wide [B, T, HV] likewise; A_log [HV], dt_bias, bonus [HV, K] float32;
    cu_seqlens [N + 1] int32 (any one-element tensor where UNIFORM); state_indices [N] int32; starts [N] uint8, 0 where the
    state starts from zero; o [B, T, HV, V] dtype, contiguous, out; state_in, state_out [slots, HV, outer, inner] state_dtype,
    (outer, inner) = (V, K) where V_FIRST and (K, V) otherwise, inner contiguous, rows aligned to 16 bytes; may be one tensor;
    N: int32, requests; scale, lower_bound: float32; flags: int32, `DecodeFlag`; gate_form, beta_form: int32; null_index: int32.

    A slot that is null_index, negative or beyond a pool that is indexed is null: its outputs are zero, no state is touched.
    Packed batches run one more request, the tokens past cu_seqlens[N], whose outputs are zero.
    """
    t = TileTarget(arch)
    K, dtype, state_dtype, vector = spec.head_dim_k, spec.dtype, spec.state_dtype, spec.vector
    threads, lanes, values, block_v = schedule.threads, schedule.lanes_k, schedule.values, schedule.block_v
    rows = K // lanes  # of the state, per thread: `vector` neighbours in every `vector * lanes`
    if rows % vector:
        raise ValueError(f"lanes_k must leave a thread a multiple of {vector} of the {K} rows, got {lanes}")
    pieces = rows // vector
    groups = threads // lanes  # of threads that share their columns
    v_vector = min(values, vector)
    channels = -(-K // threads)  # whose gate a thread works out
    warps = threads // WARP
    B, seq_len, H, HV, V, num_offsets = T.dynamic("B, seq_len, H, HV, V, num_offsets")
    # What a call may lack has sizes of its own: any tensor of that rank stands in for it. The op has checked those that it has.
    g_sizes, wide_sizes = T.dynamic("g0, g1, g2, g3"), T.dynamic("gw0, gw1, gw2, gw3")
    beta_sizes, beta_wide_sizes = T.dynamic("beta0, beta1, beta2"), T.dynamic("betaw0, betaw1, betaw2")
    bias_sizes, bonus_sizes = T.dynamic("bias0, bias1"), T.dynamic("bonus0, bonus1")
    A_size, indices_size, starts_size = T.dynamic("A0, indices0, starts0")
    in_slots, in_heads, in_outer, in_inner = T.dynamic("in_slots, in_heads, in_outer, in_inner")
    out_slots, out_heads, out_outer, out_inner = T.dynamic("out_slots, out_heads, out_outer, out_inner")
    in_strides, out_strides = run_time_strides("in", "nho"), run_time_strides("out", "nho")

    def k_of(lane, i):
        """The row of the state that a lane has as its i-th."""
        return (i // vector * lanes + lane) * vector + i % vector

    # What a thread knows of the token at hand. Loads and their uses are apart: a value that is touched is waited for.
    NARROW = {"q": channels, "k": channels, "g": channels, "v": values, "beta": 1}  # of dtype
    WIDE = {"g_wide": channels, "bias": channels, "bonus": channels, "A_log": 1, "beta_wide": 1}  # float32
    offset = {}
    for sizes in (NARROW, WIDE):
        total = 0
        for name, size in sizes.items():
            offset[name], total = total, total + size

    @T.macro
    def fetch(
        token, batch, value_head, head, tile, q, k, v, g, g_wide, beta, beta_wide, A_log, dt_bias, bonus, V, flags, narrow, wide
    ):
        """Issues the loads of one token; nothing here waits for them."""
        for thread in each_thread(t, threads):
            for c in unrolled(t, channels):
                channel = T.min(c * threads + thread, K - 1)
                narrow[own(t, thread, offset["q"] + c)] = q[batch, token, head, channel]
                narrow[own(t, thread, offset["k"] + c)] = k[batch, token, head, channel]
                if has(flags, DecodeFlag.DECAY):
                    if has(flags, DecodeFlag.WIDE_GATE):
                        wide[own(t, thread, offset["g_wide"] + c)] = g_wide[batch, token, value_head, channel]
                    else:
                        narrow[own(t, thread, offset["g"] + c)] = g[batch, token, value_head, channel]
                if has(flags, DecodeFlag.HAS_DT_BIAS):
                    wide[own(t, thread, offset["bias"] + c)] = dt_bias[value_head, channel]
                if has(flags, DecodeFlag.READ_FIRST):
                    wide[own(t, thread, offset["bonus"] + c)] = bonus[value_head, channel]
            first = T.min(tile * groups + thread // lanes, T.truncdiv(V, values) - 1) * values
            for j in unrolled(t, values):
                narrow[own(t, thread, offset["v"] + j)] = v[batch, token, value_head, first + j]
            if has(flags, DecodeFlag.HAS_A_LOG):
                wide[own(t, thread, offset["A_log"])] = A_log[value_head]
            if has(flags, DecodeFlag.HAS_BETA):
                if has(flags, DecodeFlag.WIDE_BETA):
                    wide[own(t, thread, offset["beta_wide"])] = beta_wide[batch, token, value_head]
                else:
                    narrow[own(t, thread, offset["beta"])] = beta[batch, token, value_head]

    @T.macro
    def publish(
        flags, gate_form, beta_form, lower_bound, narrow, wide, v_raw, strength, sums, decays, keys, queries, warp_sums
    ):
        """Works out decay, write strength and sums of the token that was fetched, and shares them with the block."""
        for thread in each_thread(t, threads):
            decay = T.alloc_var("float32", init=1.0)
            rate = T.alloc_var("float32", init=1.0)
            x = T.alloc_var("float32", init=0.0)
            rate = 1.0
            if has(flags, DecodeFlag.HAS_A_LOG):
                rate = gate_rate(wide[own(t, thread, offset["A_log"])])
            for m in unrolled(t, 3):
                sums[own(t, thread, m)] = 0.0
            for c in unrolled(t, channels):
                channel = c * threads + thread
                if channel < K:
                    query = T.cast(narrow[own(t, thread, offset["q"] + c)], "float32")
                    key = T.cast(narrow[own(t, thread, offset["k"] + c)], "float32")
                    decay = 1.0
                    if has(flags, DecodeFlag.DECAY):
                        if has(flags, DecodeFlag.WIDE_GATE):
                            x = wide[own(t, thread, offset["g_wide"] + c)]
                        else:
                            x = narrow[own(t, thread, offset["g"] + c)]
                        if has(flags, DecodeFlag.HAS_DT_BIAS):
                            x = x + wide[own(t, thread, offset["bias"] + c)]
                        decay = T.exp(log_decay(gate_form, x, rate, lower_bound))
                    decays[channel] = decay
                    keys[channel] = key
                    sums[own(t, thread, 0)] = sums[own(t, thread, 0)] + query * query
                    sums[own(t, thread, 1)] = sums[own(t, thread, 1)] + key * key
                    if has(flags, DecodeFlag.READ_FIRST):
                        queries[channel] = query
                        sums[own(t, thread, 2)] = (
                            sums[own(t, thread, 2)] + query * key * wide[own(t, thread, offset["bonus"] + c)]
                        )
                    else:
                        queries[channel] = query * decay
                        sums[own(t, thread, 2)] = sums[own(t, thread, 2)] + query * key
            for j in unrolled(t, values):
                v_raw[own(t, thread, j)] = narrow[own(t, thread, offset["v"] + j)]
            x = 1.0
            if has(flags, DecodeFlag.HAS_BETA):
                if has(flags, DecodeFlag.WIDE_BETA):
                    x = wide[own(t, thread, offset["beta_wide"])]
                else:
                    x = narrow[own(t, thread, offset["beta"])]
            strength[own(t, thread, 0)] = write_strength(beta_form, x)
        block_sums(t, sums, warp_sums, 3, threads)

    @T.macro
    def load(state_in, slot, value_head, tile, V, flags, raw):
        """Issues the loads of the state. Columns past V read the last ones instead, so that there is no branch."""
        for thread in each_thread(t, threads):
            lane = thread % lanes
            first = T.min(tile * groups + thread // lanes, T.truncdiv(V, values) - 1) * values
            if has(flags, DecodeFlag.V_FIRST_IN):
                for j in unrolled(t, values):
                    for p in unrolled(t, pieces):
                        for e in vectorized(t, vector):
                            raw[own(t, thread, (j * pieces + p) * vector + e)] = state_in[
                                slot, value_head, first + j, (p * lanes + lane) * vector + e
                            ]
            else:
                for i in unrolled(t, rows):
                    for w in unrolled(t, values // v_vector):
                        for e in vectorized(t, v_vector):
                            raw[own(t, thread, i * values + w * v_vector + e)] = state_in[
                                slot, value_head, k_of(lane, i), first + w * v_vector + e
                            ]

    @T.macro
    def widen(flags, raw, state):
        for thread in each_thread(t, threads):
            if has(flags, DecodeFlag.V_FIRST_IN):
                for j in unrolled(t, values):
                    for i in unrolled(t, rows):
                        state[own(t, thread, j, i)] = raw[own(t, thread, j * rows + i)]
            else:
                for i in unrolled(t, rows):
                    for j in unrolled(t, values):
                        state[own(t, thread, j, i)] = raw[own(t, thread, i * values + j)]

    @T.macro
    def step(
        token, batch, value_head, tile, o, V, scale, flags, state, products, v_raw, strength, decays, keys, queries, warp_sums
    ):
        """One token: both products with the state, then output and update."""
        row = T.alloc_local((3, 4), "float32")
        for thread in each_thread(t, threads):
            lane = thread % lanes
            for j in unrolled(t, 2 * values):
                products[own(t, thread, j)] = 0.0
            for i in unrolled(t, rows // 4):
                for e in vectorized(t, 4):
                    row[0, e] = decays[k_of(lane, i * 4) + e]
                for e in vectorized(t, 4):
                    row[1, e] = keys[k_of(lane, i * 4) + e]
                for e in vectorized(t, 4):
                    row[2, e] = queries[k_of(lane, i * 4) + e]
                for e in unrolled(t, 4):
                    for j in unrolled(t, values):
                        products[own(t, thread, values + j)] = (
                            products[own(t, thread, values + j)] + row[2, e] * state[own(t, thread, j, i * 4 + e)]
                        )
                        state[own(t, thread, j, i * 4 + e)] = row[0, e] * state[own(t, thread, j, i * 4 + e)]
                        products[own(t, thread, j)] = (
                            products[own(t, thread, j)] + row[1, e] * state[own(t, thread, j, i * 4 + e)]
                        )
        lane_sums(t, products, 2 * values, lanes, threads)
        factor = T.alloc_local((4,), "float32")
        u = T.alloc_local((values,), "float32")
        out = T.alloc_local((values,), dtype)
        for thread in each_thread(t, threads):
            lane = thread % lanes
            first = (tile * groups + thread // lanes) * values
            for m in unrolled(t, 3):
                factor[m] = 0.0
                for w in unrolled(t, warps):
                    factor[m] = factor[m] + warp_sums[m, w]
            if has(flags, DecodeFlag.L2NORM):
                factor[0] = inverse_norm(factor[0])
                factor[1] = inverse_norm(factor[1])
            else:
                factor[0] = 1.0
                factor[1] = 1.0
            factor[2] = factor[2] * factor[0] * factor[1]
            factor[3] = 0.0
            if has(flags, DecodeFlag.DELTA):
                factor[3] = factor[1]
            for j in unrolled(t, values):
                u[j] = strength[own(t, thread, 0)] * (v_raw[own(t, thread, j)] - factor[3] * products[own(t, thread, j)])
                out[j] = scale * (factor[0] * products[own(t, thread, values + j)] + factor[2] * u[j])
                u[j] = u[j] * factor[1]
            for i in unrolled(t, rows // 4):
                for e in vectorized(t, 4):
                    row[1, e] = keys[k_of(lane, i * 4) + e]
                for e in unrolled(t, 4):
                    for j in unrolled(t, values):
                        state[own(t, thread, j, i * 4 + e)] = state[own(t, thread, j, i * 4 + e)] + row[1, e] * u[j]
            if (lane == 0) & (first < V):
                for w in unrolled(t, values // 4):
                    for e in vectorized(t, 4):
                        o[batch, token, value_head, first + w * 4 + e] = out[w * 4 + e]

    @T.macro
    def store(state_out, slot, value_head, tile, V, flags, state):
        piece = T.alloc_local((max(vector, v_vector),), state_dtype)
        for thread in each_thread(t, threads):
            lane = thread % lanes
            first = (tile * groups + thread // lanes) * values
            if first < V:
                if has(flags, DecodeFlag.V_FIRST_OUT):
                    for j in unrolled(t, values):
                        for p in unrolled(t, pieces):
                            for e in vectorized(t, vector):
                                piece[e] = state[own(t, thread, j, p * vector + e)]
                            for e in vectorized(t, vector):
                                state_out[slot, value_head, first + j, (p * lanes + lane) * vector + e] = piece[e]
                else:
                    for i in unrolled(t, rows):
                        for w in unrolled(t, values // v_vector):
                            for e in unrolled(t, v_vector):
                                piece[e] = state[own(t, thread, w * v_vector + e, i)]
                            for e in vectorized(t, v_vector):
                                state_out[slot, value_head, k_of(lane, i), first + w * v_vector + e] = piece[e]

    @T.prim_func
    def recurrent_decode(
        q: T.StridedTensor((B, seq_len, H, K), run_time_strides("q", "bthk"), dtype),
        k: T.StridedTensor((B, seq_len, H, K), run_time_strides("k", "bthk"), dtype),
        v: T.StridedTensor((B, seq_len, HV, V), run_time_strides("v", "bthv"), dtype),
        g: T.StridedTensor(g_sizes, run_time_strides("g", "bthk"), dtype),
        g_wide: T.StridedTensor(wide_sizes, run_time_strides("gw", "bthk"), "float32"),
        beta: T.StridedTensor(beta_sizes, run_time_strides("beta", "bth"), dtype),
        beta_wide: T.StridedTensor(beta_wide_sizes, run_time_strides("betaw", "bth"), "float32"),
        A_log: T.StridedTensor((A_size,), run_time_strides("A", "h"), "float32"),
        dt_bias: T.StridedTensor(bias_sizes, run_time_strides("bias", "hk"), "float32"),
        bonus: T.StridedTensor(bonus_sizes, run_time_strides("bonus", "hk"), "float32"),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        state_indices: T.StridedTensor((indices_size,), run_time_strides("indices", "n"), "int32"),
        starts: T.StridedTensor((starts_size,), run_time_strides("starts", "n"), "uint8"),
        o: T.Tensor((B, seq_len, HV, V), dtype),
        state_in: T.StridedTensor((in_slots, in_heads, in_outer, in_inner), (*in_strides, 1), state_dtype),
        state_out: T.StridedTensor((out_slots, out_heads, out_outer, out_inner), (*out_strides, 1), state_dtype),
        N: T.int32,
        scale: T.float32,
        lower_bound: T.float32,
        flags: T.int32,
        gate_form: T.int32,
        beta_form: T.int32,
        null_index: T.int32,
    ):
        with T.Kernel((N + 1 - (flags & 1)) * HV * T.truncdiv(V + (block_v - 1), block_v), threads=threads) as block:
            if not t.is_cpu:
                T.annotate_min_blocks_per_sm(schedule.min_blocks)
            assume_multiples(in_strides, vector)
            assume_multiples(out_strides, vector)
            T.assume(V % 8 == 0)
            where = T.alloc_local((10,), "int32")
            tiles_v = T.truncdiv(V + (block_v - 1), block_v)
            where[0] = T.truncdiv(block, tiles_v)
            where[1] = T.truncdiv(where[0], HV)
            where[2] = where[0] - where[1] * HV
            where[3] = block - where[0] * tiles_v
            where[4] = T.truncdiv(where[2], T.truncdiv(HV, H))
            where[5] = where[1]
            where[6] = 0
            where[7] = seq_len
            where[8] = 0
            where[9] = 0
            request, value_head, tile, head = where[1], where[2], where[3], where[4]
            if not has(flags, DecodeFlag.UNIFORM):
                where[5] = 0
                where[6] = T.max(0, T.min(cu_seqlens[request], seq_len))
                if request < N:
                    where[7] = T.min(cu_seqlens[request + 1], seq_len) - where[6]
                else:
                    where[7] = seq_len - where[6]
            batch, start, length = where[5], where[6], where[7]
            narrow = registers(t, threads, (sum(NARROW.values()),), dtype)
            wide = registers(t, threads, (sum(WIDE.values()),), "float32")
            # Ahead of what depends on the slot, whose index is still on its way.
            if (length > 0) & (request < N):
                fetch(start, batch, value_head, head, tile, q, k, v, g, g_wide, beta, beta_wide, A_log, dt_bias, bonus, V,
                      flags, narrow, wide)  # fmt: skip
            # The slots, plus one: 0 is null.
            if request < N:
                where[8] = request + 1
                where[9] = request + 1
                if has(flags, DecodeFlag.INDEXED_IN | DecodeFlag.INDEXED_OUT):
                    slot = state_indices[request]
                    if has(flags, DecodeFlag.INDEXED_IN):
                        where[8] = T.if_then_else((slot >= 0) & (slot < in_slots) & (slot != null_index), slot + 1, 0)
                    if has(flags, DecodeFlag.INDEXED_OUT):
                        where[9] = T.if_then_else((slot >= 0) & (slot < out_slots) & (slot != null_index), slot + 1, 0)
            in_slot, out_slot = where[8] - 1, where[9] - 1

            if (where[8] > 0) & (where[9] > 0):
                state = registers(t, threads, (values, rows), "float32")
                raw = registers(t, threads, (values * rows,), state_dtype)
                v_raw = registers(t, threads, (values,), "float32")
                strength = registers(t, threads, (1,), "float32")
                sums = registers(t, threads, (3,), "float32")
                products = registers(t, threads, (2 * values,), "float32")
                from_zero = T.alloc_var("int32", init=0)
                decays = t.shared((K,), "float32")
                keys = t.shared((K,), "float32")
                queries = t.shared((K,), "float32")
                warp_sums = t.shared((3, warps), "float32")
                # Read back for every further token, so that no address of its loads is kept through the loop in registers.
                place = t.shared((4,), "int32")

                from_zero = 1
                if has(flags, DecodeFlag.LOAD_STATE):
                    from_zero = 0
                    if has(flags, DecodeFlag.LOAD_FLAGS):
                        from_zero = T.if_then_else(starts[request] == 0, 1, 0)
                if from_zero == 0:
                    load(state_in, in_slot, value_head, tile, V, flags, raw)
                else:
                    for thread in each_thread(t, threads):
                        for i in unrolled(t, values * rows):
                            raw[own(t, thread, i)] = 0.0
                if length > 0:
                    publish(flags, gate_form, beta_form, lower_bound, narrow, wide, v_raw, strength, sums, decays, keys,
                            queries, warp_sums)  # fmt: skip
                for thread in each_thread(t, threads):
                    if thread == 0:
                        place[0] = batch
                        place[1] = value_head
                        place[2] = head
                        place[3] = tile
                widen(flags, raw, state)
                for token in T.serial(length):
                    step(start + token, batch, value_head, tile, o, V, scale, flags, state, products, v_raw, strength,
                         decays, keys, queries, warp_sums)  # fmt: skip
                    if token + 1 < length:
                        fetch(start + token + 1, place[0], place[1], place[2], place[3], q, k, v, g, g_wide, beta, beta_wide,
                              A_log, dt_bias, bonus, V, flags, narrow, wide)  # fmt: skip
                        publish(flags, gate_form, beta_form, lower_bound, narrow, wide, v_raw, strength, sums, decays, keys,
                                queries, warp_sums)  # fmt: skip
                if has(flags, DecodeFlag.STORE_STATE):
                    store(state_out, out_slot, value_head, tile, V, flags, state)
            else:
                for token in T.serial(length):
                    for thread in each_thread(t, threads):
                        for c in T.serial(-(-block_v // threads)):
                            column = tile * block_v + c * threads + thread
                            if (c * threads + thread < block_v) & (column < V):
                                o[batch, start + token, value_head, column] = 0.0

    return recurrent_decode
