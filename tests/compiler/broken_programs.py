"""Programs that do not make it to an artifact. Imports TileLang, so tests import this module inside a fixture."""

from typing import Any

import tilelang.language as T


def needs_shared_memory(*_: object) -> Any:
    """150 KiB per block: more than sm_89 has."""

    @T.prim_func
    def greedy(x: T.Tensor((64, 600), "float32"), y: T.Tensor((64, 600), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_shared((64, 600), "float32")
            for i, j in T.Parallel(64, 600):
                tile[i, j] = x[i, j]
            for i, j in T.Parallel(64, 600):
                y[i, j] = tile[63 - i, j]

    return greedy


def does_not_lower(*_: object) -> Any:
    """A product smaller than what a block of 128 threads can share out."""

    @T.prim_func
    def tiny_product(x: T.Tensor((16, 16), "float32"), y: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((16, 16), "float32")
            out = T.alloc_fragment((16, 16), "float32")
            T.copy(x, a)
            T.clear(out)
            T.gemm(a, a, out)
            T.copy(out, y)

    return tiny_product
