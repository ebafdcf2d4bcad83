"""Decay products of one chunk where a row has one decay: two plain products, and a factor for each pair of rows.

X[i, j] = (a_i . b_j) exp(G_i - G_j) for j <= i, with G the running sum of log decays. G_i - G_j must be right to float32
whatever lies before row j: a mask (g = -1000) or a thousand strong steps would leave a float32 G with none of the digits of a
weak decay after them. So G is the unevaluated sum of two float32 numbers, high + low, whose differences

    G_i - G_j = (high_i - high_j) + (low_i - low_j)

lose nothing: every addition keeps what it rounds off in `low` (Knuth's two-sum). Log decays are in base 2 and bounded from
below by LEAST, for which exp2 is 0 already: so -inf is a mask like others, no difference is inf - inf, and C of them stay
below 2^14, 48 bits of which reach to 2^-34. No exponent is positive, but by rounding, where no log decay is. NaN stays NaN.

The same sums give the factors of the gated rows: e^G_i and e^(G_last - G_i).
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.gates import inverse_norm
from kda_tl.kernels.tiles.operands import CORE_COLUMNS, WARPGROUP

LEAST = -256.0  # exp2 of it is below the smallest float32


@dataclass(frozen=True)
class RowFactors:
    """What scales the rows of a chunk, shared [C] float32 each: the running sums of log2 decays, the norms of q and k, and the
    factors from raw q and k to the gated rows."""

    high: Any
    low: Any
    q_norm: Any
    k_norm: Any
    q_decayed: Any
    k_decayed: Any
    k_to_end: Any

    @classmethod
    def allocate(cls, t: Any, rows: int) -> "RowFactors":
        return cls(*(t.shared((rows,), "float32") for _ in range(7)))


@T.macro
def add(total, other):
    """total += other, each high + low, local [2] float32."""
    high = T.alloc_var("float32", init=0.0)
    back = T.alloc_var("float32", init=0.0)
    high = total[0] + other[0]
    back = high - total[0]
    total[1] = (total[1] + other[1]) + ((total[0] - (high - back)) + (other[0] - back))
    total[0] = high


@T.macro
def bounded(log2_decay):
    """log2_decay, LEAST at least; NaN as it is, which a maximum would not keep."""
    return T.if_then_else(log2_decay < T.float32(LEAST), T.float32(LEAST), log2_decay)


@T.macro
def running_sums(t, high, low, rows):
    """high + low [rows] = the running sums of what high held, bounded. On a GPU for one warp, and rows is 64: a lane has two
    of them, which it may have stored itself a moment ago."""
    total, other = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
    if t.is_cpu:
        total[0] = 0.0
        total[1] = 0.0
        other[1] = 0.0
        for i in T.serial(rows):
            other[0] = bounded(high[i])
            add(total, other)
            high[i] = total[0]
            low[i] = total[1]
    else:
        lane = T.get_thread_binding() % 32
        first = T.alloc_var("float32", init=0.0)
        first = bounded(high[lane * 2])
        total[0] = first
        total[1] = 0.0
        other[0] = bounded(high[lane * 2 + 1])
        other[1] = 0.0
        add(total, other)
        for apart in [1, 2, 4, 8, 16]:
            other[0] = T.shfl_up(total[0], apart)
            other[1] = T.shfl_up(total[1], apart)
            if lane >= apart:
                add(total, other)
        high[lane * 2 + 1] = total[0]
        low[lane * 2 + 1] = total[1]
        other[0] = T.shfl_up(total[0], 1)
        other[1] = T.shfl_up(total[1], 1)
        total[0] = first
        total[1] = 0.0
        if lane > 0:
            add(total, other)
        high[lane * 2] = total[0]
        low[lane * 2] = total[1]


@T.macro
def store_factors(t, f, totals, shares, rows, normalize, decays):
    """All of f but the running sums, from these and the squares' totals, shared [shares, 2, rows]."""
    for i in t.parallel(rows):
        norm, factor = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
        for side in list(range(2)):
            norm[side] = 1.0
            factor[side] = 1.0
            if normalize != 0:
                norm[side] = totals[0, side, i]
                for share in list(range(1, shares)):
                    norm[side] = norm[side] + totals[share, side, i]
                norm[side] = inverse_norm(norm[side])
        if decays:
            factor[0] = T.exp2(f.high[i] + f.low[i])
            factor[1] = T.exp2((f.high[rows - 1] - f.high[i]) + (f.low[rows - 1] - f.low[i]))
        f.q_norm[i] = norm[0]
        f.k_norm[i] = norm[1]
        f.q_decayed[i] = norm[0] * factor[0]
        f.k_decayed[i] = norm[1] * factor[0]
        f.k_to_end[i] = norm[1] * factor[1]


