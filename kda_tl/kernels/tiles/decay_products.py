"""Decay products of one chunk by halving: exact for any gate, matrix products throughout.

X[i, j] = sum_c a[i, c] b[j, c] exp(G[i, c] - G[j, c]) for j < i. At the level with half-blocks of h rows, the pairs whose rows
part there share a block of 2h rows: j in its first half, i in its second. With the first row of the second half as the
reference r,

    exp(G_i - G_j) = (product of d_s, r < s <= i) * (product of d_s, j < s <= r),      d_s = exp(g_s) in [0, 1],

both factors are products of decays, running outward from r. So they never exceed 1, whatever the gate; a mask (g = -1000,
d = 0) takes nothing from its neighbours, as it would in a cumulative sum; and no factor sees a row later than the one it
scales.
log2(C) levels cover every pair once, and one exponential per element serves them all.
"""

import tilelang.language as T


def halves(chunk_size: int) -> list[int]:
    """The half-block sizes, largest first."""
    return [chunk_size >> shift for shift in range(1, chunk_size.bit_length())]


@T.macro
def decay_products(t, q, k, decay, batch, start, rows, head, left, right, product, qk, kk, chunk_size, head_dim):
    """Fills the strictly lower parts of qk (q with k) and kk (k with k); both [C, C], zero on entry.

    q, k: the whole tensors; the chunk is rows `start ..` of [batch, :, head, :]. decay: shared [C, K], exp(g), 1 past `rows`.
    left [C, K], right [C / 2, K], product [C, C / 2]: scratch (shared, shared, fragment).
    A level uses half of the rows on each side, so its k rows and q rows stand together in one 64-row left operand.
    """
    for half in halves(chunk_size):
        for c in t.parallel(head_dim):
            for block in T.serial(chunk_size // 2 // half):
                factor = T.alloc_var("float32", init=1.0)
                reference = block * 2 * half + half
                factor = 1.0
                for s in T.serial(half):
                    factor = factor * decay[reference - s, c]
                    row = reference - 1 - s
                    right[block * half + half - 1 - s, c] = T.if_then_else(
                        row < rows, k[batch, start + row, head, c] * factor, 0.0
                    )
                factor = 1.0
                for s in T.serial(half):
                    row = reference + s
                    if s > 0:
                        factor = factor * decay[row, c]
                    left[block * half + s, c] = T.if_then_else(row < rows, k[batch, start + row, head, c] * factor, 0.0)
                    left[chunk_size // 2 + block * half + s, c] = T.if_then_else(
                        row < rows, q[batch, start + row, head, c] * factor, 0.0
                    )
        T.clear(product)
        T.gemm(left, right, product, transpose_B=True)
        for i, j in t.parallel(chunk_size, chunk_size // 2):
            i_half = i % (chunk_size // 2)
            if i_half // half == j // half:
                row = i_half // half * 2 * half + half + i_half % half
                column = j // half * 2 * half + j % half
                if i < chunk_size // 2:
                    kk[row, column] = product[i, j]
                else:
                    qk[row, column] = product[i, j]
