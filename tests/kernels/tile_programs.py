"""One tiny program around each tile macro. Imports TileLang, so tests import this module inside a fixture."""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles import chunks, scalar_decay, scaling, token_tiles, triangular_inverse
from kda_tl.kernels.tiles import decay_products as products
from kda_tl.kernels.tiles.operands import LevelOperands
from kda_tl.kernels.tiles.target import LOG2_E, TileTarget


def decay_products(target: str, chunk_size: int = 64, head_dim: int = 128, parts: int = 4, read_first: bool = False) -> Any:
    """qk, kk [C, C] of a chunk whose q, k and g are whole tiles [C, K]; q and k hold zeros past `rows`."""
    t = TileTarget(target)
    C, K = chunk_size, head_dim
    size = C // parts

    @T.prim_func
    def decay_products_program(
        q: T.Tensor((C, K), "float32"),
        k: T.Tensor((C, K), "float32"),
        g: T.Tensor((C, K), "float32"),
        bonus: T.Tensor((K,), "float32"),
        qk_out: T.Tensor((C, C), "float32"),
        kk_out: T.Tensor((C, C), "float32"),
        rows: T.int32,
    ):
        with T.Kernel(1, threads=parts * K // 2) as _:
            q_rows = t.column_pairs(C, K, "float32", parts)
            k_rows = t.column_pairs(C, K, "float32", parts)
            decay = t.column_pairs(C, K, "float32", parts)
            sums = products.PartSums(*(t.shared((parts, K), "float32") for _ in range(3)))
            diagonal = t.shared((C,), "float32")
            operands = LevelOperands.allocate(t, C, K, "float32", parts * K // 2)
            tiles = t.shared((2, C, C), "float32")
            for part, pair in t.each_column_pair(K, parts):
                whole = T.alloc_local((2,), "float32")
                for j in t.pair():
                    whole[j] = 0.0
                for row in T.unroll(size):
                    for j in t.pair():
                        q_rows[t.at(part, pair, row, j)] = q[part * size + row, pair * 2 + j]
                    for j in t.pair():
                        k_rows[t.at(part, pair, row, j)] = k[part * size + row, pair * 2 + j]
                    for j in t.pair():
                        decay[t.at(part, pair, row, j)] = T.if_then_else(
                            part * size + row < rows, g[part * size + row, pair * 2 + j] * LOG2_E, 0.0
                        )
                    if row == 0:
                        for j in t.pair():
                            sums.first[part, pair * 2 + j] = decay[t.at(part, pair, row, j)]
                    else:
                        for j in t.pair():
                            whole[j] = whole[j] + decay[t.at(part, pair, row, j)]
                    for j in t.pair():
                        decay[t.at(part, pair, row, j)] = T.exp2(decay[t.at(part, pair, row, j)])
                for j in t.pair():
                    sums.rest[part, pair * 2 + j] = whole[j]
                for j in t.pair():
                    sums.whole[part, pair * 2 + j] = whole[j] + sums.first[part, pair * 2 + j]
            for i, j in t.parallel(C, C):
                tiles[0, i, j] = 0.0
                tiles[1, i, j] = 0.0
            for i in t.parallel(C):
                diagonal[i] = 0.0
                for d in T.serial(K):
                    diagonal[i] = diagonal[i] + q[i, d] * k[i, d] * (bonus[d] if read_first else 1.0)
            products.decay_products(t, q_rows, k_rows, decay, sums, diagonal, operands, tiles, C, K, parts, read_first)
            for i, j in t.parallel(C, C):
                qk_out[i, j] = tiles[1, i, j]
                kk_out[i, j] = tiles[0, i, j]

    return decay_products_program


def scalar_decay_products(target: str, decays: bool = True, chunk_size: int = 64, head_dim: int = 128) -> Any:
    """What `scalar_decay` makes of a chunk with one log decay a row: products qk, kk [C, C], gated rows [1, 1, C, K]."""
    t = TileTarget(target)
    C, K = chunk_size, head_dim

    @T.prim_func
    def scalar_decay_products_program(
        q: T.Tensor((1, C, 1, K), "float32"),
        k: T.Tensor((1, C, 1, K), "float32"),
        g: T.Tensor((C,), "float32"),
        qk_out: T.Tensor((C, C), "float32"),
        kk_out: T.Tensor((C, C), "float32"),
        q_decayed: T.Tensor((1, 1, C, K), "float32"),
        k_decayed: T.Tensor((1, 1, C, K), "float32"),
        k_to_end: T.Tensor((1, 1, C, K), "float32"),
        rows: T.int32,
        normalize: T.int32,
    ):
        with T.Kernel(1, threads=128) as _:
            tiles = token_tiles.TokenTiles.allocate(t, C, K, "float32", 128)
            factors = scalar_decay.RowFactors.allocate(t, C)
            totals = t.shared((1, 2, C), "float32")
            token_tiles.stage_tokens(t, tiles, q, k, 0, 0, rows, 0)
            for i in t.parallel(C):
                factors.high[i] = T.if_then_else(i < rows, g[i] * LOG2_E, 0.0)
            if decays:
                scalar_decay.running_sums(t, factors.high, factors.low, C)
            token_tiles.store_squares(t, tiles, totals)
            scalar_decay.store_factors(t, factors, totals, 1, C, normalize, decays)
            token_tiles.start_products(t, tiles, True)
            scalar_decay.store_gated_rows(t, tiles, factors, q_decayed, k_decayed, k_to_end, 0, 0, True)
            token_tiles.finish_products(t, tiles, True)
            for i, j in t.parallel(C, C):
                tiles.products[0, i, j] = 0.0
                tiles.products[1, i, j] = 0.0
            scalar_decay.store_decayed_products(t, tiles, factors, True, decays)
            for i, j in t.parallel(C, C):
                kk_out[i, j] = T.if_then_else(j < i, tiles.products[0, i, j], 0.0)
                qk_out[i, j] = tiles.products[1, i, j]

    return scalar_decay_products_program


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
            tiles = t.shared((2, size, size), "float32")
            scale = t.shared((size,), "float32")
            for i, j in t.parallel(size, size):
                tiles[0, i, j] = lower[i, j]
            for i in t.parallel(size):
                scale[i] = row_scale[i]
            triangular_inverse.unit_lower_inverse(t, tiles, scale, size, 128)
            for i, j in t.parallel(size, size):
                out[i, j] = tiles[1, i, j]

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
    "scalar_decay_products": scalar_decay_products,
    "unit_lower_inverse": unit_lower_inverse,
    "locate_chunk": locate_chunk,
    "range_scale": range_scale,
}
