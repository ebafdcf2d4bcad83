"""The smallest programs that show what TileLang cannot express or gets wrong. Imports TileLang: tests import this inside a
fixture."""

from typing import Any

import tilelang.language as T


def multicast(kind: str) -> Any:
    """Two blocks of a cluster and one tile. kind: "ordinary" or "cluster", the barrier that counts the tile's bytes;
    "released", an ordinary one, and a barrier for arrivals from other blocks beside it; "one caller"."""

    @T.prim_func
    def multicast(x: T.Tensor((64, 64), "float16"), y: T.Tensor((2, 64, 64), "float16")):
        with T.Kernel(2, threads=128, cluster_dims=2) as block:
            tile = T.alloc_shared((64, 64), "float16")
            full = T.alloc_cluster_barrier(128) if kind == "cluster" else T.alloc_barrier(128)
            if kind == "released":
                released = T.alloc_cluster_barrier(2)
            if kind == "one caller":
                if T.block_rank_in_cluster() == 1:
                    T.tma_copy(x[0:64, 0:64], tile, barrier=full, cluster_mask=3)
            else:
                T.tma_copy(x[0:64, 0:64], tile, barrier=full, cluster_mask=3)
            T.barrier_arrive(full)
            T.barrier_wait(full, 0)
            if kind == "released":
                T.mbarrier_arrive(released, 0)
            T.copy(tile, y[block, 0:64, 0:64])

    return multicast


def pair_changed_twice(function: Any) -> Any:
    """y = 3 f(y), in two steps, on pairs."""

    @T.prim_func
    def pair_changed_twice(y: T.Tensor((128, 2), "float32")):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_local((2,), "float32")
            for j in T.vectorized(2):
                x[j] = y[T.get_thread_binding(), j]
            for j in T.vectorized(2):
                x[j] = function(x[j])
            for j in T.vectorized(2):
                x[j] = x[j] * 3.0
            for j in T.vectorized(2):
                y[T.get_thread_binding(), j] = x[j]

    return pair_changed_twice


def written_by_some(writers: int) -> Any:
    """A loop of `writers` iterations in which threads exchange a tile, then one of 128 that reads it."""

    @T.prim_func
    def written_by_some(x: T.Tensor((128,), "float32"), y: T.Tensor((128,), "float32"), z: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_shared((128,), "float32")
            for _step in T.serial(4):
                for i in T.Parallel(writers):
                    tile[i] = x[i]
                for i in T.Parallel(writers):
                    y[i] = tile[writers - 1 - i]
            for i in T.Parallel(128):
                z[i] = tile[(i + 5) % writers]

    return written_by_some


def product_of_16(rows: int) -> Any:
    """[rows, 16] = [rows, 16] [16, 16], by a block of 128 threads."""

    @T.prim_func
    def product_of_16(x: T.Tensor((rows, 16), "float16"), y: T.Tensor((rows, 16), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((rows, 16), "float16")
            out = T.alloc_fragment((rows, 16), "float32")
            T.copy(x, a)
            T.clear(out)
            T.gemm(a, a[0:16, :], out)
            T.copy(out, y)

    return product_of_16


def fragment_reversed(scope: str) -> Any:
    """y[i] = x[i] + x[63 - i], of a tile in a fragment or in shared memory."""

    @T.prim_func
    def fragment_reversed(x: T.Tensor((64, 64), "float32"), y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_fragment((64, 64), "float32") if scope == "fragment" else T.alloc_shared((64, 64), "float32")
            T.copy(x, tile)
            for i, j in T.Parallel(64, 64):
                y[i, j] = tile[i, j] + tile[63 - i, j]

    return fragment_reversed


def barrier_to_a_macro(whole: bool) -> Any:
    """A macro that arrives at one of several barriers, given all of them and the number, or that barrier."""

    @T.macro
    def arrive_at(barriers, i):
        T.barrier_arrive(barriers[i])

    @T.macro
    def arrive(barrier):
        T.barrier_arrive(barrier)

    @T.prim_func
    def barrier_to_a_macro(x: T.Tensor((2,), "float32")):
        with T.Kernel(1, threads=128) as _:
            barriers = T.alloc_barrier([128] * 2)
            for i in T.serial(2):
                if whole:
                    arrive_at(barriers, i)
                else:
                    arrive(barriers[i])
                x[i] = 0.0

    return barrier_to_a_macro
