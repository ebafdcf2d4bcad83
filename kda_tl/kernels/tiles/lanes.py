"""Threads by hand, on targets with and without them: who works on what, sums over neighbours, wide accesses.

On a GPU each of these loops runs once, with the thread's own number; on the cpu it runs over all threads in turn. A sum over
the `width` neighbours that share an item must therefore stand outside of the loop over them:

    for group in groups(t, threads, width):
        total = 0.0
        for lane in lanes(t, width):
            total = total + ...
        total = group_sum(t, total, width)

What a thread holds from one such loop to the next is an array [threads on the cpu, 1 on a GPU]: see `private` and `own`.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.target import TileTarget


def lanes(t: TileTarget, width: int) -> Any:
    """The thread's place among the `width` threads that share an item."""
    return T.serial(width) if t.is_cpu else [T.get_thread_binding() % width]


def groups(t: TileTarget, threads: int, width: int) -> Any:
    """The number of the thread's group of `width` threads."""
    return T.serial(threads // width) if t.is_cpu else [T.get_thread_binding() // width]


def private(t: TileTarget, threads: int, shape: tuple[int, ...], dtype: str) -> Any:
    """An array in registers for every thread; its first index is `own(thread)`."""
    return T.alloc_local((threads if t.is_cpu else 1, *shape), dtype)


def own(t: TileTarget, thread: Any) -> Any:
    return thread if t.is_cpu else 0


def wide(t: TileTarget, width: int) -> Any:
    """A loop over neighbouring elements, which one instruction handles."""
    return T.serial(width) if t.is_cpu else T.vectorized(width)


def sync(t: TileTarget) -> Any:
    """All threads of the block wait for each other."""
    return T.evaluate(0) if t.is_cpu else T.sync_threads()


@T.macro
def group_sum(t, value, width):
    """The sum over `width` neighbouring threads (a power of two up to 32), in all of them."""
    total = T.alloc_var("float32", init=0.0)
    total = value
    if not t.is_cpu:
        for step in [s for s in (1, 2, 4, 8, 16) if s < width]:
            total = total + T.shfl_xor(total, step)
    return total
