"""Sums over the lanes of a warp, of many values at once."""

import tilelang.language as T


@T.macro
def sum_over_warp(values, row, lane, count):
    """Leaves in values[row, 0] of each lane l the warp's sum of values[row, l // (32 / count)].

    values: local [rows, count] float32, count a power of two, 32 at most; overwritten. While lanes pair up they also share the
    values out, half to each: count + 5 shuffles or less, where a sum of its own for each value would take five.
    """
    levels = count.bit_length() - 1
    for level in list(range(levels)):
        half = count >> (level + 1)
        other = 16 >> level
        upper = (lane & other) != 0
        for i in list(range(half)):
            sent = T.alloc_var("float32", init=0.0)
            sent = T.if_then_else(upper, values[row, i], values[row, half + i])
            values[row, i] = T.if_then_else(upper, values[row, half + i], values[row, i]) + T.shfl_xor(sent, other)
    for other in [16 >> level for level in list(range(levels, 5))]:
        values[row, 0] = values[row, 0] + T.shfl_xor(values[row, 0], other)
