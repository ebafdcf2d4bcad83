"""A chunk's step with a tile of a state's columns, as the plain variants of chunk_scan and intracard_pre_scan take it.

    residual = v - k_decayed S
    u        = A_inv residual
    S        = Diag(chunk_decay) S + k_to_end^T u

`state` [K, columns], `residual` and `out` [C, columns] are float32 fragments; `state_operand` [K, columns], `u_operand`
[C, columns], `gated` [C, K] and `block_tile` [C, C] are operands of products, the last two of one after the other.
"""

import tilelang.language as T

from kda_tl.kernels.tiles.products import product
from kda_tl.kernels.tiles.scaling import range_scale


@T.macro
def scale_operands(t, state, residual, state_operand, peaks, down: T.Ref):
    """Scales S and v (in `residual`) by `down`: the power of two that fits the peak of both where operands are float16, else 1.

    down: 1 before the first chunk. peaks: shared memory, a value for each warp.
    """
    if state_operand.dtype == "float16":
        peak = T.alloc_var("float32", init=0.0)
        peak = 0.0
        for i, j in t.parallel(*residual.shape):
            peak = T.max(peak, t.magnitude(residual[i, j]))
        for d, j in t.parallel(*state.shape):
            peak = T.max(peak, t.magnitude(state[d, j]))
        if not t.is_cpu:
            peak = T.warp_reduce_max(peak)
            if T.get_thread_binding() % 32 == 0:
                peaks[T.get_thread_binding() // 32] = peak
            T.sync_threads()
            warps = peaks.shape[0]
            for w in list(range(warps)):
                peak = T.max(peak, peaks[w])
        down = range_scale(peak)
    for d, j in t.parallel(*state.shape):
        state[d, j] = state[d, j] * down
        state_operand[d, j] = state[d, j]
    for i, j in t.parallel(*residual.shape):
        residual[i, j] = residual[i, j] * down


@T.macro
def store_u(t, k_decayed, A_inv, slot, value_head, state_operand, residual, out, gated, block_tile, u_operand, delta):
    """From v in `residual` to u in u_operand; without the delta correction they are the same."""
    C, columns = u_operand.shape
    K = state_operand.shape[0]
    if delta:
        T.clear(out)
        for i, j in t.parallel(C, K):
            gated[i, j] = k_decayed[slot, value_head, i, j]
        for i, j in t.parallel(C, C):
            block_tile[i, j] = A_inv[slot, value_head, i, j]
        product(t, gated, state_operand, out, C, columns, K)
        for i, j in t.parallel(C, columns):
            u_operand[i, j] = residual[i, j] - out[i, j]
        T.clear(residual)
        product(t, block_tile, u_operand, residual, C, columns, C)
    for i, j in t.parallel(C, columns):
        u_operand[i, j] = residual[i, j]


@T.macro
def pass_state(t, k_to_end, chunk_decay, slot, value_head, gated, u_operand, state, down: T.Ref):
    """S past the chunk, with `down` undone."""
    C, columns = u_operand.shape
    K = state.shape[0]
    for i, j in t.parallel(C, K):
        gated[i, j] = k_to_end[slot, value_head, i, j]
    for d, j in t.parallel(K, columns):
        state[d, j] = state[d, j] * chunk_decay[slot, value_head, d]
    product(t, gated, u_operand, state, K, columns, C, transpose_A=True)
    for d, j in t.parallel(K, columns):
        state[d, j] = state[d, j] / down
