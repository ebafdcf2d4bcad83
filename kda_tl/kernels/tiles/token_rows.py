"""The tokens of a chunk as `TileTarget.column_pairs` has them: two columns of a part of the rows to a thread. Their norms."""

import tilelang.language as T

from kda_tl.kernels.tiles.gates import inverse_norm
from kda_tl.kernels.tiles.target import barrier
from kda_tl.kernels.tiles.warp_sums import sum_over_warp

ROWS_TOGETHER = 16  # rows whose sums a thread holds at once


def raw_at(t, staged, plane, part, pair, row, j, size, K):
    """Where an element of the tokens lies: in a plane of shared memory, or in registers."""
    return (plane, (part * size + row) * K + pair * 2 + j) if staged else t.at(part, pair, row, j)


@T.macro
def stage_rows(x, tile, plane, batch, start, rows, head, C, K, parts):
    """Starts the copy of a chunk's rows of x into a plane of `tile`, 16 bytes a time; rows past the end become 0."""
    threads, columns = parts * K // 2, 8
    thread = T.get_thread_binding()
    for step in T.unroll(C * K // columns // threads):
        row = step * (threads * columns // K) + thread // (K // columns)
        column = thread % (K // columns) * columns
        T.ptx_cp_async(
            T.access_ptr(tile[plane, row * K + column], "w", columns),
            T.access_ptr(x[batch, start + row, head, column], "r", columns),
            columns,
            predicate=row < rows,
        )


@T.macro
def load_rows(t, x, raw, batch, start, rows, head, C, K, parts):
    """A thread's rows of x, all in flight together.

    Rows past the end read the last one instead, and then count for nothing: a branch around each load would make it wait for
    the one before. A whole chunk has constants, and its addresses are one sum each.
    """
    size = C // parts
    for part, pair in t.each_column_pair(K, parts):
        first_row = T.alloc_var("int64", init=0)
        first_row = start + part * size
        if rows == C:
            for r in T.unroll(size):
                for j in t.pair():
                    raw[t.at(part, pair, r, j)] = x[batch, first_row + r, head, pair * 2 + j]
        else:
            for r in T.unroll(size):
                i = T.min(part * size + r, rows - 1) - part * size
                for j in t.pair():
                    raw[t.at(part, pair, r, j)] = x[batch, first_row + i, head, pair * 2 + j]


@T.macro
def store_norms(t, staged, raw_q, raw_k, bonus, totals, norms, diagonal, rows, normalize, C, K, parts):
    """norms[0], norms[1] [C]: the factors of the rows of q and k; 0 past the end. diagonal [C]: q_i k_i (bonus) of those rows.

    totals: scratch, shared [3, K / 64, C]. All have passed a barrier when it returns.
    """
    if normalize != 0:
        store_totals(t, staged, raw_q, raw_k, bonus, totals, C, K, parts, True)
    else:
        store_totals(t, staged, raw_q, raw_k, bonus, totals, C, K, parts, False)
    barrier(t)
    for i in t.parallel(C):
        total, factor = T.alloc_local((3,), "float32"), T.alloc_local((2,), "float32")
        for side in list(range(3)):
            total[side] = totals[side, 0, i]
            if K > 64 and not t.is_cpu:
                total[side] = total[side] + totals[side, 1, i]
        for side in list(range(2)):
            factor[side] = 0.0
            if i < rows:
                factor[side] = 1.0
                if normalize != 0:
                    factor[side] = inverse_norm(total[side])
            norms[side, i] = factor[side]
        diagonal[i] = T.if_then_else(i < rows, factor[0] * factor[1] * total[2], 0.0)
    barrier(t)


@T.macro
def store_totals(t, staged, raw_q, raw_k, bonus, totals, C, K, parts, squares):
    """totals[0, :, i], [1, :, i], [2, :, i]: sums over row i of q^2 and k^2, where wanted, and of q k (bonus)."""
    size = C // parts
    count = min(size, ROWS_TOGETHER)
    if t.is_cpu:
        for side, i in T.grid(3, C):
            totals[side, 0, i] = 0.0
    for part, pair in t.each_column_pair(K, parts):
        sums = T.alloc_local((3, count), "float32")
        x, y = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
        for first in list(range(0, size, count)):
            for r in T.unroll(count):
                for j in t.pair():
                    x[j] = raw_q[raw_at(t, staged, 0, part, pair, first + r, j, size, K)]
                for j in t.pair():
                    y[j] = raw_k[raw_at(t, staged, 1, part, pair, first + r, j, size, K)]
                if squares:
                    sums[0, r] = x[0] * x[0] + x[1] * x[1]
                    sums[1, r] = y[0] * y[0] + y[1] * y[1]
                if bonus is not None:
                    for j in t.pair():
                        y[j] = y[j] * bonus[pair * 2 + j]
                sums[2, r] = x[0] * y[0] + x[1] * y[1]
            for side in list(range(0 if squares else 2, 3)):
                if t.is_cpu:
                    for r in T.serial(count):
                        totals[side, 0, part * size + first + r] = totals[side, 0, part * size + first + r] + sums[side, r]
                else:
                    lane = T.get_thread_binding() % 32
                    sum_over_warp(sums, side, lane, count)
                    if lane % (32 // count) == 0:
                        totals[side, pair // 32, part * size + first + lane // (32 // count)] = sums[side, 0]
