"""The tokens q and k of one chunk in shared memory as they are, and the plain products k k^T and q k^T.

NVIDIA, 16-bit tokens: tiles of core matrices (8 rows of 16 bytes, one after the other; see `operands`), which cp.async fills
straight from memory. wgmma reads them on sm_90; mma elsewhere, whose operands are then words without bank conflicts. Both
leave the same accumulators, so what follows has one form. Norms are not applied: whoever reads the products scales them. All
other targets: row-major tiles, one multiply-add at a time.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.operands import CORE_COLUMNS, CORE_ROWS, STEP, WARPGROUP, LevelOperands

BANK_ROWS = 8  # columns more than needed, so that eight rows of float32 lie in different banks
SHORT_NAMES = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class TokenTiles:
    """tokens: q (side 0) and k (side 1) [rows, head_dim], index with `at`. products: [2, rows, >= rows] float32, in the same
    memory on a GPU. kk, qk: accumulators, in `core` form those of `rows_of_thread`, else fragments [rows, rows].
    """

    tokens: Any
    products: Any
    kk: Any
    qk: Any
    core: bool
    rows: int
    head_dim: int
    threads: int

    @classmethod
    def allocate(cls, t: Any, rows: int, head_dim: int, dtype: str, threads: int) -> "TokenTiles":
        if t.has_mma and dtype != "float32":
            tokens = T.alloc_shared((2, 2 * rows * (rows + BANK_ROWS)), dtype)
            products = T.view(tokens, (2, rows, rows + BANK_ROWS), "float32")
            kk, qk = (T.alloc_local((rows * rows // threads,), "float32") for _ in range(2))
            return cls(tokens, products, kk, qk, True, rows, head_dim, threads)
        tokens = t.shared((2, rows, head_dim + BANK_ROWS), dtype)
        products = t.shared((2, rows, rows), "float32") if t.is_cpu else tokens
        kk, qk = (t.fragment((rows, rows), "float32") for _ in range(2))
        return cls(tokens, products, kk, qk, False, rows, head_dim, threads)

    @property
    def column_stride(self) -> int:
        """Elements from one core column to the next."""
        return LevelOperands.column_stride(self.rows)

    @property
    def columns(self) -> int:
        """Columns of a product that one warpgroup holds, core form."""
        return self.rows * WARPGROUP // self.threads

    def at(self, side: Any, row: Any, column: Any) -> tuple[Any, ...]:
        """Where an element lies in `tokens`."""
        if not self.core:
            return (side, row, column)
        return (side, column // CORE_COLUMNS * self.column_stride + row * CORE_COLUMNS + column % CORE_COLUMNS)

    def octets(self, thread: Any) -> list[tuple[Any, Any]]:
        """(row, first column) of the eights of neighbouring columns that a thread copies and scales; a warp has whole rows."""
        across = self.head_dim // CORE_COLUMNS
        together = self.threads // across
        return [(first + thread // across, thread % across * CORE_COLUMNS) for first in range(0, self.rows, together)]


@T.macro
def stage_tokens(t, o, q, k, batch, start, rows, head):
    """Starts the copy of a chunk's rows, which `finish_staging` waits for; rows past the end become 0."""
    stage_side(t, o, 0, q, batch, start, rows, head)
    stage_side(t, o, 1, k, batch, start, rows, head)
    if o.core:
        T.ptx_commit_group()


@T.macro
def stage_side(t, o, side, x, batch, start, rows, head):
    if o.core:
        for row, column in o.octets(T.get_thread_binding()):
            T.ptx_cp_async(
                T.access_ptr(o.tokens[o.at(side, row, column)], "w", CORE_COLUMNS),
                T.access_ptr(x[batch, start + row, head, column], "r", CORE_COLUMNS),
                CORE_COLUMNS,
                predicate=row < rows,
            )
    else:
        for i, d in t.parallel(o.rows, o.head_dim):
            o.tokens[side, i, d] = T.if_then_else(i < rows, x[batch, start + T.min(i, rows - 1), head, d], 0.0)


@T.macro
def finish_staging(t, o):
    """All threads see the tokens, wgmma too, and whatever was stored before."""
    if o.core:
        T.ptx_wait_group(0)
        if t.arch == "sm_90":
            T.fence_proxy_async()
    if not t.is_cpu:
        T.sync_threads()


