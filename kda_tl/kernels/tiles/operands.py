"""The two operands of one level of `decay_products`, and their product, as each target does them best.

sm_90, float16 operands: tiles in wgmma's core matrices (8 rows of 16 bytes, one after the other) without a swizzle. A thread
writes the same columns of many rows, and then every address is one base and a constant; T.gemm's swizzled tiles cost it five
integer instructions per store, more than the values themselves. T.gemm offers no such layout, so the products are issued here,
by TileLang's own instructions. (A second stage, written while a product runs, costs more than it hides: two blocks share a
multiprocessor, and its first-level cache is what their tiles leave.) All other targets: row-major tiles, T.gemm.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.products import product as add_product

CORE_ROWS = 8
CORE_COLUMNS = 8  # 16 bytes of float16
STEP = 16  # columns that one wgmma reads
WARPGROUP = 128


@dataclass(frozen=True)
class LevelOperands:
    """left [rows, K] and right [rows / 2, K] in shared memory, and product [rows, rows / 2] in registers.

    Index left and right with `at`. In `core` form `product` holds a thread's values of its warpgroup's columns.
    """

    left: Any
    right: Any
    product: Any
    core: bool
    rows: int
    head_dim: int
    threads: int

    @classmethod
    def allocate(cls, t: Any, rows: int, head_dim: int, dtype: str, threads: int) -> "LevelOperands":
        core = t.arch == "sm_90" and dtype == "float16" and rows == 64
        half = rows // 2
        if not core:
            left, right = t.shared((rows, head_dim), dtype), t.shared((half, head_dim), dtype)
            return cls(left, right, t.fragment((rows, half), "float32"), core, rows, head_dim, threads)
        groups = head_dim // CORE_COLUMNS
        left = T.alloc_shared((groups, cls.column_stride(rows)), dtype)
        right = T.alloc_shared((groups, cls.column_stride(half)), dtype)
        return cls(left, right, T.alloc_local((rows * half // threads,), "float32"), core, rows, head_dim, threads)

    @staticmethod
    def column_stride(rows: int) -> int:
        """Elements from one core column to the next: a row more than there are, so that a warp's stores meet no bank twice."""
        return (rows + 1) * CORE_COLUMNS

    def at(self, row: Any, pair: Any, j: Any) -> tuple[Any, ...]:
        """Where element 2 pair + j of a row lies, in `left` or `right`."""
        if not self.core:
            return (row, pair * 2 + j)
        pairs = CORE_COLUMNS // 2
        return (pair // pairs, row * CORE_COLUMNS + pair % pairs * 2 + j)


@T.macro
def issue_product(o, desc_left, desc_right):
    """Starts product = left right^T, core form. Between a barrier after the stores and `finish_product`."""
    columns = o.rows // 2 * WARPGROUP // o.threads
    left_stride = o.column_stride(o.rows) * 2 // 16
    right_stride = o.column_stride(o.rows // 2) * 2 // 16
    mine = T.get_thread_binding() // WARPGROUP * (columns // CORE_ROWS * (CORE_ROWS * CORE_COLUMNS * 2 // 16))
    T.warpgroup_fence_operand(o.product, num_regs=o.rows * columns // WARPGROUP)
    T.warpgroup_arrive()
    for step in T.unroll(o.head_dim // STEP):
        T.ptx_wgmma_ss(
            "float32", f"m{o.rows}n{columns}k{STEP}", True, True, "fp16", "fp16", "fp32",
            desc_left.data, step * (STEP // CORE_COLUMNS) * left_stride,
            desc_right.data, step * (STEP // CORE_COLUMNS) * right_stride + mine,
            o.product.data, 0, T.Select(step != 0, 1, 0), 1, 1,
        )  # fmt: skip
    T.warpgroup_commit_batch()


@T.macro
def describe(o, desc_left, desc_right):
    """wgmma's descriptors of both tiles, core form."""
    core = CORE_ROWS * CORE_COLUMNS * 2 // 16
    T.initialize_wgmma_descriptor(desc_left, T.address_of(o.left[0, 0]), 0, o.column_stride(o.rows) * 2 // 16, core)
    T.initialize_wgmma_descriptor(desc_right, T.address_of(o.right[0, 0]), 0, o.column_stride(o.rows // 2) * 2 // 16, core)


@T.macro
def finish_product(o):
    """Waits for `issue_product`: o.product may be read, and the operands written again after a barrier."""
    T.warpgroup_wait(0)
    T.warpgroup_fence_operand(o.product, num_regs=o.rows * (o.rows // 2) // o.threads)


@T.macro
def multiply(t, o):
    """product = left right^T, at once; not the core form."""
    T.clear(o.product)
    add_product(t, o.left, o.right, o.product, o.rows, o.rows // 2, o.head_dim, transpose_B=True)
