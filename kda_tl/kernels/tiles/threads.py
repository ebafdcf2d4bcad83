"""Programs written thread by thread: on the cpu the threads of a block run in turn, phase by phase.

A phase is a loop `for thread in each_thread(t, threads)`. What a thread keeps from one phase to the next lies in `registers`,
which on the cpu have one row per thread. Only `lane_sums` and `block_sums` look at other threads' registers.
"""

import tilelang.language as T

WARP = 32


def each_thread(t, threads):
    """The thread at hand, once; on the cpu, all of them in turn."""
    return T.serial(threads) if t.is_cpu else [T.get_thread_binding()]


def registers(t, threads, shape, dtype):
    """An array that every thread has for itself. Index it with `own`; on a GPU all indices must be known when compiled."""
    return T.alloc_local((threads, *shape) if t.is_cpu else shape, dtype)


def own(t, thread, *index):
    """The index of `registers` that means `index` of this thread."""
    return (thread, *index) if t.is_cpu else index


def unrolled(t, extent):
    """A loop whose index is known when compiled."""
    return T.serial(extent) if t.is_cpu else T.unroll(extent)


def vectorized(t, extent):
    """A loop that one access of memory handles."""
    return T.serial(extent) if t.is_cpu else T.vectorized(extent)


@T.macro
def lane_sums(t, values, count, lanes, threads):
    """Replaces `count` registers by their sums over `lanes` (a power of two up to 32) neighbouring threads, in all of these."""
    if t.is_cpu:
        total = T.alloc_var("float32", init=0.0)
        for group, m in T.grid(threads // lanes, count):
            total = 0.0
            for lane in T.serial(lanes):
                total = total + values[group * lanes + lane, m]
            for lane in T.serial(lanes):
                values[group * lanes + lane, m] = total
    else:
        for step in list(range(lanes.bit_length() - 1)):
            for m in T.unroll(count):
                values[m] = values[m] + T.shfl_xor(values[m], 1 << step)


@T.macro
def block_sums(t, values, sums, count, threads):
    """sums [count, threads / 32], shared: the sums of `count` registers over every warp."""
    if t.is_cpu:
        for m, warp in T.grid(count, threads // WARP):
            sums[m, warp] = 0.0
            for lane in T.serial(WARP):
                sums[m, warp] = sums[m, warp] + values[warp * WARP + lane, m]
    else:
        thread = T.get_thread_binding()
        for step in list(range(5)):
            for m in T.unroll(count):
                values[m] = values[m] + T.shfl_xor(values[m], 1 << step)
        if thread % WARP == 0:
            for m in T.unroll(count):
                sums[m, thread // WARP] = values[m]
