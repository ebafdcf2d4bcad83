"""A program that splits floats and joins them. No `from __future__ import annotations`: TileLang reads them."""

import tilelang.language as T

from kda_tl.kernels.deltalog_replay import low_part, near_bits, upper_part, with_low


def low_program():
    """x, upper, back [n, 8] float32; words [n] int32."""
    n = T.dynamic("n")

    @T.prim_func
    def low_bits(
        x: T.Tensor((n, 8), "float32"),
        upper: T.Tensor((n, 8), "float32"),
        words: T.Tensor((n,), "int32"),
        back: T.Tensor((n, 8), "float32"),
    ):
        with T.Kernel(n, threads=1) as i:
            words[i] = 0
            for e in T.serial(8):
                near = near_bits(x[i, e])
                upper[i, e] = upper_part(near)
                words[i] = words[i] | low_part(near, e)
            for e in T.serial(8):
                back[i, e] = with_low(upper[i, e], words[i], e)

    return low_bits


def join_program():
    """upper, back [n, 8] float32; words [n] int32."""
    n = T.dynamic("n")

    @T.prim_func
    def join_bits(
        upper: T.Tensor((n, 8), "float32"),
        words: T.Tensor((n,), "int32"),
        back: T.Tensor((n, 8), "float32"),
    ):
        with T.Kernel(n, threads=1) as i:
            for e in T.serial(8):
                back[i, e] = with_low(upper[i, e], words[i], e)

    return join_bits
