"""Every bfloat16 beside every four low bits, and what the pair stands for, worked out from fields of the number, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def every_pair() -> tuple[NDArray[np.int16], NDArray[np.int32], NDArray[np.int64]]:
    """bits [131072, 8] of bases, words [131072, 1] of low bits, and these by element, low [131072, 8], from -8 to 7."""
    bits = np.repeat(np.arange(2**16, dtype=np.uint16).reshape(-1, 8), 16, axis=0).view(np.int16)
    nibbles = (np.arange(len(bits))[:, None] + np.arange(8) * 3) % 16
    words = (nibbles.astype(np.uint64) << (4 * np.arange(8, dtype=np.uint64))).sum(1, keepdims=True, dtype=np.uint64)
    return bits, words.astype(np.uint32).view(np.int32), np.where(nibbles < 8, nibbles, nibbles - 16)


def joined(bits: NDArray[np.int16], low: NDArray[np.int64]) -> NDArray[np.float64]:
    """A sign, 8 bits of exponent, 7 of mantissa; low are 16ths of its last bit, away from zero, and never past it."""
    exponent, mantissa = bits.astype(np.int64) >> 7 & 255, bits.astype(np.int64) & 127
    steps = np.where(exponent == 0, mantissa, mantissa + 128) * 16  # 16ths of a last bit
    below = (steps == 128 * 16) & (exponent > 1) & (low < 0)  # steps under a power of two are half as long
    length = 2.0 ** (np.maximum(exponent, 1) - 127.0 - 7 - 4)
    size = np.maximum(steps + np.where(below, low / 2, low), 0) * length
    return np.where(bits < 0, -size, size)
