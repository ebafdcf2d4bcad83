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

from kda_tl.kernels.tiles.products import product as add_product


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
def store_level_across_parts(t, q_rows, k_rows, decay, sums, left, right, chunk_size, head_dim, parts, h, read_first):
    """The operands of the level with half-blocks of h rows, of a part or more: a part lies on one side of one reference row."""
    size = chunk_size // parts
    for part, pair in t.each_column_pair(head_dim, parts):
        total = T.alloc_local((2,), "float32")  # not `factor`: see TileTarget.pair
        factor = T.alloc_local((2,), "float32")
        narrow = T.alloc_local((2,), left.dtype)
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
                    right[packed + (size - 1 - s), pair * 2 + j] = k_rows[t.at(part, pair, size - 1 - s, j)] * narrow[j]
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
                    left[packed + s, pair * 2 + j] = k_rows[t.at(part, pair, s, j)] * narrow[j]
                for j in t.pair():
                    left[chunk_size // 2 + packed + s, pair * 2 + j] = q_rows[t.at(part, pair, s, j)] * narrow[j]


@T.macro
def store_level_within_parts(t, q_rows, k_rows, decay, left, right, chunk_size, head_dim, parts, h, read_first):
    """The operands of the level with half-blocks of h rows, less than a part."""
    size = chunk_size // parts
    for part, pair in t.each_column_pair(head_dim, parts):
        factor = T.alloc_local((2,), "float32")
        narrow = T.alloc_local((2,), left.dtype)
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
                    right[packed + h - 1 - s, pair * 2 + j] = k_rows[t.at(part, pair, reference - 1 - s, j)] * narrow[j]
            for j in t.pair():
                factor[j] = 1.0
            for s in T.unroll(h):
                if s > 0:
                    for j in t.pair():
                        factor[j] = factor[j] * decay[t.at(part, pair, reference + s - (1 if read_first else 0), j)]
                    for j in t.pair():
                        narrow[j] = factor[j]
                    for j in t.pair():
                        left[packed + s, pair * 2 + j] = k_rows[t.at(part, pair, reference + s, j)] * narrow[j]
                    for j in t.pair():
                        left[chunk_size // 2 + packed + s, pair * 2 + j] = (
                            q_rows[t.at(part, pair, reference + s, j)] * narrow[j]
                        )
                else:
                    for j in t.pair():
                        left[packed, pair * 2 + j] = k_rows[t.at(part, pair, reference, j)]
                    for j in t.pair():
                        left[chunk_size // 2 + packed, pair * 2 + j] = q_rows[t.at(part, pair, reference, j)]


@T.macro
def store_level_products(t, product, qk, kk, chunk_size, h):
    """Scatters a level's product [C, C / 2] (k rows over q rows) to the pairs it stands for."""
    for i, j in t.parallel(chunk_size, chunk_size // 2):
        i_half = i % (chunk_size // 2)
        if i_half // h == j // h:
            row = i_half // h * 2 * h + h + i_half % h
            column = j // h * 2 * h + j % h
            if i < chunk_size // 2:
                kk[row, column] = product[i, j]
            else:
                qk[row, column] = product[i, j]


@T.macro
def decay_products(t, q_rows, k_rows, decay, sums, left, right, product, qk, kk, chunk_size, head_dim, parts, bonus=None):
    """Fills the strictly lower part of kk (k with k) and the lower part of qk (q with k); both [C, C], zero on entry.

    bonus: shared [K], or None. With it the products are RWKV6's (`read_first`): diagonal entries of qk are weighted by it, and
    kk is not meaningful.
    q_rows, k_rows, decay: `column_pairs` of [C, K]; rows past the chunk's end hold 0, 0 and 1. sums: `PartSums` of the decays.
    Scratch: left, right shared [C, K] and [C / 2, K]; product fragment [C, C / 2].
    """
    read_first = bonus is not None
    size = chunk_size // parts
    for h in half_blocks(chunk_size):
        if h >= size:
            store_level_across_parts(t, q_rows, k_rows, decay, sums, left, right, chunk_size, head_dim, parts, h, read_first)
        else:
            store_level_within_parts(t, q_rows, k_rows, decay, left, right, chunk_size, head_dim, parts, h, read_first)
        T.clear(product)
        add_product(t, left, right, product, chunk_size, chunk_size // 2, head_dim, transpose_B=True)
        store_level_products(t, product, qk, kk, chunk_size, h)
    for side in [0, 1]:
        # The diagonal, whose decay is 1: all q rows with the k rows of one half at a time.
        for part, pair in t.each_column_pair(head_dim, parts):
            for row in T.unroll(size):
                for j in t.pair():
                    if read_first:
                        left[part * size + row, pair * 2 + j] = q_rows[t.at(part, pair, row, j)] * bonus[pair * 2 + j]
                    else:
                        left[part * size + row, pair * 2 + j] = q_rows[t.at(part, pair, row, j)]
            if T.truncdiv(part, parts // 2) == side:
                for row in T.unroll(size):
                    for j in t.pair():
                        right[part % (parts // 2) * size + row, pair * 2 + j] = k_rows[t.at(part, pair, row, j)]
        T.clear(product)
        add_product(t, left, right, product, chunk_size, chunk_size // 2, head_dim, transpose_B=True)
        for i, j in t.parallel(chunk_size, chunk_size // 2):
            if i == side * (chunk_size // 2) + j:
                qk[i, i] = product[i, j]
