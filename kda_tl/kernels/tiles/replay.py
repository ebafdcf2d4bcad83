"""What DeltaLog's programs share: the log in shared memory, sums over it, and its fold into the base.

An entry keeps its own decay d_j = e^g_j in [0, 1], and the decay that reached it since is the running product of the newer
entries' d, newest first. No difference of sums, so that a mask (g = -1000) leaves the other decays alone; no exponential per
entry; and an append writes one row, whatever came before.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.gates import gate_rate, log_decay
from kda_tl.kernels.tiles.lanes import group_sum, groups, lanes, own, private, sync, wide
from kda_tl.kernels.tiles.target import TileTarget

ROW_LANES = 8  # threads that share a row of the base: 8 accesses of 16 bytes are one segment of 128
WARP = 32


@dataclass(frozen=True)
class BaseTile:
    """Rows of the base [V, K] in registers: thread (group, lane) has rows r * groups + group, K / ROW_LANES keys of each."""

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
    def width(self) -> int:
        """Elements of one access of 16 bytes."""
        return 4 if self.state_dtype == "float32" else 8

    @property
    def vectors(self) -> int:
        return self.K // (ROW_LANES * self.width)

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


@T.macro
def load_base(tile, held, base, slot, value_head, first_v):
    for group in groups(tile.t, tile.threads, ROW_LANES):
        for lane in lanes(tile.t, ROW_LANES):
            for r in T.unroll(tile.rows):
                for vector in T.unroll(tile.vectors):
                    for e in tile.across():
                        held[tile.thread(group, lane), r, vector, e] = base[
                            slot, value_head, first_v + r * tile.groups + group, tile.key(vector, lane) + e
                        ]


@T.macro
def stage_log(t, threads, keys, decays, log_k, log_decay, slot, value_head, count, K, decay_size):
    """Keys and decays of the first `count` entries, log [slots, HV, capacity, ..] to shared memory."""
    for step in T.serial(T.ceildiv(count * (K // 4), threads)):
        for thread in lanes(t, threads):
            chunk = step * threads + thread
            if chunk < count * (K // 4):
                j = T.truncdiv(chunk, K // 4)
                c = (chunk - j * (K // 4)) * 4
                for e in wide(t, 4):
                    keys[j, c + e] = log_k[slot, value_head, j, c + e]
                if decay_size > 1:
                    for e in wide(t, 4):
                        decays[j, c + e] = log_decay[slot, value_head, j, c + e]
    if decay_size == 1:
        for thread in lanes(t, threads):
            if thread < count:
                decays[thread, 0] = log_decay[slot, value_head, thread, 0]


@T.macro
def stage_writes(t, threads, writes, log_u, slot, value_head, first_v, count, block_v):
    for step in T.serial(T.ceildiv(count * (block_v // 4), threads)):
        for thread in lanes(t, threads):
            chunk = step * threads + thread
            if chunk < count * (block_v // 4):
                j = T.truncdiv(chunk, block_v // 4)
                x = (chunk - j * (block_v // 4)) * 4
                for e in wide(t, 4):
                    writes[j, x + e] = log_u[slot, value_head, j, first_v + x + e]


@T.macro
def stage_token(
    t, threads, now, decay, bonus_row, q, k, g, g_wide, A_log, dt_bias, bonus, request, token, head, value_head, gate_form,
    lower_bound, has_dt_bias, wide_gates, K, decay_size, read_first,
):  # fmt: skip
    """k, q [2, K] of one token, its decay e^g [decay_size] and, with read_first, the bonus [K], all in float32."""
    for step in list(range(-(-K // threads))):
        for thread in lanes(t, threads):
            c = step * threads + thread
            if c < K:
                now[0, c] = k[request, token, head, c]
                now[1, c] = q[request, token, head, c]
                if read_first:
                    bonus_row[c] = bonus[value_head, c]
            if c < decay_size:
                x = T.alloc_var("float32", init=0.0)
                if wide_gates != 0:
                    x = g_wide[request, token, value_head, c]
                else:
                    x = g[request, token, value_head, c]
                rate = T.alloc_var("float32", init=0.0)
                rate = 0.0
                if gate_form != 0:
                    rate = gate_rate(A_log[value_head])
                    if has_dt_bias != 0:
                        x = x + dt_bias[value_head, c]
                decay[c] = T.exp(log_decay(gate_form, x, rate, lower_bound))


@T.macro
def replay_products(
    t, threads, keys, decays, now, decay, k_base, q_base, k_log, q_log, sums, bonus, count, K, decay_size, flags
):
    """Everything about the token at hand that needs no value, a warp per job.

    now [2, K]: k and q of the token, raw; decay [decay_size]: its own. Out: k_base, q_base [K] = k w_base, q w_base;
    k_log, q_log [capacity + 1] = sums over K of k_j w_j k and k_j w_j q; sums [3] = k . k, q . q, and q . k (q . (bonus k) with
    read_first). Job 0 is the base, job j + 1 entry j, job count + 1 the sums. flags: (delta, read_first).
    """
    each = K // WARP
    warps = threads // WARP
    delta, read_first = flags
    weight = private(t, WARP, (each,), "float32")
    row = private(t, WARP, (each,), "float32")
    for warp in groups(t, threads, WARP):
        for turn in T.serial(T.ceildiv(count + 2, warps)):
            job = turn * warps + warp
            first = T.alloc_var("float32", init=0.0)
            second = T.alloc_var("float32", init=0.0)
            third = T.alloc_var("float32", init=0.0)
            first = 0.0
            second = 0.0
            third = 0.0
            if job <= count:
                for lane in lanes(t, WARP):
                    mine = own(t, lane)
                    for e in T.unroll(each):
                        if read_first:
                            weight[mine, e] = 1.0
                        else:
                            weight[mine, e] = decay[lane * each + e if decay_size > 1 else 0]
                    for newer in T.serial(count - job):
                        i = count - 1 - newer
                        if decay_size > 1:
                            for e in wide(t, each):
                                row[mine, e] = decays[i, lane * each + e]
                            for e in T.unroll(each):
                                weight[mine, e] = weight[mine, e] * row[mine, e]
                        else:
                            for e in T.unroll(each):
                                weight[mine, e] = weight[mine, e] * decays[i, 0]
                    if job == 0:
                        for e in T.unroll(each):
                            c = lane * each + e
                            k_base[c] = weight[mine, e] * now[0, c]
                            q_base[c] = weight[mine, e] * now[1, c]
                    else:
                        for e in T.unroll(each):
                            c = lane * each + e
                            row[mine, e] = T.cast(keys[job - 1, c], "float32") * weight[mine, e]
                            first = first + row[mine, e] * now[0, c]
                            second = second + row[mine, e] * now[1, c]
            if job == count + 1:
                for lane in lanes(t, WARP):
                    for e in T.unroll(each):
                        c = lane * each + e
                        first = first + now[0, c] * now[0, c]
                        second = second + now[1, c] * now[1, c]
                        if read_first:
                            third = third + now[1, c] * now[0, c] * bonus[c]
                        else:
                            third = third + now[1, c] * now[0, c]
            if job > 0:
                first = group_sum(t, first, WARP)
                second = group_sum(t, second, WARP)
                third = group_sum(t, third, WARP)
                for lane in lanes(t, WARP):
                    if lane == 0:
                        if job <= count:
                            k_log[job - 1] = first
                            q_log[job - 1] = second
                        if job == count + 1:
                            sums[0] = first
                            sums[1] = second
                            sums[2] = third


@T.macro
def read_row_sums(tile, held, k_base, q_base, k_log, q_log, writes, count, group, k_sums, q_sums, delta):
    """k_sums, q_sums [rows]: k^T S and q^T S of the group's rows, in all threads of the group, from the base and the log."""
    t = tile.t
    k_row = private(t, 1, (tile.width,), "float32")
    q_row = private(t, 1, (tile.width,), "float32")
    for r in T.unroll(tile.rows):
        k_sums[r] = 0.0
        q_sums[r] = 0.0
    for lane in lanes(t, ROW_LANES):
        for vector in T.unroll(tile.vectors):
            for half in T.unroll(tile.width // 4):
                for e in wide(t, 4):
                    q_row[0, half * 4 + e] = q_base[tile.key(vector, lane) + half * 4 + e]
                if delta:
                    for e in wide(t, 4):
                        k_row[0, half * 4 + e] = k_base[tile.key(vector, lane) + half * 4 + e]
            for r in T.unroll(tile.rows):
                for e in T.unroll(tile.width):
                    element = T.cast(held[tile.thread(group, lane), r, vector, e], "float32")
                    q_sums[r] = q_sums[r] + element * q_row[0, e]
                    if delta:
                        k_sums[r] = k_sums[r] + element * k_row[0, e]
        for turn in T.serial(T.ceildiv(count, ROW_LANES)):
            j = turn * ROW_LANES + lane
            if j < count:
                for r in T.unroll(tile.rows):
                    write = writes[j, r * tile.groups + group]
                    q_sums[r] = q_sums[r] + q_log[j] * write
                    if delta:
                        k_sums[r] = k_sums[r] + k_log[j] * write
    for r in T.unroll(tile.rows):
        q_sums[r] = group_sum(t, q_sums[r], ROW_LANES)
        if delta:
            k_sums[r] = group_sum(t, k_sums[r], ROW_LANES)


@T.macro
def fold_log(tile, held, base, keys, decays, writes, slot, value_head, first_v, count, decay_size):
    """base <- Diag(w_base) base + sum_j (k_j w_j) u_j^T over `count` entries; in registers (as rounded) and in memory."""
    t = tile.t
    weight = private(t, 1, (tile.width,), "float32")
    key = private(t, 1, (tile.width,), "float32")
    total = private(t, 1, (tile.rows, tile.width), "float32")
    for group in groups(t, tile.threads, ROW_LANES):
        for lane in lanes(t, ROW_LANES):
            for vector in T.unroll(tile.vectors):
                for e in T.unroll(tile.width):
                    weight[0, e] = 1.0
                    for r in T.unroll(tile.rows):
                        total[0, r, e] = 0.0
                for newer in T.serial(count):
                    j = count - 1 - newer
                    for e in T.unroll(tile.width):
                        c = tile.key(vector, lane) + e
                        key[0, e] = T.cast(keys[j, c], "float32") * weight[0, e]
                        weight[0, e] = weight[0, e] * decays[j, c if decay_size > 1 else 0]
                    for r in T.unroll(tile.rows):
                        for e in T.unroll(tile.width):
                            total[0, r, e] = total[0, r, e] + key[0, e] * writes[j, r * tile.groups + group]
                for r in T.unroll(tile.rows):
                    for e in T.unroll(tile.width):
                        held[tile.thread(group, lane), r, vector, e] = total[0, r, e] + weight[0, e] * T.cast(
                            held[tile.thread(group, lane), r, vector, e], "float32"
                        )
                    for e in tile.across():
                        base[slot, value_head, first_v + r * tile.groups + group, tile.key(vector, lane) + e] = held[
                            tile.thread(group, lane), r, vector, e
                        ]


@T.macro
def store_cursor(t, threads, cursor, slot, value_head, first_copy, copies, count, window):
    """The copies of the cursor that belong to this block's rows, once all its threads are done with the old ones."""
    sync(t)
    for thread in lanes(t, threads):
        if thread < copies:
            cursor[slot, value_head, first_copy + thread, 0] = count
            cursor[slot, value_head, first_copy + thread, 1] = window
