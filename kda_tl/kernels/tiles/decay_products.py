"""Decay products of one chunk by halving: exact for any gate, matrix products throughout.

X[i, j] = sum_c a[i, c] b[j, c] exp(G[i, c] - G[j, c]) for j < i. At the level with half-blocks of h rows, the pairs whose rows
part there share a block of 2h rows: j in its first half, i in its second. With the first row of the second half as the
reference r,

    exp(G_i - G_j) = (product of d_s, r < s <= i) * (product of d_s, j < s <= r),      d_s = exp(g_s) in [0, 1],

both factors are products of decays, running outward from r. So they never exceed 1, whatever the gate; a mask (g = -1000,
d = 0) takes nothing from its neighbours, as it would in a cumulative sum; and no factor sees a row later than the one it
scales. log2(C) levels cover every pair once, and one exponential per element serves them all.

A level uses half of the rows on either side: its k rows and q rows stand together in one left operand of C rows. The decays and
the rows of q and k stay in registers (`TileTarget.column_pairs`), where running products need no other thread. A product that
begins in another part of the rows starts from sums of logs (`PartSums`), outward from r as well.

Where a token reads the state before its own decay (`read_first`, RWKV6), a q row i stops at d_(i-1): then d_r belongs to the
left factor, and the right one ends at d_(r-1). The k rows, which would need it otherwise, have no products there.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.operands import WARPGROUP, describe, finish_product, issue_product, multiply
from kda_tl.kernels.tiles.target import barrier


@dataclass(frozen=True)
class PartSums:
    """Sums of log2 decays over each part of the rows, shared [parts, K] float32: all of it, its first row, all but that."""

    whole: Any
    first: Any
    rest: Any


def half_blocks(chunk_size: int) -> list[int]:
    """The half-block sizes, largest first."""
    return [chunk_size >> level for level in range(1, chunk_size.bit_length())]


@T.macro
def store_level_across_parts(t, q_rows, k_rows, decay, sums, o, chunk_size, head_dim, parts, h, read_first):
    """The operands of the level with half-blocks of h rows, of a part or more: a part lies on one side of one reference row."""
    size = chunk_size // parts
    for part, pair in t.each_column_pair(head_dim, parts):
        total = T.alloc_local((2,), "float32")  # not `factor`: see TileTarget.pair
        factor = T.alloc_local((2,), "float32")
        narrow = T.alloc_local((2,), o.left.dtype)
        reference = T.truncdiv(part * size, 2 * h) * (2 * h // size) + h // size  # the part whose first row it is
        packed = T.truncdiv(part * size, 2 * h) * h + part * size % h
        if part < reference:
            for j in t.pair():
                total[j] = 0.0 if read_first else sums.first[reference, pair * 2 + j]
            for between in list(range(1, h // size)):
                if part + between < reference:
                    for j in t.pair():
                        total[j] = total[j] + sums.whole[part + between, pair * 2 + j]
            for j in t.pair():
                factor[j] = T.exp2(total[j])
            for s in T.unroll(size):
                for j in t.pair():
                    narrow[j] = factor[j]
                for j in t.pair():
                    o.right[o.at(packed + (size - 1 - s), pair, j)] = k_rows[t.at(part, pair, size - 1 - s, j)] * narrow[j]
                for j in t.pair():
                    factor[j] = factor[j] * decay[t.at(part, pair, size - 1 - s, j)]
        else:
            for j in t.pair():
                total[j] = 0.0
            for behind in list(range(1, h // size)):
                if part - behind >= reference:
                    for j in t.pair():
                        total[j] = total[j] + (
                            sums.whole[part - behind, pair * 2 + j]
                            if read_first
                            else T.if_then_else(
                                part - behind == reference,
                                sums.rest[part - behind, pair * 2 + j],
                                sums.whole[part - behind, pair * 2 + j],
                            )
                        )
            for j in t.pair():
                factor[j] = T.exp2(total[j])
            if not read_first:
                # The reference row itself is not decayed.
                if part > reference:
                    for j in t.pair():
                        factor[j] = factor[j] * decay[t.at(part, pair, 0, j)]
            for s in T.unroll(size):
                if s > 0:
                    for j in t.pair():
                        factor[j] = factor[j] * decay[t.at(part, pair, s - (1 if read_first else 0), j)]
                for j in t.pair():
                    narrow[j] = factor[j]
                for j in t.pair():
                    o.left[o.at(packed + s, pair, j)] = k_rows[t.at(part, pair, s, j)] * narrow[j]
                for j in t.pair():
                    o.left[o.at(chunk_size // 2 + packed + s, pair, j)] = q_rows[t.at(part, pair, s, j)] * narrow[j]


@T.macro
def store_level_within_parts(t, q_rows, k_rows, decay, o, chunk_size, head_dim, parts, h, read_first):
    """The operands of the level with half-blocks of h rows, less than a part."""
    size = chunk_size // parts
    for part, pair in t.each_column_pair(head_dim, parts):
        factor = T.alloc_local((2,), "float32")
        narrow = T.alloc_local((2,), o.left.dtype)
        for block in T.unroll(size // 2 // h):
            packed = part * (size // 2) + block * h
            reference = block * 2 * h + h
            for j in t.pair():
                factor[j] = 1.0
            for s in T.unroll(h):
                if not read_first or s > 0:
                    for j in t.pair():
                        factor[j] = factor[j] * decay[t.at(part, pair, reference - s, j)]
                for j in t.pair():
                    narrow[j] = factor[j]
                for j in t.pair():
                    o.right[o.at(packed + h - 1 - s, pair, j)] = k_rows[t.at(part, pair, reference - 1 - s, j)] * narrow[j]
            for j in t.pair():
                factor[j] = 1.0
            for s in T.unroll(h):
                if s > 0:
                    for j in t.pair():
                        factor[j] = factor[j] * decay[t.at(part, pair, reference + s - (1 if read_first else 0), j)]
                    for j in t.pair():
                        narrow[j] = factor[j]
                    for j in t.pair():
                        o.left[o.at(packed + s, pair, j)] = k_rows[t.at(part, pair, reference + s, j)] * narrow[j]
                    for j in t.pair():
                        o.left[o.at(chunk_size // 2 + packed + s, pair, j)] = (
                            q_rows[t.at(part, pair, reference + s, j)] * narrow[j]
                        )
                else:
                    for j in t.pair():
                        o.left[o.at(packed, pair, j)] = k_rows[t.at(part, pair, reference, j)]
                    for j in t.pair():
                        o.left[o.at(chunk_size // 2 + packed, pair, j)] = q_rows[t.at(part, pair, reference, j)]


@T.macro
def store_level_products(t, o, products, chunk_size, h):
    """Scatters a level's product (k rows over q rows) to the pairs it stands for."""
    half = chunk_size // 2
    if o.core:
        # wgmma's accumulator: a warp has 16 rows; a thread, in two of them, two columns of every eight.
        thread = T.get_thread_binding()
        columns = half * WARPGROUP // o.threads
        side = thread % WARPGROUP // 32 * 16 // half
        first_row = thread % WARPGROUP // 32 * 16 % half + thread % 32 // 4
        first_pair = thread // WARPGROUP * (columns // 2) + thread % 4
        for group in list(range(columns // 8)):
            for upper in list(range(2)):
                if h > 8 or columns % 16 or upper == group % 2:  # else these eight rows and columns have no pair
                    i = first_row + upper * 8
                    pair = first_pair + group * 4
                    value = group * 4 + upper * 2
                    if h > 1:
                        column_pair = pair // (h // 2) * h + pair % (h // 2)
                        if i // h == pair // (h // 2):
                            for s in T.vectorized(2):
                                products[side, i // h * 2 * h + h + i % h, column_pair * 2 + s] = o.product[value + s]
                    elif i // 2 == pair:  # one of its two columns, j = i
                        products[side, i * 2 + 1, i * 2] = T.Select(i % 2 == 0, o.product[value], o.product[value + 1])
    else:
        for i, j in t.parallel(chunk_size, half):
            i_half = i % half
            if i_half // h == j // h:
                products[i // half, i_half // h * 2 * h + h + i_half % h, j // h * 2 * h + j % h] = o.product[i, j]


@T.macro
def decay_products(t, q_rows, k_rows, decay, sums, diagonal, o, products, chunk_size, head_dim, parts, read_first):
    """Fills the strictly lower part of products[0] (k with k) and the lower part of products[1] (q with k), shared [2, C, >= C]
    float32. What lies above is not written.

    q_rows, k_rows, decay: `column_pairs` of [C, K]; rows past the chunk's end hold 0, 0 and 1. sums: `PartSums` of the decays.
    diagonal: shared [C], q_i with k_i, whose decay is 1. With read_first the products are RWKV6's, and those of
    k with k not meaningful.
    Whoever wrote sums and diagonal has passed a barrier; products may be read after the next one. Scratch: o, the
    `LevelOperands` of C rows.
    """
    size = chunk_size // parts
    levels = half_blocks(chunk_size)
    if o.core:
        desc_left, desc_right = T.alloc_wgmma_desc(), T.alloc_wgmma_desc()
        describe(o, desc_left, desc_right)
    for level, h in list(enumerate(levels)):
        if o.core and level > 0:
            finish_product(o)
            T.sync_threads()
        if h >= size:
            store_level_across_parts(t, q_rows, k_rows, decay, sums, o, chunk_size, head_dim, parts, h, read_first)
        else:
            store_level_within_parts(t, q_rows, k_rows, decay, o, chunk_size, head_dim, parts, h, read_first)
        if o.core:
            if level > 0:
                store_level_products(t, o, products, chunk_size, h * 2)
            T.fence_proxy_async()
            T.sync_threads()
            issue_product(o, desc_left, desc_right)
        else:
            barrier(t)
            multiply(t, o)
            barrier(t)
            store_level_products(t, o, products, chunk_size, h)
    if o.core:
        finish_product(o)
        store_level_products(t, o, products, chunk_size, levels[-1])
    for i in t.parallel(chunk_size):
        products[1, i, i] = diagonal[i]
