"""Inverse of a unit lower-triangular tile: 16 x 16 blocks by forward substitution, then merged by products.

    [ L11   0  ]^-1   [      X11         0  ]
    [ L21  L22 ]    = [ -X22 L21 X11    X22 ]

All of it in float32 on the ordinary units: a 16 x 16 product is too small for a block-wide T.gemm ("No valid warp partition"),
and one form that every target lowers, with no rounding of its operands, is worth more than tensor cores here.
"""

import tilelang.language as T


@T.macro
def unit_lower_inverse(t, lower, inverse, size, base=16):
    """inverse = (I + lower)^-1. lower [size, size] shared float32, read below its diagonal only; inverse may not alias it."""
    for i, j in t.parallel(size, size):
        inverse[i, j] = 0.0
    for column in t.parallel(size):
        first = column // base * base
        inverse[column, column] = 1.0
        for i in T.serial(base):
            row = first + i
            if row > column:
                total = T.alloc_var("float32", init=0.0)
                total = 0.0
                for m in T.serial(base):
                    if first + m >= column and m < i:
                        total = total + lower[row, first + m] * inverse[first + m, column]
                inverse[row, column] = -total
    for half in [base << shift for shift in range((size // base).bit_length() - 1)]:
        for pair, i, j in t.parallel(size // (2 * half), half, half):
            # L21 X11, kept in the block above the diagonal, which is still unused there.
            low = pair * 2 * half
            total = T.alloc_var("float32", init=0.0)
            total = 0.0
            for m in T.serial(half):
                total = total + lower[low + half + i, low + m] * inverse[low + m, low + j]
            inverse[low + i, low + half + j] = total
        for pair, i, j in t.parallel(size // (2 * half), half, half):
            low = pair * 2 * half
            total = T.alloc_var("float32", init=0.0)
            total = 0.0
            for m in T.serial(half):
                total = total + inverse[low + half + i, low + half + m] * inverse[low + m, low + half + j]
            inverse[low + half + i, low + j] = -total
        for pair, i, j in t.parallel(size // (2 * half), half, half):
            inverse[pair * 2 * half + i, pair * 2 * half + half + j] = 0.0