@T.macro
def store_gated_rows(t, o, f, q_decayed, k_decayed, k_to_end, slot, head, delta):
    """The gated rows of one slot and head, each rounded once. o: `TokenTiles`."""
    if o.core:
        octet = T.alloc_local((CORE_COLUMNS,), o.tokens.dtype)
        for row, column in o.octets(T.get_thread_binding()):
            for s in T.vectorized(CORE_COLUMNS):
                octet[s] = o.tokens[o.at(0, row, column + s)]
            store_scaled(t, octet, f.q_decayed[row], q_decayed, slot, head, row, column)
            for s in T.vectorized(CORE_COLUMNS):
                octet[s] = o.tokens[o.at(1, row, column + s)]
            if delta:
                store_scaled(t, octet, f.k_decayed[row], k_decayed, slot, head, row, column)
            store_scaled(t, octet, f.k_to_end[row], k_to_end, slot, head, row, column)
    else:
        for i, d in t.parallel(o.rows, o.head_dim):
            q_decayed[slot, head, i, d] = T.cast(o.tokens[0, i, d], "float32") * f.q_decayed[i]
            if delta:
                k_decayed[slot, head, i, d] = T.cast(o.tokens[1, i, d], "float32") * f.k_decayed[i]
            k_to_end[slot, head, i, d] = T.cast(o.tokens[1, i, d], "float32") * f.k_to_end[i]


@T.macro
def store_scaled(t, octet, factor, out, slot, head, row, column):
    """Eight columns of a row of `out`, 16 bytes."""
    wide = T.alloc_local((2,), "float32")
    scaled = T.alloc_local((2,), "float32")  # not `wide`: see TileTarget.pair
    narrow = T.alloc_local((CORE_COLUMNS,), out.dtype)
    scale = T.alloc_var("float32", init=0.0)
    scale = factor
    for pair in list(range(CORE_COLUMNS // 2)):
        for s in t.pair():
            wide[s] = octet[pair * 2 + s]
        for s in t.pair():
            scaled[s] = wide[s] * scale
        for s in t.pair():
            narrow[pair * 2 + s] = scaled[s]
    for s in T.vectorized(CORE_COLUMNS):
        out[slot, head, row, column + s] = narrow[s]


@T.macro
def store_decayed_products(t, o, f, delta, decays):
    """products[0] (k with k, delta only) and [1] (q with k) of o, from its accumulators: what lies on and below the diagonal.

    A barrier stands between whoever read o's tokens and this, and between this and whoever reads products.
    """
    if o.core:
        # The accumulator: a warp has 16 rows; a thread, in two of them, two columns of every eight.
        thread = T.get_thread_binding()
        last_row = thread % WARPGROUP // 32 * 16 + 15
        first_row = thread % WARPGROUP // 32 * 16 + thread % 32 // 4
        first_column = thread // WARPGROUP * o.columns
        row_high, row_low = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
        row_norm = T.alloc_local((2, 2), "float32")
        column_high, column_low = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
        column_norm, weight = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
        for upper in list(range(2)):
            row_norm[0, upper] = f.k_norm[first_row + upper * 8]
            row_norm[1, upper] = f.q_norm[first_row + upper * 8]
            if decays:
                row_high[upper] = f.high[first_row + upper * 8]
                row_low[upper] = f.low[first_row + upper * 8]
        for group in list(range(o.columns // CORE_COLUMNS)):
            if first_column + group * 8 <= last_row:  # else all of the warp's rows end before these columns
                column = first_column + group * 8 + thread % 4 * 2
                for s in T.vectorized(2):
                    column_norm[s] = f.k_norm[column + s]
                if decays:
                    for s in T.vectorized(2):
                        column_high[s] = f.high[column + s]
                    for s in T.vectorized(2):
                        column_low[s] = f.low[column + s]
                for upper in list(range(2)):
                    for s in T.vectorized(2):
                        weight[s] = column_norm[s]
                        if decays:
                            weight[s] = column_norm[s] * T.exp2(
                                (row_high[upper] - column_high[s]) + (row_low[upper] - column_low[s])
                            )
                    if delta:
                        for s in T.vectorized(2):
                            o.products[0, first_row + upper * 8, column + s] = o.kk[group * 4 + upper * 2 + s] * (
                                weight[s] * row_norm[0, upper]
                            )
                    for s in T.vectorized(2):
                        o.products[1, first_row + upper * 8, column + s] = o.qk[group * 4 + upper * 2 + s] * (
                            weight[s] * row_norm[1, upper]
                        )
    else:
        for i, j in t.parallel(o.rows, o.rows):
            if j <= i:
                decay = T.alloc_var("float32", init=1.0)
                decay = f.k_norm[j]
                if decays:
                    decay = f.k_norm[j] * T.exp2((f.high[i] - f.high[j]) + (f.low[i] - f.low[j]))
                if delta:
                    o.products[0, i, j] = o.kk[i, j] * (decay * f.k_norm[i])
                o.products[1, i, j] = o.qk[i, j] * (decay * f.q_norm[i])
