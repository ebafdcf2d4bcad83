"""What DeltaLog's programs share: the log in shared memory, its weights, sums over it, and its fold into the base.

An entry keeps its own decay d_j = e^g_j in [0, 1], and the decay that reached it since is the running product of the newer
entries' d, newest first. No difference of sums, so that a mask (g = -1000) leaves the other decays alone; no exponential per
entry; and an append writes one row, whatever came before. The products are formed once, by the thread that owns a key channel:
keys then lie in shared memory as they weigh now, `weighted` [capacity + 1, K], for the sums and the fold alike.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.gates import gate_rate, inverse_norm, log_decay, write_strength
from kda_tl.kernels.tiles.lanes import group_sum, groups, lanes, own, private, wide
from kda_tl.kernels.tiles.target import TileTarget

ROW_LANES = 8  # threads that share a row of the base: 8 accesses of 16 bytes are one segment of 128
WARP = 32
ACCESS = 16  # bytes
PAD = 4  # floats after each row of writes, so that 8 lanes that read 8 entries meet no bank twice


@dataclass(frozen=True)
class BaseTile:
    """Rows of the base [V, K] in registers: thread (group, lane) has `rows` neighbouring rows, K / ROW_LANES keys of each."""

    t: TileTarget
    threads: int
    rows: int
    K: int
    state_dtype: str
    v_first: bool = True

    @property
    def groups(self) -> int:
        return self.threads // ROW_LANES

    @property
    def row_lanes(self) -> int:
        return ROW_LANES

    @property
    def width(self) -> int:
        """Elements of one access."""
        return elements(self.state_dtype)

    @property
    def vectors(self) -> int:
        return self.K // (ROW_LANES * self.width)

    @property
    def fold_rows(self) -> int:
        """Rows that a fold has in float32 at a time: 16 registers of them."""
        return min(self.rows, 16 // self.width)

    def across(self) -> Any:
        """A loop over the elements of one access: neighbours in memory only where K is the last dimension."""
        return wide(self.t, self.width) if self.v_first else T.unroll(self.width)

    def alloc(self) -> Any:
        return private(self.t, self.threads, (self.rows, self.vectors, self.width), self.state_dtype)

    def thread(self, group: Any, lane: Any) -> Any:
        return own(self.t, group * ROW_LANES + lane)

    def key(self, vector: Any, lane: Any) -> Any:
        """The first key of an access."""
        return (vector * ROW_LANES + lane) * self.width


def elements(dtype: str) -> int:
    """Of one access."""
    return ACCESS // (4 if dtype == "float32" else 2)


def once_each(t: TileTarget, extent: Any) -> Any:
    """A loop that stays one: unrolled it would take registers that its launch has not."""
    return T.serial(extent) if t.is_cpu else T.unroll(extent, annotations={"pragma_unroll_factor": 1})


@T.macro
def load_base(tile, held, base, slot, value_head, first_v):
    for group in groups(tile.t, tile.threads, ROW_LANES):
        for lane in lanes(tile.t, ROW_LANES):
            for r in T.unroll(tile.rows):
                for vector in T.unroll(tile.vectors):
                    for e in tile.across():
                        held[tile.thread(group, lane), r, vector, e] = base[
                            slot, value_head, first_v + group * tile.rows + r, tile.key(vector, lane) + e
                        ]


@T.macro
def stage(t, threads, target, log, row, first, count, capacity, width, size):
    """target [.., width] <- elements first .. first + width of the first `count` entries of row `row` of a log.

    `size` of them are 16 bytes. On a GPU the copies are asynchronous, all of them at once: see `staged`.
    """
    pieces = width // size
    for step in list(range(-(-capacity * pieces // threads))):
        for thread in lanes(t, threads):
            piece = step * threads + thread
            if piece < count * pieces:
                j = T.truncdiv(piece, pieces)
                c = (piece - j * pieces) * size
                if t.is_cpu:
                    for e in T.serial(size):
                        target[j, c + e] = log[row, j, first + c + e]
                else:
                    T.ptx_cp_async(
                        T.access_ptr(target[j, c], "w", size),
                        T.access_ptr(log[row, j, first + c], "r", size),
                        size,
                    )


@T.macro
def staged(t):
    """This thread's copies have arrived; a barrier makes the others' visible."""
    if not t.is_cpu:
        T.ptx_commit_group()
        T.ptx_wait_group(0)


@T.macro
def fetch_token(
    t, threads, narrow, wide_row, q, k, g, g_wide, A_log, dt_bias, bonus, request, token, head, value_head, gate_form,
    has_dt_bias, wide_gates, K, decay_size, read_first,
):  # fmt: skip
    """Issues the loads of a token's key channels: narrow: k, q, g; wide_row: g_wide, bias, bonus, A_log. Nothing waits here."""
    for step in list(range(-(-K // threads))):
        for thread in lanes(t, threads):
            c = step * threads + thread
            mine = own(t, thread)
            if c < K:
                narrow[mine, step, 0] = k[request, token, head, c]
                narrow[mine, step, 1] = q[request, token, head, c]
                if read_first:
                    wide_row[mine, step, 2] = bonus[value_head, c]
            if c < decay_size:
                if wide_gates != 0:
                    wide_row[mine, step, 0] = g_wide[request, token, value_head, c]
                else:
                    narrow[mine, step, 2] = g[request, token, value_head, c]
                if gate_form != 0:
                    wide_row[mine, step, 3] = A_log[value_head]
                    if has_dt_bias != 0:
                        wide_row[mine, step, 1] = dt_bias[value_head, c]


@T.macro
def fetch_value(
    t, threads, narrow_value, wide_strength, v, beta, beta_wide, request, token, value_head, first_v, wide_gates, block_v,
    delta,
):  # fmt: skip
    """As fetch_token: a value in each of the last block_v threads, the write strength in the last one."""
    for thread in lanes(t, threads):
        mine = own(t, thread)
        if thread >= threads - block_v:
            narrow_value[mine, 0] = v[request, token, value_head, first_v + thread - (threads - block_v)]
        if delta:
            if wide_gates != 0:
                wide_strength[mine, 0] = beta_wide[request, token, value_head]
            else:
                narrow_value[mine, 1] = beta[request, token, value_head]


@T.macro
def publish_value(t, threads, narrow_value, wide_strength, values, strength, beta_form, wide_gates, block_v, delta):
    """values [block_v], strength [1]: of the token that was fetched, in float32."""
    for thread in lanes(t, threads):
        mine = own(t, thread)
        if thread >= threads - block_v:
            values[thread - (threads - block_v)] = narrow_value[mine, 0]
        if delta:
            if thread == threads - 1:
                x = T.alloc_var("float32", init=0.0)
                x = wide_strength[mine, 0]
                if wide_gates == 0:
                    x = narrow_value[mine, 1]
                strength[0] = write_strength(beta_form, x)


@T.macro
def publish_token(
    t, threads, narrow, wide_row, now, decay, bonus_row, gate_form, lower_bound, has_dt_bias, wide_gates, K, decay_size,
    read_first,
):  # fmt: skip
    """k, q [2, K] of the token that was fetched, its decay e^g [decay_size] and, with read_first, the bonus [K]: float32."""
    for step in list(range(-(-K // threads))):
        for thread in lanes(t, threads):
            c = step * threads + thread
            mine = own(t, thread)
            if c < K:
                now[0, c] = narrow[mine, step, 0]
                now[1, c] = narrow[mine, step, 1]
                if read_first:
                    bonus_row[c] = wide_row[mine, step, 2]
            if c < decay_size:
                x = T.alloc_var("float32", init=0.0)
                if wide_gates != 0:
                    x = wide_row[mine, step, 0]
                else:
                    x = narrow[mine, step, 2]
                rate = T.alloc_var("float32", init=0.0)
                rate = 0.0
                if gate_form != 0:
                    rate = gate_rate(wide_row[mine, step, 3])
                    if has_dt_bias != 0:
                        x = x + wide_row[mine, step, 1]
                decay[c] = T.exp(log_decay(gate_form, x, rate, lower_bound))


@T.macro
def weigh_log(t, threads, weighted, keys, entry_decay, base_weight, decay, decays_now, count, K, per_key):
    """weighted [count, K]: k_j w_j; base_weight [K]: w_base. With decays_now the decay of the token at hand is in them.

    On entry `weighted` holds the entries' own decays where these are per key; else entry_decay [count, 1] does.
    """
    for step in list(range(-(-K // threads))):
        for thread in lanes(t, threads):
            c = step * threads + thread
            if c < K:
                weight = T.alloc_var("float32", init=1.0)
                since = T.alloc_var("float32", init=1.0)
                weight = 1.0
                if decays_now:
                    weight = decay[c if per_key else 0]
                for newer in T.serial(count):
                    j = count - 1 - newer
                    if per_key:
                        since = weight * weighted[j, c]
                    else:
                        since = weight * entry_decay[j, 0]
                    weighted[j, c] = T.cast(keys[j, c], "float32") * weight
                    weight = since
                base_weight[c] = weight


@T.macro
def decay_log(t, threads, weighted, base_weight, decay, count, K, per_key):
    """One more token's decay reaches the entries and the base."""
    for step in list(range(-(-K // threads))):
        for thread in lanes(t, threads):
            c = step * threads + thread
            if c < K:
                once = T.alloc_var("float32", init=1.0)
                once = decay[c if per_key else 0]
                for j in T.serial(count):
                    weighted[j, c] = weighted[j, c] * once
                base_weight[c] = base_weight[c] * once


@T.macro
def scale_token(t, threads, scaled, now, base_weight, K):
    """scaled [2, K]: k w_base and q w_base of the token at hand."""
    for step in list(range(-(-K // threads))):
        for thread in lanes(t, threads):
            c = step * threads + thread
            if c < K:
                scaled[0, c] = now[0, c] * base_weight[c]
                scaled[1, c] = now[1, c] * base_weight[c]


@T.macro
def log_products(t, threads, weighted, now, dots, numbers, bonus, count, K, delta, read_first, scale, normalize):
    """dots [count, 2]: k_j w_j . k and k_j w_j . q, a warp per entry. numbers [3], by one more warp: 1 / |k|, scale / |q| and
    q . k / |k|, or q . (bonus k) / |k|; norms are 1 without `normalize`."""
    each = K // WARP
    warps = threads // WARP
    row = private(t, 1, (each,), "float32")
    key = private(t, 1, (each,), "float32")
    query = private(t, 1, (each,), "float32")
    extra = private(t, 1, (each,), "float32")
    for warp in groups(t, threads, WARP):
        for turn in T.serial(T.ceildiv(count + 1, warps)):
            job = turn * warps + warp
            first = T.alloc_var("float32", init=0.0)
            second = T.alloc_var("float32", init=0.0)
            third = T.alloc_var("float32", init=0.0)
            first = 0.0
            second = 0.0
            third = 0.0
            if job <= count:
                for lane in lanes(t, WARP):
                    for e in wide(t, each):
                        key[0, e] = now[0, lane * each + e]
                    for e in wide(t, each):
                        query[0, e] = now[1, lane * each + e]
                    if job < count:
                        for e in wide(t, each):
                            row[0, e] = weighted[job, lane * each + e]
                        for e in T.unroll(each):
                            if delta:
                                first = first + row[0, e] * key[0, e]
                            second = second + row[0, e] * query[0, e]
                    else:
                        if read_first:
                            for e in wide(t, each):
                                extra[0, e] = bonus[lane * each + e]
                        for e in T.unroll(each):
                            first = first + key[0, e] * key[0, e]
                            second = second + query[0, e] * query[0, e]
                            if read_first:
                                third = third + query[0, e] * key[0, e] * extra[0, e]
                            else:
                                third = third + query[0, e] * key[0, e]
                first = group_sum(t, first, WARP)
                second = group_sum(t, second, WARP)
                if job == count:
                    third = group_sum(t, third, WARP)
                for lane in lanes(t, WARP):
                    if lane == 0:
                        if job < count:
                            dots[job, 0] = first
                            dots[job, 1] = second
                        else:
                            if normalize != 0:
                                first = inverse_norm(first)
                                second = inverse_norm(second)
                            else:
                                first = 1.0
                                second = 1.0
                            numbers[0] = first
                            numbers[1] = scale * second
                            numbers[2] = third * first


@T.macro
def read_base(tile, held, scaled, k_sums, q_sums, delta):
    """k_sums, q_sums [rows]: this thread's part of k^T S and q^T S, from the base alone; scaled [2, K]: k and q w_base.

    tile: a `BaseTile`, or any other whose rows `row_lanes` threads share.
    """
    t = tile.t
    k_row = private(t, 1, (tile.width,), "float32")
    q_row = private(t, 1, (tile.width,), "float32")
    for group in groups(t, tile.threads, tile.row_lanes):
        for lane in lanes(t, tile.row_lanes):
            mine = tile.thread(group, lane)
            for r in T.unroll(tile.rows):
                k_sums[mine, r] = 0.0
                q_sums[mine, r] = 0.0
            for vector in T.unroll(tile.vectors):
                for half in T.unroll(tile.width // 4):
                    for e in wide(t, 4):
                        q_row[0, half * 4 + e] = scaled[1, tile.key(vector, lane) + half * 4 + e]
                    if delta:
                        for e in wide(t, 4):
                            k_row[0, half * 4 + e] = scaled[0, tile.key(vector, lane) + half * 4 + e]
                for r in T.unroll(tile.rows):
                    for e in T.unroll(tile.width):
                        element = T.cast(held[mine, r, vector, e], "float32")
                        q_sums[mine, r] = q_sums[mine, r] + element * q_row[0, e]
                        if delta:
                            k_sums[mine, r] = k_sums[mine, r] + element * k_row[0, e]


@T.macro
def read_log(tile, dots, writes, count, group, k_sums, q_sums, k_total, q_total, delta):
    """k_total, q_total [rows]: k^T S and q^T S of the group's rows, in all threads of the group: `read_base` plus the log."""
    t = tile.t
    row = private(t, 1, (tile.rows,), "float32")
    for r in T.unroll(tile.rows):
        k_total[r] = 0.0
        q_total[r] = 0.0
    for lane in lanes(t, ROW_LANES):
        for r in T.unroll(tile.rows):
            q_total[r] = q_total[r] + q_sums[tile.thread(group, lane), r]
            if delta:
                k_total[r] = k_total[r] + k_sums[tile.thread(group, lane), r]
        for turn in T.serial(T.ceildiv(count, ROW_LANES)):
            j = turn * ROW_LANES + lane
            if j < count:
                for first in list(range(0, tile.rows, 4)):
                    for e in wide(t, min(4, tile.rows)):
                        row[0, first + e] = writes[j, group * tile.rows + first + e]
                for r in T.unroll(tile.rows):
                    q_total[r] = q_total[r] + dots[j, 1] * row[0, r]
                    if delta:
                        k_total[r] = k_total[r] + dots[j, 0] * row[0, r]
    for r in T.unroll(tile.rows):
        q_total[r] = group_sum(t, q_total[r], ROW_LANES)
        if delta:
            k_total[r] = group_sum(t, k_total[r], ROW_LANES)


def with_low(upper: Any, word: Any, e: Any) -> Any:
    """The float32 that an element of a bfloat16 base, as float32, and the e-th low bits of a word stand for.

    A zero has no low bits below it: stale ones would turn its sign bit into a NaN.
    """
    low = (word << (28 - 4 * e)) >> 28
    bits = T.reinterpret(upper, "int32")
    joined = bits + (low << 12)
    return T.reinterpret(T.if_then_else((joined ^ bits) < 0, bits, joined), "float32")


def is_nan(x: Any) -> Any:
    """By its bits: that x == x holds is taken for granted where programs are simplified."""
    return (T.reinterpret(x, "int32") & 0x7FFFFFFF) > 0x7F800000


def near_bits(x: Any) -> Any:
    """The bits of a float32 of which the 20 leading ones are x rounded; of a NaN, those of a NaN that has no others."""
    return T.if_then_else(is_nan(x), 0x7FC00000, T.reinterpret(x, "int32") + 0x800)


def upper_part(near: Any) -> Any:
    """The part of `near_bits` that a bfloat16 has, as float32."""
    return T.reinterpret((near + 0x8000) & -0x10000, "float32")


def low_part(near: Any, e: Any) -> Any:
    """The low bits of `near_bits`, where the e-th of a word lie."""
    return ((near >> 12) & 15) << (4 * e)


@T.macro
def fold_log(
    tile, base, base_low, row, weighted, base_weight, writes, slot, value_head, first_v, count, token, decay_size, read_first
):
    """base <- Diag(w_base) base + sum_j (k_j w_j) u_j^T over `count` entries.

    token: (u of each group's rows, now, decay) of one more entry, of whose decay the weights know but with read_first; or None.
    The base is read again, from a cache: kept in registers until here, it would cost every step that folds nothing. A bfloat16
    base takes 4 more bits per element from base_low [.., V, K / 8] and leaves them there, as `kda_tl.ops.deltalog_low` says.
    """
    t = tile.t
    has_low = tile.state_dtype == "bfloat16"
    words = private(t, 1, (tile.fold_rows,), "int32")
    piece = private(t, 1, (tile.fold_rows, tile.width), tile.state_dtype)
    weight = private(t, 1, (tile.width,), "float32")
    write = private(t, 1, (tile.fold_rows,), "float32")
    total = private(t, 1, (tile.fold_rows, tile.width), "float32")
    for group in groups(t, tile.threads, ROW_LANES):
        for lane in lanes(t, ROW_LANES):
            for part in T.unroll(tile.rows // tile.fold_rows):
                for vector in once_each(t, tile.vectors):
                    first_row = group * tile.rows + part * tile.fold_rows
                    for r in T.unroll(tile.fold_rows):
                        for e in tile.across():
                            piece[0, r, e] = base[slot, value_head, first_v + first_row + r, tile.key(vector, lane) + e]
                    for half in T.unroll(tile.width // 4):
                        for e in wide(t, 4):
                            weight[0, half * 4 + e] = base_weight[tile.key(vector, lane) + half * 4 + e]
                    for r in T.unroll(tile.fold_rows):
                        if has_low:
                            words[0, r] = base_low[row, first_v + first_row + r, vector * ROW_LANES + lane]
                        for e in T.unroll(tile.width):
                            if has_low:
                                total[0, r, e] = weight[0, e] * with_low(T.cast(piece[0, r, e], "float32"), words[0, r], e)
                            else:
                                total[0, r, e] = T.cast(piece[0, r, e], "float32") * weight[0, e]
                    for j in once_each(t, count):
                        for half in T.unroll(tile.width // 4):
                            for e in wide(t, 4):
                                weight[0, half * 4 + e] = weighted[j, tile.key(vector, lane) + half * 4 + e]
                        for first in list(range(0, tile.fold_rows, 4)):
                            for e in wide(t, min(4, tile.fold_rows)):
                                write[0, first + e] = writes[j, first_row + first + e]
                        for r in T.unroll(tile.fold_rows):
                            for e in T.unroll(tile.width):
                                total[0, r, e] = total[0, r, e] + weight[0, e] * write[0, r]
                    if token is not None:
                        u, now, decay = token
                        if read_first:
                            for r in T.unroll(tile.fold_rows):
                                for e in T.unroll(tile.width):
                                    total[0, r, e] = total[0, r, e] * decay[tile.key(vector, lane) + e if decay_size > 1 else 0]
                        for half in T.unroll(tile.width // 4):
                            for e in wide(t, 4):
                                weight[0, half * 4 + e] = now[0, tile.key(vector, lane) + half * 4 + e]
                        for r in T.unroll(tile.fold_rows):
                            for e in T.unroll(tile.width):
                                total[0, r, e] = total[0, r, e] + weight[0, e] * u[own(t, group), part * tile.fold_rows + r]
                    for r in T.unroll(tile.fold_rows):
                        if has_low:
                            words[0, r] = 0
                            for e in T.unroll(tile.width):
                                near = near_bits(total[0, r, e])
                                piece[0, r, e] = upper_part(near)
                                words[0, r] = words[0, r] | low_part(near, e)
                            base_low[row, first_v + first_row + r, vector * ROW_LANES + lane] = words[0, r]
                        else:
                            for e in T.unroll(tile.width):
                                piece[0, r, e] = total[0, r, e]
                        for e in tile.across():
                            base[slot, value_head, first_v + first_row + r, tile.key(vector, lane) + e] = piece[0, r, e]


@T.macro
def store_cursor(t, threads, cursor, row, first_copy, copies, count, window):
    """The copies of the cursor that belong to this block's rows. A barrier must lie between this and the last read of them."""
    for thread in lanes(t, threads):
        if thread < copies:
            cursor[row, first_copy + thread, 0] = count
            cursor[row, first_copy + thread, 1] = window
