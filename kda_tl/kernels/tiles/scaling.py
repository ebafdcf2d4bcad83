"""Powers of two that keep a tile in the range of float16 operands: exact to apply and to undo."""

import tilelang.language as T

FLOAT_BIAS = 127
LOWEST_EXPONENT, HIGHEST_EXPONENT = -10, 11
TARGET_EXPONENT = 0


@T.macro
def range_scale(peak, highest_exponent=HIGHEST_EXPONENT):
    """The power of two s by which a tile with this float32 peak >= 0 is scaled; s and 1 / s are always finite and normal.

    1 for a peak of 0 and for peaks in [2^-10, 2^(highest_exponent + 1)): at the lower end float16 still resolves 2^-14 of the
    peak, and with the default products may grow 16-fold at the upper one. So at ordinary magnitudes nothing depends on the
    peak, which later rows of the chunk can set. Otherwise the peak goes to [1, 2).
    """
    exponent = ((T.reinterpret(peak, "int32") >> 23) & 255) - FLOAT_BIAS
    biased = T.max(2, T.min(252, FLOAT_BIAS + TARGET_EXPONENT - exponent))
    ordinary = (exponent == -FLOAT_BIAS) | ((exponent >= LOWEST_EXPONENT) & (exponent <= highest_exponent))
    return T.if_then_else(ordinary, T.float32(1.0), T.reinterpret(biased << 23, "float32"))


@T.macro
def inverse_power_of_two(s):
    """1 / s of a normal power of two, with no division."""
    return T.reinterpret((2 * FLOAT_BIAS << 23) - T.reinterpret(s, "int32"), "float32")
