"""Inverse of a unit lower-triangular tile: 16 x 16 blocks by forward substitution, then merged by products.

    [ L11   0  ]^-1   [      X11         0  ]
    [ L21  L22 ]    = [ -X22 L21 X11    X22 ]

The products run on tensor cores, with every float32 operand as the sum of two TF32 numbers (three products for one), so that
nothing is rounded that float32 would keep. A 16 x 16 product is too small for a block-wide T.gemm ("No valid warp partition"):
warps take tiles of 16 x 8 each, by mma.
"""

import tilelang.language as T

from kda_tl.kernels.tiles.target import barrier

BASE = 16
TILE_ROWS, TILE_COLUMNS, TILE_INNER = 16, 8, 8


@T.macro
def unit_lower_inverse(t, tiles, row_scale, size, threads):
    """tiles[1] = (I + Diag(row_scale) tiles[0])^-1.

    tiles: [2, size, >= size] shared float32; of tiles[0], what is below the diagonal is read, and what is above it overwritten.
    row_scale: [size] shared float32. threads: of the block. Barriers are its own: the operands have
    passed one, and the result may be read at once.
    """
    for i, j in t.parallel(size, size):
        tiles[1, i, j] = 0.0
    barrier(t)
    # Whole warps for every block, a lane for every column of it: a row of `tiles[0]` is then one address for the warp.
    for block, column in t.parallel(size // BASE, threads * BASE // size):
        if column < BASE:
            x = T.alloc_local((BASE,), "float32")
            for i in list(range(BASE)):
                total = T.alloc_var("float32", init=0.0)
                total = 0.0
                for m in list(range(i)):
                    total = total + tiles[0, block * BASE + i, block * BASE + m] * x[m]
                x[i] = T.if_then_else(column == i, 1.0, 0.0) - row_scale[block * BASE + i] * total
            for i in list(range(BASE)):
                tiles[1, block * BASE + i, block * BASE + column] = x[i]
    for half in [BASE << level for level in range((size // BASE).bit_length() - 1)]:
        if t.has_mma:
            merge(tiles, row_scale, size, half, threads // 32)
        else:
            merge_by_elements(t, tiles, row_scale, size, half)


@T.macro
def merge(tiles, row_scale, size, half, warps):
    """From inverses of the diagonal blocks of `half` rows to those of twice as many; scratch above the diagonal of tiles[0]."""
    lane = T.get_thread_binding() % 32
    columns = half // TILE_COLUMNS
    count = size // (2 * half) * (half // TILE_ROWS) * columns
    total = T.alloc_local((4,), "float32")
    for step in list(range(2)):
        T.sync_threads()
        for tile_of_warp in list(range(-(-count // warps))):
            tile = T.get_thread_binding() // 32 + tile_of_warp * warps
            base = tile // (half // TILE_ROWS * columns) * 2 * half
            i = tile // columns % (half // TILE_ROWS) * TILE_ROWS
            j = tile % columns * TILE_COLUMNS
            if tile < count:
                if step == 0:
                    multiply_tile(total, tiles, 0, base + half + i, base, 1, base, base + j, half, lane)
                else:
                    multiply_tile(total, tiles, 1, base + half + i, base + half, 0, base, base + half + j, half, lane)
                for upper in list(range(2)):
                    row = i + lane // 4 + upper * 8
                    column = j + lane % 4 * 2
                    for s in T.vectorized(2):
                        if step == 0:
                            tiles[0, base + row, base + half + column + s] = row_scale[base + half + row] * total[upper * 2 + s]
                        else:
                            tiles[1, base + half + row, base + column + s] = -total[upper * 2 + s]
    T.sync_threads()


@T.macro
def multiply_tile(total, tiles, a, a_row, a_column, b, b_row, b_column, inner, lane):
    """total = tiles[a, a_row:, a_column:] tiles[b, b_row:, b_column:], 16 x 8 as mma's accumulator has them, for one warp."""
    coarse_a, fine_a = T.alloc_local((4,), "float32"), T.alloc_local((4,), "float32")
    coarse_b, fine_b = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
    for v in T.unroll(4):
        total[v] = 0.0
    for step in T.unroll(inner // TILE_INNER):
        for v in T.unroll(4):
            fine_a[v] = tiles[a, a_row + lane // 4 + v % 2 * 8, a_column + step * TILE_INNER + lane % 4 + v // 2 * 4]
            coarse_a[v] = tf32(fine_a[v])
            fine_a[v] = fine_a[v] - coarse_a[v]
        for v in T.unroll(2):
            fine_b[v] = tiles[b, b_row + step * TILE_INNER + lane % 4 + v * 4, b_column + lane // 4]
            coarse_b[v] = tf32(fine_b[v])
            fine_b[v] = fine_b[v] - coarse_b[v]
        for left, right in [(fine_a, coarse_b), (coarse_a, fine_b), (coarse_a, coarse_b)]:
            T.ptx_mma(
                "float32", "m16n8k8", "row", "col", "tf32", "tf32", "fp32", left.data, 0, right.data, 0, total.data, 0,
                T.bool(False),
            )  # fmt: skip


@T.macro
def tf32(x):
    """x without the bits of its mantissa that TF32 has not."""
    return T.reinterpret(T.reinterpret(x, "uint32") & T.uint32(0xFFFFE000), "float32")


@T.macro
def merge_by_elements(t, tiles, row_scale, size, half):
    """`merge` without tensor cores."""
    barrier(t)
    for pair, i, j in t.parallel(size // (2 * half), half, half):
        total = T.alloc_var("float32", init=0.0)
        total = 0.0
        for m in T.serial(half):
            total = (
                total
                + tiles[0, pair * 2 * half + half + i, pair * 2 * half + m]
                * (tiles[1, pair * 2 * half + m, pair * 2 * half + j])
            )
        tiles[0, pair * 2 * half + i, pair * 2 * half + half + j] = row_scale[pair * 2 * half + half + i] * total
    barrier(t)
    for pair, i, j in t.parallel(size // (2 * half), half, half):
        total = T.alloc_var("float32", init=0.0)
        total = 0.0
        for m in T.serial(half):
            total = (
                total
                + tiles[1, pair * 2 * half + half + i, pair * 2 * half + half + m]
                * (tiles[0, pair * 2 * half + m, pair * 2 * half + half + j])
            )
        tiles[1, pair * 2 * half + half + i, pair * 2 * half + j] = -total
    barrier(t)
