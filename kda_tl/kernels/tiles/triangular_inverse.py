"""Inverse of a unit lower-triangular tile: 16 x 16 blocks by forward substitution, then merged by products.

    [ L11   0  ]^-1   [      X11         0  ]
    [ L21  L22 ]    = [ -X22 L21 X11    X22 ]

All of it in float32 on the ordinary units: a 16 x 16 product is too small for a block-wide T.gemm ("No valid warp partition"),
and one form that every target lowers, with no rounding of its operands, is worth more than tensor cores here.
"""

import tilelang.language as T

BASE = 16


@T.macro
def unit_lower_inverse(t, lower, row_scale, inverse, size, threads):
    """inverse = (I + Diag(row_scale) lower)^-1.

    lower: [size, size] shared float32, read below its diagonal only. row_scale: [size] shared float32. inverse: [size, size]
    shared float32, may not alias lower. threads: of the block; every loop below has as many iterations or a multiple, because a
    loop for some of the threads only would get a barrier for these, and the next loop none.
    """
    for i, j in t.parallel(size, size):
        inverse[i, j] = 0.0
    # Whole warps for every block, a lane for every column of it: a row of `lower` is then one address for the warp.
    for block, column in t.parallel(size // BASE, threads * BASE // size):
        if column < BASE:
            x = T.alloc_local((BASE,), "float32")
            for i in list(range(BASE)):
                total = T.alloc_var("float32", init=0.0)
                total = 0.0
                for m in list(range(i)):
                    total = total + lower[block * BASE + i, block * BASE + m] * x[m]
                x[i] = T.if_then_else(column == i, 1.0, 0.0) - row_scale[block * BASE + i] * total
            for i in list(range(BASE)):
                inverse[block * BASE + i, block * BASE + column] = x[i]
    for half in [BASE << level for level in range((size // BASE).bit_length() - 1)]:
        merge(t, lower, row_scale, inverse, size, half, threads * 2 // size)


@T.macro
def merge(t, lower, row_scale, inverse, size, half, lanes):
    """From inverses of the diagonal blocks of `half` rows to those of twice as many. A thread takes half / lanes columns."""
    strip = half // lanes
    for pair, i, j in t.parallel(size // (2 * half), half, lanes):
        # L21 X11, kept in the block above the diagonal, which is unused until it is cleared below.
        total = T.alloc_local((strip,), "float32")
        for s in T.serial(strip):
            total[s] = 0.0
        for m in T.unroll(half):
            for s in T.vectorized(strip):
                total[s] = (
                    total[s]
                    + lower[pair * 2 * half + half + i, pair * 2 * half + m]
                    * inverse[pair * 2 * half + m, pair * 2 * half + j * strip + s]
                )
        for s in T.vectorized(strip):
            inverse[pair * 2 * half + i, pair * 2 * half + half + j * strip + s] = (
                row_scale[pair * 2 * half + half + i] * total[s]
            )
    for pair, i, j in t.parallel(size // (2 * half), half, lanes):
        total = T.alloc_local((strip,), "float32")
        for s in T.serial(strip):
            total[s] = 0.0
        for m in T.unroll(half):
            for s in T.vectorized(strip):
                total[s] = (
                    total[s]
                    + inverse[pair * 2 * half + half + i, pair * 2 * half + half + m]
                    * inverse[pair * 2 * half + m, pair * 2 * half + half + j * strip + s]
                )
        for s in T.vectorized(strip):
            inverse[pair * 2 * half + half + i, pair * 2 * half + j * strip + s] = -total[s]
    for pair, i, j in t.parallel(size // (2 * half), half, half):
        inverse[pair * 2 * half + i, pair * 2 * half + half + j] = 0.0
