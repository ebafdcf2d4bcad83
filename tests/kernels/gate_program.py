"""A program that applies the gate macros to a vector. No `from __future__ import annotations`: TileLang reads them."""

import tilelang.language as T

from kda_tl.kernels.tiles.gates import gate_rate, inverse_norm, log_decay, write_strength
from kda_tl.kernels.tiles.target import TileTarget


def gate_program(arch):
    """x, decay, strength, norm [n] float32; gate_form, beta_form; A_log, lower_bound."""
    t = TileTarget(arch)
    n = T.dynamic("n")

    @T.prim_func
    def gates(
        x: T.Tensor((n,), "float32"),
        decay: T.Tensor((n,), "float32"),
        strength: T.Tensor((n,), "float32"),
        norm: T.Tensor((n,), "float32"),
        gate_form: T.int32,
        beta_form: T.int32,
        A_log: T.float32,
        lower_bound: T.float32,
    ):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as block:
            for i in t.parallel(128):
                if block * 128 + i < n:
                    decay[block * 128 + i] = log_decay(gate_form, x[block * 128 + i], gate_rate(A_log), lower_bound)
                    strength[block * 128 + i] = write_strength(beta_form, x[block * 128 + i])
                    norm[block * 128 + i] = inverse_norm(x[block * 128 + i])

    return gates
