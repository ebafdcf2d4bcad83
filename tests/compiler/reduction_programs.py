"""A program whose reductions bring several workspaces of one name. Imports TileLang: tests import this inside a fixture."""

from typing import Any

import tilelang.language as T

ROWS, COLUMNS = 128, 64


def four_maxima() -> Any:
    """y[i] = the largest element of row i of x[i'th quarter]; four reductions across all threads of a block."""

    @T.prim_func
    def four_maxima(x: T.Tensor((4, ROWS, COLUMNS), "float32"), y: T.Tensor((4, COLUMNS), "float32")):
        with T.Kernel(1, threads=128) as _:
            tiles = [T.alloc_fragment((ROWS, COLUMNS), "float32") for _ in range(4)]
            peaks = [T.alloc_fragment((COLUMNS,), "float32") for _ in range(4)]
            for i in list(range(4)):
                T.copy(x[i, 0, 0], tiles[i])
            for i in list(range(4)):
                T.reduce_max(tiles[i], peaks[i], dim=0)
            for i in list(range(4)):
                T.copy(peaks[i], y[i, 0])

    return four_maxima
