"""How a decode step of one token reads and folds the base: four lanes share a row, as mma's operands want it.

A bfloat16 base is the left operand of mma as it lies in memory; k and q are columns of the right one, each as three bfloat16
that sum to its float32, so that products are exact and sums float32. Eight conversions and sixteen multiply-adds of every lane
are one instruction of the warp then, and lanes add up what they share in two steps. Other bases take multiply-adds.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kda_tl.kernels.deltalog_replay import elements, low_part, near_bits, once_each, upper_part, with_low
from kda_tl.kernels.tiles.lanes import group_sum, groups, lanes, own, private, wide
from kda_tl.kernels.tiles.target import TileTarget

QUAD = 4
CORE_ROWS = 8  # quads of a warp: rows of half an mma operand
PARTS = 3  # bfloat16 terms of a float32


@dataclass(frozen=True)
class QuadTile:
    """Rows of the base [V, K] in registers: a thread has `rows` rows, 8 apart, a quarter of the keys of each."""

    t: TileTarget
    threads: int
    rows: int
    K: int
    state_dtype: str

    @property
    def row_lanes(self) -> int:
        return QUAD

    @property
    def width(self) -> int:
        """Elements of one access."""
        return elements(self.state_dtype)

    @property
    def vectors(self) -> int:
        return self.K // (QUAD * self.width)

    @property
    def fold_rows(self) -> int:
        """Rows that a fold has in float32 at a time: 16 registers of them."""
        return min(self.rows, 16 // self.width)

    @property
    def by_mma(self) -> bool:
        return self.t.has_mma and self.state_dtype == "bfloat16" and self.rows % 2 == 0

    def alloc(self) -> Any:
        return private(self.t, self.threads, (self.rows, self.vectors, self.width), self.state_dtype)

    def operand(self) -> Any:
        """k w_base and q w_base in shared memory: rows, or columns for mma, 16 banks past each other."""
        if self.by_mma:
            return self.t.shared((CORE_ROWS, self.K + 32), "bfloat16")
        return self.t.shared((2, self.K), "float32")

    def thread(self, quad: Any, lane: Any) -> Any:
        return own(self.t, quad * QUAD + lane)

    def row(self, quad: Any, i: Any) -> Any:
        """Of the block, the i-th of a quad's rows."""
        return quad // CORE_ROWS * (CORE_ROWS * self.rows) + quad % CORE_ROWS + i * CORE_ROWS

    def key(self, vector: Any, lane: Any) -> Any:
        """The first key of an access."""
        return (vector * QUAD + lane) * self.width


@T.macro
def load_quads(tile, held, base, slot, value_head, first_v):
    for quad in groups(tile.t, tile.threads, QUAD):
        for lane in lanes(tile.t, QUAD):
            for r in T.unroll(tile.rows):
                for vector in T.unroll(tile.vectors):
                    for e in wide(tile.t, tile.width):
                        held[tile.thread(quad, lane), r, vector, e] = base[
                            slot, value_head, first_v + tile.row(quad, r), tile.key(vector, lane) + e
                        ]