@T.macro
def store_squares(t, o, totals):
    """totals[:, side, i]: shares of the sum of squares of row i; shared [threads / 128, 2, rows], one share if not core."""
    if o.core:
        thread = T.get_thread_binding()
        groups = o.head_dim // CORE_COLUMNS * WARPGROUP // o.threads
        side, row, share = thread // o.rows % 2, thread % o.rows, thread // WARPGROUP
        octet = T.alloc_local((CORE_COLUMNS,), o.tokens.dtype)
        wide = T.alloc_local((2,), "float32")
        sums = T.alloc_local((2,), "float32")
        sums[0] = 0.0
        sums[1] = 0.0
        for group in T.unroll(groups):
            for s in T.vectorized(CORE_COLUMNS):
                octet[s] = o.tokens[o.at(side, row, (share * groups + group) * CORE_COLUMNS + s)]
            for pair in list(range(CORE_COLUMNS // 2)):
                for s in t.pair():
                    wide[s] = octet[pair * 2 + s]
                for s in T.unroll(2):
                    sums[s] = sums[s] + wide[s] * wide[s]
        totals[share, side, row] = sums[0] + sums[1]
    else:
        for side, i in t.parallel(2, o.rows):
            total = T.alloc_var("float32", init=0.0)
            total = 0.0
            for d in T.serial(o.head_dim):
                total = total + T.cast(o.tokens[side, i, d], "float32") * T.cast(o.tokens[side, i, d], "float32")
            totals[0, side, i] = total


@T.macro
def start_products(t, o, delta):
    """Starts kk = k k^T (with delta only) and qk = q k^T; `finish_products` waits for them."""
    if o.core and t.arch == "sm_90":
        start_wgmma(o, delta)
    elif o.core:
        multiply_by_mma(o, delta)
    else:
        for i, j in t.parallel(o.rows, o.rows):
            o.kk[i, j] = 0.0
            o.qk[i, j] = 0.0
        # Columns outside: rows outside would tempt nvcc to keep a whole row of k in registers.
        for d in T.serial(o.head_dim):
            for i, j in t.parallel(o.rows, o.rows):
                if delta:
                    o.kk[i, j] = o.kk[i, j] + T.cast(o.tokens[1, i, d], "float32") * T.cast(o.tokens[1, j, d], "float32")
                o.qk[i, j] = o.qk[i, j] + T.cast(o.tokens[0, i, d], "float32") * T.cast(o.tokens[1, j, d], "float32")


@T.macro
def start_wgmma(o, delta):
    core = CORE_ROWS * CORE_COLUMNS * 2 // 16
    stride = o.column_stride * 2 // 16
    mine = T.get_thread_binding() // WARPGROUP * (o.columns // CORE_ROWS * core)
    short = SHORT_NAMES[o.tokens.dtype]
    desc_q, desc_k = T.alloc_wgmma_desc(), T.alloc_wgmma_desc()
    T.initialize_wgmma_descriptor(desc_q, T.address_of(o.tokens[0, 0]), 0, stride, core)
    T.initialize_wgmma_descriptor(desc_k, T.address_of(o.tokens[1, 0]), 0, stride, core)
    for total, desc in ((o.kk, desc_k), (o.qk, desc_q))[0 if delta else 1 :]:
        T.warpgroup_fence_operand(total, num_regs=o.rows * o.columns // WARPGROUP)
        T.warpgroup_arrive()
        for step in T.unroll(o.head_dim // STEP):
            T.ptx_wgmma_ss(
                "float32", f"m{o.rows}n{o.columns}k{STEP}", True, True, short, short, "fp32",
                desc.data, step * (STEP // CORE_COLUMNS) * stride,
                desc_k.data, step * (STEP // CORE_COLUMNS) * stride + mine,
                total.data, 0, T.Select(step != 0, 1, 0), 1, 1,
            )  # fmt: skip
        T.warpgroup_commit_batch()


@T.macro
def multiply_by_mma(o, delta):
    lane, short = T.get_thread_binding() % 32, SHORT_NAMES[o.tokens.dtype]
    first_row = T.get_thread_binding() % WARPGROUP // 32 * 16 + lane // 4
    first_column = T.get_thread_binding() // WARPGROUP * o.columns + lane // 4
    left_q, left_k = T.alloc_local((8,), o.tokens.dtype), T.alloc_local((8,), o.tokens.dtype)
    right = T.alloc_local((4,), o.tokens.dtype)
    for value in T.unroll(o.rows * o.columns // WARPGROUP):
        o.qk[value] = 0.0
        if delta:
            o.kk[value] = 0.0
    for step in T.unroll(o.head_dim // STEP):
        for side, left in ((0, left_q), (1, left_k))[: 2 if delta else 1]:
            for v in list(range(4)):
                for s in T.vectorized(2):
                    left[v * 2 + s] = o.tokens[
                        side,
                        (step * 2 + v // 2) * o.column_stride + (first_row + v % 2 * 8) * CORE_COLUMNS + lane % 4 * 2 + s,
                    ]
        for group in T.unroll(o.columns // CORE_ROWS):
            for v in list(range(2)):
                for s in T.vectorized(2):
                    right[v * 2 + s] = o.tokens[
                        1, (step * 2 + v) * o.column_stride + (first_column + group * 8) * CORE_COLUMNS + lane % 4 * 2 + s
                    ]
            for total, left in ((o.qk, left_q), (o.kk, left_k))[: 2 if delta else 1]:
                T.ptx_mma(
                    "float32", "m16n8k16", "row", "col", short, short, "fp32",
                    left.data, 0, right.data, 0, total.data, group * 4, T.bool(False),
                )  # fmt: skip


@T.macro
def finish_products(t, o, delta):
    """The accumulators may be read; after a barrier, `products` be written."""
    if o.core and t.arch == "sm_90":
        T.warpgroup_wait(0)
        T.warpgroup_fence_operand(o.qk, num_regs=o.rows * o.columns // WARPGROUP)
        if delta:
            T.warpgroup_fence_operand(o.kk, num_regs=o.rows * o.columns // WARPGROUP)
