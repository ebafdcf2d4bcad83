"""chunk_wy: all of a chunk that does not depend on the state, parallel over chunks and value heads.

Reads q, k, g and beta of one chunk, applies gate, l2 norm and sigmoid, and stores what chunk_scan multiplies by the state and
by the values, so that the scan has neither exponentials nor a rule of its own:

    q_decayed = q e^G,   k_decayed = k e^G,   k_to_end = k e^(G_last - G),   chunk_decay = e^G_last
    A_inv = (I + Diag(beta) A)^-1 Diag(beta),    A strictly lower, decay products of k with k
    P                                            lower with its diagonal, decay products of q with k

With a decay for every column, every e^G is a running product of decays d = exp(g) in [0, 1], from the chunk's first row down or
from its last row up; where it crosses into another thread's rows it starts from their sum of logs. With one decay a row, or
none, products are plain, and decays come after them (`tiles.scalar_decay`). No exponent that counts is ever positive. Formulas
and names as in `kda_tl.reference.chunk`. Rules without the delta correction store no k_decayed and no A_inv. RWKV6
(`read_first`) reads before it decays: its q_decayed leaves the token's own decay out, and the diagonal of P is q (bonus k).
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.chunks import locate_chunk
from kda_tl.kernels.tiles.decay_products import PartSums, decay_products
from kda_tl.kernels.tiles.gates import gate_rate, log_decay, write_strength
from kda_tl.kernels.tiles.operands import LevelOperands
from kda_tl.kernels.tiles.scalar_decay import (
    RowFactors,
    running_sums,
    store_decayed_products,
    store_factors,
    store_gated_rows,
)
from kda_tl.kernels.tiles.target import LOG2_E, TileTarget, assume_multiples, barrier, run_time_strides
from kda_tl.kernels.tiles.token_rows import load_rows, raw_at, stage_rows, store_norms
from kda_tl.kernels.tiles.token_tiles import (
    BANK_ROWS,
    TokenTiles,
    finish_products,
    finish_staging,
    stage_tokens,
    start_products,
    store_squares,
)
from kda_tl.kernels.tiles.triangular_inverse import unit_lower_inverse
from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.candidates import Block, Candidate, objection, space
from kda_tl.specs.gates import GateForm
from kda_tl.specs.kernels import ChunkWySpec
from kda_tl.specs.schedules import ChunkWySchedule


def candidates(spec: ChunkWySpec, arch: str) -> list[Candidate]:
    """With a decay for every column a block keeps its chunk's decays, gates, q and k in registers, and both block products in
    shared memory; otherwise the products in registers, and later where q and k were in shared memory."""
    C, K, width = spec.chunk_size, spec.head_dim_k, 4 if spec.operand_dtype == "float32" else 2

    def judge(schedule: ChunkWySchedule) -> str | None:
        threads = schedule.parts * K // 2
        if threads % 128:
            return f"divisibility: parts * head_dim_k / 2 = {threads} threads are no whole warpgroups"
        if spec.decay == "per_key":
            held = C // schedule.parts * (2 + width) + 32
            operands = C * K * 3 // 2 * width
            if arch == "sm_90" and width == 2:  # in columns of 8 with a row more than there are
                operands = K * (C + 1 + C // 2 + 1) * width
            shared = operands + 2 * C * (C + BANK_ROWS) * 4 + 3 * schedule.parts * K * 4 + (3 * K + 4 * C) * 4
        else:
            held = 2 * C * C // threads + 32
            columns = C if width == 2 else K
            shared = 2 * C * (columns + BANK_ROWS) * 4 + (8 + threads // C) * C * 4
        return objection(Block(threads, shared, held, schedule.min_blocks), arch, spare=2)

    if arch_row(arch).is_cpu:
        return space(ChunkWySchedule, judge, parts=(2, 4, 8))
    most = 4 if spec.decay == "per_key" else 5
    return space(ChunkWySchedule, judge, parts=(2, 4, 8), min_blocks=tuple(range(1, most + 1)))


def program(spec: ChunkWySpec, schedule: ChunkWySchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments, in order:

    q, k [B, T, H, K] dtype; g [B, T, HV, K] (per_key) or [B, T, HV] (scalar) gate_dtype, natural log or raw; beta [B, T, HV]
    gate_dtype; A_log [HV], dt_bias [HV * K] or [HV], bonus [H * K] float32; cu_seqlens [N + 1] int32;
    q_decayed, k_decayed, k_to_end [slots, HV, C, K] operand_dtype, out; chunk_decay [slots, HV, K] float32, out;
    A_inv, P [slots, HV, C, C] operand_dtype, out; lower_bound: float32; gate_form, beta_form: int32 (`kda_tl.specs.gates`);
    normalize: int32, 1 for l2 norms of q and k; uniform: int32, 1 for a dense batch (every sequence has T tokens).
    What the rule, a form or a dense batch does not read may be any tensor of its rank and dtype.
    """
    t = TileTarget(arch)
    C, K, dtype, gate_dtype, operand_dtype = spec.chunk_size, spec.head_dim_k, spec.dtype, spec.gate_dtype, spec.operand_dtype
    per_key, scalar, delta, parts = spec.decay == "per_key", spec.decay == "scalar", spec.delta, schedule.parts
    B, seq_len, H, HV, slots, num_offsets = T.dynamic("B, seq_len, H, HV, slots, num_offsets")
    num_rates, num_biases, num_bonuses, no_slots, no_heads = T.dynamic("num_rates, num_biases, num_bonuses, no_slots, no_heads")
    q_strides, k_strides = run_time_strides("q", "bth"), run_time_strides("k", "bth")
    g_strides, beta_strides = run_time_strides("g", "bth"), run_time_strides("beta", "bth")
    g_shape = (B, seq_len, HV, K) if per_key else (B, seq_len, HV) if scalar else T.dynamic("no_g_b, no_g_t, no_g_h")
    beta_shape = (B, seq_len, HV) if delta else T.dynamic("no_beta_b, no_beta_t, no_beta_h")
    delta_slots, delta_heads = (slots, HV) if delta else (no_slots, no_heads)

    @T.prim_func
    def chunk_wy(
        q: T.StridedTensor((B, seq_len, H, K), (*q_strides, 1), dtype),
        k: T.StridedTensor((B, seq_len, H, K), (*k_strides, 1), dtype),
        g: T.StridedTensor(g_shape, (*g_strides, 1) if per_key else g_strides, gate_dtype),
        beta: T.StridedTensor(beta_shape, beta_strides, gate_dtype),
        A_log: T.Tensor((num_rates,), "float32"),
        dt_bias: T.Tensor((num_biases,), "float32"),
        bonus: T.Tensor((num_bonuses,), "float32"),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        q_decayed: T.Tensor((slots, HV, C, K), operand_dtype),
        k_decayed: T.Tensor((delta_slots, delta_heads, C, K), operand_dtype),
        k_to_end: T.Tensor((slots, HV, C, K), operand_dtype),
        chunk_decay: T.Tensor((slots, HV, K), "float32"),
        A_inv: T.Tensor((delta_slots, delta_heads, C, C), operand_dtype),
        P: T.Tensor((slots, HV, C, C), operand_dtype),
        lower_bound: T.float32,
        gate_form: T.int32,
        beta_form: T.int32,
        normalize: T.int32,
        uniform: T.int32,
    ):
        with T.Kernel(slots * HV, threads=parts * K // 2) as block:
            if not t.is_cpu:
                T.annotate_min_blocks_per_sm(schedule.min_blocks)
                # Barriers stand where they must. TileLang's own analysis puts one between any two stores that it cannot tell
                # apart, and takes a third of the time to compile. Then no buffer may lie where another one was, either.
                T.annotate_pass_configs({"tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True})
            assume_multiples(q_strides, 8)
            assume_multiples(k_strides, 8)
            if per_key:
                assume_multiples(g_strides, 8)
            where = T.alloc_local((6,), "int32")
            where[5] = T.truncdiv(block, HV)
            where[4] = block - where[5] * HV
            locate_chunk(where[5], uniform, seq_len, num_offsets - 1, cu_seqlens, C, where)
            where[3] = T.truncdiv(where[4], T.truncdiv(HV, H))
            batch, start, rows, head, value_head, slot = where[0], where[1], where[2], where[3], where[4], where[5]
            if rows > 0:
                if per_key:
                    per_key_chunk(t, spec, parts, q, k, g, beta, A_log, dt_bias, bonus, q_decayed, k_decayed, k_to_end,
                                  chunk_decay, A_inv, P, batch, start, rows, head, value_head, slot, lower_bound, gate_form,
                                  beta_form, normalize)  # fmt: skip
                else:
                    scalar_chunk(t, spec, parts, q, k, g, beta, A_log, dt_bias, q_decayed, k_decayed, k_to_end, chunk_decay,
                                 A_inv, P, where, lower_bound, gate_form, beta_form, normalize)  # fmt: skip

    return chunk_wy


@T.macro
def per_key_chunk(t, spec, parts, q, k, g, beta, A_log, dt_bias, bonus, q_decayed, k_decayed, k_to_end, chunk_decay, A_inv, P,
                  batch, start, rows, head, value_head, slot, lower_bound, gate_form, beta_form, normalize):  # fmt: skip
    """A chunk with a decay for every column."""
    C, K, dtype, gate_dtype, operand_dtype = spec.chunk_size, spec.head_dim_k, spec.dtype, spec.gate_dtype, spec.operand_dtype
    delta, read_first = spec.delta, spec.read_first
    size = C // parts
    staged = t.has_mma and dtype != "float32"
    decay = t.column_pairs(C, K, "float32", parts)
    q_rows = t.column_pairs(C, K, operand_dtype, parts)
    k_rows = t.column_pairs(C, K, operand_dtype, parts)
    wide = T.alloc_local((2,), "float32")  # float32 in between: TileLang pairs these casts, not bfloat16 to float16
    norms = t.shared((2, C), "float32")
    row_norms = T.alloc_local((2, 4), "float32")
    totals = t.shared((3, K // 64, C), "float32")
    diagonal = t.shared((C,), "float32")
    sums = PartSums(t.shared((parts, K), "float32"), t.shared((parts, K), "float32"), t.shared((parts, K), "float32"))
    beta_tile = t.shared((C,), "float32")
    bonus_row = t.shared((K,), "float32")
    operands = LevelOperands.allocate(t, C, K, operand_dtype, parts * K // 2)
    # Staged, tokens come by cp.async into what the products need later only; else straight to registers.
    if staged:
        raw_q = raw_k = T.alloc_shared((2, 2 * C * (C + BANK_ROWS)), dtype)
        products = T.view(raw_q, (2, C, C + BANK_ROWS), "float32")
    else:
        products = t.shared((2, C, C + BANK_ROWS), "float32")
        raw_q = q_rows if dtype == operand_dtype else t.column_pairs(C, K, dtype, parts)
        raw_k = k_rows if dtype == operand_dtype else t.column_pairs(C, K, dtype, parts)
    staged_g = staged and gate_dtype != "float32" and operands.core
    if staged_g:
        raw_g = T.view(operands.left, (1, operands.left.shape[0] * operands.left.shape[1]), gate_dtype)
    else:
        raw_g = decay if gate_dtype == "float32" else t.column_pairs(C, K, gate_dtype, parts)
    rate = T.alloc_var("float32", init=0.0)

    if staged:
        stage_rows(q, raw_q, 0, batch, start, rows, head, C, K, parts)
        stage_rows(k, raw_k, 1, batch, start, rows, head, C, K, parts)
        if staged_g:
            stage_rows(g, raw_g, 0, batch, start, rows, value_head, C, K, parts)
        T.ptx_commit_group()
    else:
        load_rows(t, k, raw_k, batch, start, rows, head, C, K, parts)
        load_rows(t, q, raw_q, batch, start, rows, head, C, K, parts)
    if not staged_g:
        load_rows(t, g, raw_g, batch, start, rows, value_head, C, K, parts)
    if gate_form == int(GateForm.SOFTPLUS) or gate_form == int(GateForm.BOUNDED):
        rate = gate_rate(A_log[value_head])
    if delta:
        load_strengths(t, beta, beta_tile, beta_form, batch, start, rows, value_head, C)
    if read_first:
        for d in t.parallel(K):
            bonus_row[d] = bonus[head * K + d]
    if staged:
        T.ptx_wait_group(0)
        T.sync_threads()
    else:
        barrier(t)
    store_norms(t, staged, raw_q, raw_k, bonus_row if read_first else None, totals, norms, diagonal, rows,
                normalize, C, K, parts)  # fmt: skip
    for part, pair in t.each_column_pair(K, parts):
        whole = T.alloc_local((2,), "float32")
        for j in t.pair():
            whole[j] = 0.0
        if gate_dtype != "float32":
            for r in T.unroll(size):
                for j in t.pair():
                    decay[t.at(part, pair, r, j)] = raw_g[raw_at(t, staged_g, 0, part, pair, r, j, size, K)]
        if gate_form != int(GateForm.IDENTITY):
            activate(t, decay, dt_bias, value_head * K, gate_form, rate, lower_bound, part, pair, size)
        if rows < C:
            for r in T.unroll(size):
                if part * size + r >= rows:
                    for j in t.pair():
                        decay[t.at(part, pair, r, j)] = 0.0
        for r in T.unroll(size):
            for j in t.pair():
                wide[j] = decay[t.at(part, pair, r, j)] * LOG2_E
            if r == 0:
                for j in t.pair():
                    sums.first[part, pair * 2 + j] = wide[j]
            else:
                for j in t.pair():
                    whole[j] = whole[j] + wide[j]
            for j in t.pair():
                decay[t.at(part, pair, r, j)] = T.exp2(wide[j])
        for j in t.pair():
            sums.rest[part, pair * 2 + j] = whole[j]
        for j in t.pair():
            sums.whole[part, pair * 2 + j] = whole[j] + sums.first[part, pair * 2 + j]
    barrier(t)
    for part, pair in t.each_column_pair(K, parts):
        for first in list(range(0, size, 4)):
            for side in list(range(2)):
                for s in T.vectorized(4):
                    row_norms[side, s] = norms[side, part * size + first + s]
            for s in T.unroll(4):
                r = first + s
                for j in t.pair():
                    wide[j] = raw_k[raw_at(t, staged, 1, part, pair, r, j, size, K)]
                for j in t.pair():
                    k_rows[t.at(part, pair, r, j)] = wide[j] * row_norms[1, s]
                for j in t.pair():
                    wide[j] = raw_q[raw_at(t, staged, 0, part, pair, r, j, size, K)]
                for j in t.pair():
                    q_rows[t.at(part, pair, r, j)] = wide[j] * row_norms[0, s]
    store_gated(t, q_rows, k_rows, decay, sums.whole, q_decayed, k_decayed, k_to_end, chunk_decay, slot, value_head,
                C, K, parts, delta, read_first)  # fmt: skip
    decay_products(t, q_rows, k_rows, decay, sums, diagonal, operands, products, C, K, parts, read_first)
    barrier(t)
    store_blocks(t, products, beta_tile, A_inv, P, slot, value_head, C, parts * K // 2, delta)


@T.macro
def load_strengths(t, beta, beta_tile, beta_form, batch, start, rows, value_head, C):
    """beta_tile [C]: of each row, 0 past the sequence's last one."""
    for i in t.parallel(C):
        if i < rows:
            beta_tile[i] = write_strength(beta_form, T.cast(beta[batch, start + i, value_head], "float32"))
        else:
            beta_tile[i] = 0.0


@T.macro
def scalar_chunk(t, spec, parts, q, k, g, beta, A_log, dt_bias, q_decayed, k_decayed, k_to_end, chunk_decay, A_inv, P, where,
                 lower_bound, gate_form, beta_form, normalize):  # fmt: skip
    """A chunk with one decay a row, or none. where: batch, start, rows, head, value head and slot."""
    batch, start, rows, head, value_head, slot = where[0], where[1], where[2], where[3], where[4], where[5]
    C, K, delta, decays = spec.chunk_size, spec.head_dim_k, spec.delta, spec.decay == "scalar"
    threads = parts * K // 2
    tiles = TokenTiles.allocate(t, C, K, spec.dtype, threads)
    factors = RowFactors.allocate(t, C)
    shares = threads // (2 * C) if tiles.core else 1
    totals = t.shared((shares, 2, C), "float32")
    beta_tile = t.shared((C,), "float32")
    rate = T.alloc_var("float32", init=0.0)
    stage_tokens(t, tiles, q, k, batch, start, rows, head)
    if delta:
        load_strengths(t, beta, beta_tile, beta_form, batch, start, rows, value_head, C)
    if decays:
        if t.is_cpu or T.get_thread_binding() >= threads - 32:  # the first warps have beta
            if gate_form == int(GateForm.SOFTPLUS) or gate_form == int(GateForm.BOUNDED):
                rate = gate_rate(A_log[value_head])
            for r in T.serial(C) if t.is_cpu else T.unroll(2):
                i = r if t.is_cpu else T.get_thread_binding() % 32 * 2 + r
                x = T.alloc_var("float32", init=0.0)
                x = g[batch, start + T.min(i, rows - 1), value_head]
                if gate_form != int(GateForm.IDENTITY):
                    x = log_decay(gate_form, x + dt_bias[value_head], rate, lower_bound)
                factors.high[i] = T.if_then_else(i < rows, x * LOG2_E, 0.0)
            running_sums(t, factors.high, factors.low, C)
    finish_staging(t, tiles)
    if normalize != 0:
        store_squares(t, tiles, totals)
        barrier(t)
    store_factors(t, factors, totals, shares, C, normalize, decays)
    barrier(t)
    for d in t.parallel(K):
        if decays:
            chunk_decay[slot, value_head, d] = T.exp2(factors.high[C - 1] + factors.low[C - 1])
        else:
            chunk_decay[slot, value_head, d] = 1.0
    start_products(t, tiles, delta)
    store_gated_rows(t, tiles, factors, q_decayed, k_decayed, k_to_end, slot, value_head, delta)
    finish_products(t, tiles, delta)
    barrier(t)
    store_decayed_products(t, tiles, factors, delta, decays)
    barrier(t)
    store_blocks(t, tiles.products, beta_tile, A_inv, P, slot, value_head, C, threads, delta)


@T.macro
def store_blocks(t, products, beta_tile, A_inv, P, slot, value_head, C, threads, delta):
    """P and A_inv of the chunk, from the products of q with k and of k with k below the diagonal."""
    for i, group in t.parallel(C, C // 4):
        row = T.alloc_local((4,), "float32")
        for s in T.vectorized(4):
            row[s] = products[1, i, group * 4 + s]
        for s in list(range(4)):
            if group * 4 + s > i:
                row[s] = 0.0
        for s in T.vectorized(4):
            P[slot, value_head, i, group * 4 + s] = row[s]
    if delta:
        barrier(t)
        unit_lower_inverse(t, products, beta_tile, C, threads)
        for i, j in t.parallel(C, C):
            A_inv[slot, value_head, i, j] = products[1, i, j] * beta_tile[j]


@T.macro
def activate(t, decay, dt_bias, first_bias, gate_form, rate, lower_bound, part, pair, size):
    """Raw gates to natural-log decays, in registers. One branch around all rows: none would wait for another's load.

    log(1 + e) = 2 atanh(e / (2 + e)), whose series converges fast for e <= 1 and does not cancel for small e; log2f would take
    many more instructions. What is left is the rounding of exp2's argument: a few 1e-7 of the gate, 4e-6 where x is -80.
    """
    bias = T.alloc_local((2,), "float32")
    for j in t.pair():
        bias[j] = dt_bias[first_bias + pair * 2 + j]
    if gate_form == int(GateForm.SOFTPLUS):
        for r in T.unroll(size):
            for j in T.unroll(2):
                x = decay[t.at(part, pair, r, j)] + bias[j]
                e = T.exp2(T.min(x, -x) * LOG2_E)
                s = e * t.reciprocal(2.0 + e)
                series = T.alloc_var("float32", init=0.0)
                series = 2.0 / 13.0
                for n in list(range(11, 0, -2)):
                    series = series * (s * s) + 2.0 / n
                decay[t.at(part, pair, r, j)] = -rate * (T.max(x, 0.0) + s * series)
    else:
        slope = T.if_then_else(gate_form == int(GateForm.BOUNDED), rate, 1.0) * LOG2_E
        for r in T.unroll(size):
            for j in T.unroll(2):
                x = decay[t.at(part, pair, r, j)] + bias[j]
                decay[t.at(part, pair, r, j)] = lower_bound * t.reciprocal(1.0 + T.exp2(-x * slope))


@T.macro
def store_gated(t, q_rows, k_rows, decay, sums, q_decayed, k_decayed, k_to_end, chunk_decay, slot, value_head, C, K, parts,
                delta, read_first):  # fmt: skip
    """The gated rows: down the chunk for e^G, up for e^(G_last - G). A part begins where the other parts' sums end."""
    size = C // parts
    for part, pair in t.each_column_pair(K, parts):
        total = T.alloc_local((2,), "float32")  # not `factor`: see TileTarget.pair
        factor = T.alloc_local((2,), "float32")
        narrow = T.alloc_local((2,), q_rows.dtype)
        for j in t.pair():
            total[j] = 0.0
        for other in list(range(parts - 1)):
            if other < part:
                for j in t.pair():
                    total[j] = total[j] + sums[other, pair * 2 + j]
        for j in t.pair():
            factor[j] = T.exp2(total[j])
        for r in T.unroll(size):
            if not read_first:
                for j in t.pair():
                    factor[j] = factor[j] * decay[t.at(part, pair, r, j)]
            for j in t.pair():
                narrow[j] = factor[j]
            for j in t.pair():
                q_decayed[slot, value_head, part * size + r, pair * 2 + j] = q_rows[t.at(part, pair, r, j)] * narrow[j]
            if read_first:
                for j in t.pair():
                    factor[j] = factor[j] * decay[t.at(part, pair, r, j)]
            if delta:
                for j in t.pair():
                    k_decayed[slot, value_head, part * size + r, pair * 2 + j] = k_rows[t.at(part, pair, r, j)] * narrow[j]
        for j in t.pair():
            total[j] = 0.0
        for other in list(range(1, parts)):
            if other > part:
                for j in t.pair():
                    total[j] = total[j] + sums[other, pair * 2 + j]
        if part == 0:
            for j in t.pair():
                chunk_decay[slot, value_head, pair * 2 + j] = T.exp2(total[j] + sums[0, pair * 2 + j])
        for j in t.pair():
            factor[j] = T.exp2(total[j])
        for s in T.unroll(size):
            for j in t.pair():
                narrow[j] = factor[j]
            for j in t.pair():
                k_to_end[slot, value_head, part * size + (size - 1 - s), pair * 2 + j] = (
                    k_rows[t.at(part, pair, size - 1 - s, j)] * narrow[j]
                )
            for j in t.pair():
                factor[j] = factor[j] * decay[t.at(part, pair, size - 1 - s, j)]
