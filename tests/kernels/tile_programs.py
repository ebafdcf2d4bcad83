"""One tiny program around each tile macro. Imports TileLang, so tests import this module inside a fixture."""

import json
from typing import Any

import tilelang.language as T

from kda_tl.compiler.lower import lower_program
from kda_tl.kernels.tiles import chunks, scaling, triangular_inverse
from kda_tl.kernels.tiles import decay_products as products
from kda_tl.kernels.tiles.target import TileTarget
from kda_tl.specs.archs import arch


def decay_products(target: str, chunk_size: int = 64, head_dim: int = 128) -> Any:
    """qk, kk [C, C] of a chunk whose q, k and g are whole tiles [C, K]; q and k hold zeros past `rows`."""
    t = TileTarget(target)
    C, K = chunk_size, head_dim
    operand_dtype = "float32" if t.is_cpu else "float16"

    @T.prim_func
    def decay_products_program(
        q: T.Tensor((C, K), operand_dtype),
        k: T.Tensor((C, K), operand_dtype),
        g: T.Tensor((C, K), "float32"),
        qk_out: T.Tensor((C, C), "float32"),
        kk_out: T.Tensor((C, C), "float32"),
        rows: T.int32,
    ):
        with T.Kernel(1, threads=K) as _:
            q_rows = t.column_pairs(C, K, operand_dtype)
            k_rows = t.column_pairs(C, K, operand_dtype)
            decay = t.column_pairs(C, K, "float32")
            middle_decay = t.shared((K,), "float32")
            left = t.shared((C, K), operand_dtype)
            right = t.shared((C // 2, K), operand_dtype)
            qk = t.shared((C, C), "float32")
            kk = t.shared((C, C), "float32")
            product = t.fragment((C, C // 2), "float32")
            for half, pair in t.each_column_pair(K):
                for row in T.unroll(C // 2):
                    for j in t.pair():
                        q_rows[t.at(half, pair, row, j)] = q[half * (C // 2) + row, pair * 2 + j]
                    for j in t.pair():
                        k_rows[t.at(half, pair, row, j)] = k[half * (C // 2) + row, pair * 2 + j]
                    for j in t.pair():
                        decay[t.at(half, pair, row, j)] = T.if_then_else(
                            half * (C // 2) + row < rows, T.exp(g[half * (C // 2) + row, pair * 2 + j]), 1.0
                        )
                if half == 1:
                    for j in t.pair():
                        middle_decay[pair * 2 + j] = decay[t.at(half, pair, 0, j)]
            for i, j in t.parallel(C, C):
                qk[i, j] = 0.0
                kk[i, j] = 0.0
            products.decay_products(t, q_rows, k_rows, decay, middle_decay, left, right, product, qk, kk, C, K)
            for i, j in t.parallel(C, C):
                qk_out[i, j] = qk[i, j]
                kk_out[i, j] = kk[i, j]

    return decay_products_program


def unit_lower_inverse(target: str, size: int = 64) -> Any:
    """out = (I + Diag(row_scale) (the strictly lower part of lower))^-1."""
    t = TileTarget(target)

    @T.prim_func
    def unit_lower_inverse_program(
        lower: T.Tensor((size, size), "float32"),
        row_scale: T.Tensor((size,), "float32"),
        out: T.Tensor((size, size), "float32"),
    ):
        with T.Kernel(1, threads=128) as _:
            tile = t.shared((size, size), "float32")
            scale = t.shared((size,), "float32")
            inverse = t.shared((size, size), "float32")
            for i, j in t.parallel(size, size):
                tile[i, j] = lower[i, j]
            for i in t.parallel(size):
                scale[i] = row_scale[i]
            triangular_inverse.unit_lower_inverse(t, tile, scale, inverse, size)
            for i, j in t.parallel(size, size):
                out[i, j] = inverse[i, j]

    return unit_lower_inverse_program


def locate_chunk(target: str, chunk_size: int = 64) -> Any:
    """out[slot] = (batch row, first token, tokens) of every slot."""
    slots, num_offsets = T.dynamic("slots, num_offsets")

    @T.prim_func
    def locate_chunk_program(
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        out: T.Tensor((slots, 3), "int32"),
        seq_len: T.int32,
        uniform: T.int32,
    ):
        with T.Kernel(slots, threads=128) as slot:
            found = T.alloc_local((3,), "int32")
            chunks.locate_chunk(slot, uniform, seq_len, num_offsets - 1, cu_seqlens, chunk_size, found)
            for i in T.serial(3):
                out[slot, i] = found[i]

    return locate_chunk_program


def range_scale(target: str) -> Any:
    """out[i] = range_scale(peaks[i])."""
    count = T.dynamic("count")

    @T.prim_func
    def range_scale_program(peaks: T.Tensor((count,), "float32"), out: T.Tensor((count,), "float32")):
        with T.Kernel(count, threads=128) as i:
            out[i] = scaling.range_scale(peaks[i])

    return range_scale_program


PROGRAMS = {
    "decay_products": decay_products,
    "unit_lower_inverse": unit_lower_inverse,
    "locate_chunk": locate_chunk,
    "range_scale": range_scale,
}


def compile_for(arch_name: str, name: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Files and metadata, for a worker process to return: through JSON, since TVM's strings do not survive pickling."""
    compiled = lower_program(PROGRAMS[name](arch_name), arch(arch_name), name)
    return compiled.files, json.loads(json.dumps(compiled.meta))