@T.macro
def split_token(tile, columns, now, base_weight):
    """columns [8, ..] bfloat16: k w_base and q w_base in turn, three terms of each, and zeros."""
    t, threads, K = tile.t, tile.threads, tile.K
    for step in list(range(-(-K // threads))):
        for thread in lanes(t, threads):
            c = step * threads + thread
            if c < K:
                for which in list(range(2)):
                    rest = T.alloc_var("float32", init=0.0)
                    term = T.alloc_var("bfloat16", init=0)
                    rest = now[which, c] * base_weight[c]
                    for part in list(range(PARTS)):
                        term = T.cast(rest, "bfloat16")
                        columns[part * 2 + which, c] = term
                        rest = rest - T.cast(term, "float32")
                    columns[PARTS * 2 + which, c] = 0


@T.macro
def read_by_mma(tile, held, columns, k_sums, q_sums):
    """As `read_base`, of what `split_token` has made of k w_base and q w_base."""
    pairs = tile.rows // 2
    left = T.alloc_local((8,), "bfloat16")
    right = T.alloc_local((8,), "bfloat16")
    total = T.alloc_local((pairs, 4), "float32")
    for pair in T.unroll(pairs):
        for e in T.unroll(4):
            total[pair, e] = 0.0
    for quad in groups(tile.t, tile.threads, QUAD):
        for lane in lanes(tile.t, QUAD):
            for vector in T.unroll(tile.vectors):
                for e in T.vectorized(8):
                    right[e] = columns[quad % CORE_ROWS, tile.key(vector, lane) + e]
                for half in T.unroll(2):
                    for pair in T.unroll(pairs):
                        for piece in T.unroll(4):
                            for e in T.vectorized(2):
                                left[piece * 2 + e] = held[0, pair * 2 + piece % 2, vector, half * 4 + piece // 2 * 2 + e]
                        T.ptx_mma(
                            "float32", "m16n8k16", "row", "col", "bf16", "bf16", "fp32", left.data, 0, right.data, half * 4,
                            total.data, pair * 4, T.bool(False),
                        )  # fmt: skip
    for pair in T.unroll(pairs):
        for row in T.unroll(2):
            k_sums[0, pair * 2 + row] = total[pair, row * 2]
            q_sums[0, pair * 2 + row] = total[pair, row * 2 + 1]


@T.macro
def read_entries(tile, dots, writes, count, quad, k_sums, q_sums, k_total, q_total, delta):
    """k_total, q_total [rows]: k^T S and q^T S of the quad's rows, in all its lanes: the base's sums plus the log's."""
    t = tile.t
    for r in T.unroll(tile.rows):
        k_total[r] = 0.0
        q_total[r] = 0.0
    for lane in lanes(t, QUAD):
        for r in T.unroll(tile.rows):
            q_total[r] = q_total[r] + q_sums[tile.thread(quad, lane), r]
            if delta:
                k_total[r] = k_total[r] + k_sums[tile.thread(quad, lane), r]
        for turn in once_each(t, T.ceildiv(count, QUAD)):
            j = turn * QUAD + lane
            if j < count:
                for r in T.unroll(tile.rows):
                    q_total[r] = q_total[r] + dots[j, 1] * writes[j, tile.row(quad, r)]
                    if delta:
                        k_total[r] = k_total[r] + dots[j, 0] * writes[j, tile.row(quad, r)]
    for r in T.unroll(tile.rows):
        q_total[r] = group_sum(t, q_total[r], QUAD)
        if delta:
            k_total[r] = group_sum(t, k_total[r], QUAD)


@T.macro
def fetch_accesses(tile, stage, pieces, words, base, base_low, row, slot, value_head, first_v, quad, lane, vector):
    """One access of each of the thread's rows, and its low bits, into stage `stage` of pieces and words."""
    for r in T.unroll(tile.rows):
        for e in wide(tile.t, tile.width):
            pieces[0, stage, r, e] = base[slot, value_head, first_v + tile.row(quad, r), tile.key(vector, lane) + e]
        if tile.state_dtype == "bfloat16":
            words[0, stage, r] = base_low[row, first_v + tile.row(quad, r), vector * QUAD + lane]


@T.macro
def fold_quads(tile, base, base_low, row, weighted, base_weight, writes, slot, value_head, first_v, count):
    """base <- Diag(w_base) base + sum_j (k_j w_j) u_j^T over `count` entries.

    The base is read again, from a cache, two accesses of every row at once: kept in registers until here, it would cost every
    step that folds nothing. A bfloat16 base takes 4 more bits per element from base_low [.., V, K / 8] and leaves them there,
    as `kda_tl.ops.deltalog_low` says. Elements go back into the array that they came in: nvcc splits the stores of another.
    """
    t = tile.t
    has_low = tile.state_dtype == "bfloat16"
    pieces = private(t, 1, (2, tile.rows, tile.width), tile.state_dtype)
    words = private(t, 1, (2, tile.rows), "int32")
    weight = private(t, 1, (tile.width,), "float32")
    write = private(t, 1, (tile.fold_rows,), "float32")
    total = private(t, 1, (tile.fold_rows, tile.width), "float32")
    for quad in groups(t, tile.threads, QUAD):
        for lane in lanes(t, QUAD):
            for two in once_each(t, tile.vectors // 2):
                for stage in list(range(2)):
                    fetch_accesses(
                        tile, stage, pieces, words, base, base_low, row, slot, value_head, first_v, quad, lane, two * 2 + stage
                    )  # fmt: skip
                for stage in list(range(2)):
                    vector = two * 2 + stage
                    for part in T.unroll(tile.rows // tile.fold_rows):
                        for half in T.unroll(tile.width // 4):
                            for e in wide(t, 4):
                                weight[0, half * 4 + e] = base_weight[tile.key(vector, lane) + half * 4 + e]
                        for r in T.unroll(tile.fold_rows):
                            for e in T.unroll(tile.width):
                                element = T.cast(pieces[0, stage, part * tile.fold_rows + r, e], "float32")
                                if has_low:
                                    total[0, r, e] = weight[0, e] * with_low(
                                        element, words[0, stage, part * tile.fold_rows + r], e
                                    )
                                else:
                                    total[0, r, e] = weight[0, e] * element
                        for j in once_each(t, count):
                            for half in T.unroll(tile.width // 4):
                                for e in wide(t, 4):
                                    weight[0, half * 4 + e] = weighted[j, tile.key(vector, lane) + half * 4 + e]
                            for r in T.unroll(tile.fold_rows):
                                write[0, r] = writes[j, tile.row(quad, part * tile.fold_rows + r)]
                            for r in T.unroll(tile.fold_rows):
                                for e in T.unroll(tile.width):
                                    total[0, r, e] = total[0, r, e] + weight[0, e] * write[0, r]
                        for r in T.unroll(tile.fold_rows):
                            v = first_v + tile.row(quad, part * tile.fold_rows + r)
                            if has_low:
                                words[0, stage, part * tile.fold_rows + r] = 0
                                for e in T.unroll(tile.width):
                                    near = near_bits(total[0, r, e])
                                    pieces[0, stage, part * tile.fold_rows + r, e] = upper_part(near)
                                    words[0, stage, part * tile.fold_rows + r] = words[
                                        0, stage, part * tile.fold_rows + r
                                    ] | low_part(near, e)
                                base_low[row, v, vector * QUAD + lane] = words[0, stage, part * tile.fold_rows + r]
                            else:
                                for e in T.unroll(tile.width):
                                    pieces[0, stage, part * tile.fold_rows + r, e] = total[0, r, e]
                            for e in wide(t, tile.width):
                                base[slot, value_head, v, tile.key(vector, lane) + e] = pieces[
                                    0, stage, part * tile.fold_rows + r, e
                                ]
