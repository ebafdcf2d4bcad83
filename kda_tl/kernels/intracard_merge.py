"""intracard_merge: from the maps of a sequence's segments to the state before each. One block holds a V tile and goes along.

    S_0     = initial state
    S_(s+1) = M_s S_s + B_s

Products are float32 multiply-adds: dozens of maps are composed, and every rounding of S goes through all that follow. A sum
runs over the columns of M in order, whatever the tile, so that its bits do not depend on the schedule. A thread has some
neighbouring rows of four columns; it reads M, which lies transposed, in wide loads that no other thread of its warp repeats in
vain, and S from shared memory. Without the delta correction M is a diagonal, and S stays where it is.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.chunks import locate_segment
from kda_tl.kernels.tiles.target import TileTarget, run_time_strides
from kda_tl.kernels.tiles.threads import each_thread, own, registers, unrolled, vectorized
from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.candidates import Block, Candidate, objection, space
from kda_tl.specs.intracard import IntracardMergeSchedule, IntracardMergeSpec

COLUMNS = 4  # of the state, per thread
AHEAD = 64  # elements of M that a thread multiplies while as many are on their way


def columns_ahead(K: int, rows: int) -> int:
    """Of M, at a time, for a thread with so many rows."""
    return min(AHEAD // rows, K // 2)


def candidates(spec: IntracardMergeSpec, arch: str) -> list[Candidate]:
    """By how many columns of a state a block has, and over how many threads their rows are spread."""
    K, V = spec.head_dim_k, spec.head_dim_v

    def judge(schedule: IntracardMergeSchedule) -> str | None:
        if V % schedule.block_v:
            return f"divisibility: block_v {schedule.block_v} does not divide V = {V}"
        rows, rest = divmod(K * schedule.block_v // COLUMNS, schedule.threads)
        if rows not in (1, 2, 4, 8) or rest:
            return f"divisibility: {K} rows over {schedule.threads} threads are {rows} for one, not 1, 2, 4 or 8"
        held = rows * COLUMNS + (2 * columns_ahead(K, rows) * rows if spec.delta else 0)
        return objection(Block(schedule.threads, 2 * K * schedule.block_v * 4 if spec.delta else 0, held + 40), arch)

    is_cpu = arch_row(arch).is_cpu
    return space(IntracardMergeSchedule, judge, threads=(128,) if is_cpu else (128, 256, 512), block_v=(8, 16, 32, 64))


def program(spec: IntracardMergeSpec, schedule: IntracardMergeSchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments, in order:

    transitions, biases as intracard_pre_scan wrote them, [N, cuts, HV, ..]; cu_seqlens [N + 1] int32; initial_state [N or
    pool, HV, K, V] dtype with any strides; state_indices [N] int32; has_initial_state [N] uint8; segment_states
    [N, cuts + 1, HV, K, V] float32, out: row s is the state before segment s, row 0 the initial state in float32; then int32:
    seq_len: T; num_seqs: N; uniform: 1 for a dense batch; load_state, masked, indexed: flags of initial_state,
    has_initial_state, state_indices; null_index: of state_indices, one that stands for no state; segment_chunks: chunks of a
    segment. Rows of segments that a sequence does not have, or of a sequence without a state in the pool, are left as they are.
    """
    t = TileTarget(arch)
    C, K, V, delta = spec.chunk_size, spec.head_dim_k, spec.head_dim_v, spec.delta
    block_v, threads = schedule.block_v, schedule.threads
    tiles_v, lanes_v = V // block_v, block_v // COLUMNS
    rows = K * lanes_v // threads
    ahead = columns_ahead(K, rows)
    cut_seqs, cuts, state_seqs, state_cuts, HV, num_offsets, initials, num_indices, num_masks = T.dynamic(
        "cut_seqs, cuts, state_seqs, state_cuts, HV, num_offsets, initials, num_indices, num_masks"
    )
    initial_strides = run_time_strides("i", "nhkv")

    @T.prim_func
    def intracard_merge(
        transitions: T.Tensor((cut_seqs, cuts, HV, K if delta else 1, K), "float32"),
        biases: T.Tensor((cut_seqs, cuts, HV, K, V), "float32"),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        initial_state: T.StridedTensor((initials, HV, K, V), initial_strides, spec.dtype),
        state_indices: T.Tensor((num_indices,), "int32"),
        has_initial_state: T.Tensor((num_masks,), "uint8"),
        segment_states: T.Tensor((state_seqs, state_cuts, HV, K, V), "float32"),
        seq_len: T.int32,
        num_seqs: T.int32,
        uniform: T.int32,
        load_state: T.int32,
        masked: T.int32,
        indexed: T.int32,
        null_index: T.int32,
        segment_chunks: T.int32,
    ):
        with T.Kernel(num_seqs * HV * tiles_v, threads=threads) as block:
            where = T.alloc_local((10,), "int32")
            # As one segment, so that its length is the sequence's.
            locate_segment(block, tiles_v, HV, 1, T.truncdiv(seq_len, C) + 1, uniform, seq_len, num_seqs, cu_seqlens, C,
                           T.if_then_else(load_state != 0, indexed, 0), state_indices, null_index, initials, where)  # fmt: skip
            value_head, sequence, length, state_slot = where[1], where[2], where[6], where[9]
            tokens = segment_chunks * C

            if state_slot >= 0:
                held = t.shared((2, K, block_v), "float32")
                total = registers(t, threads, (rows, COLUMNS), "float32")
                column = registers(t, threads, (2, ahead, rows), "float32")
                state_row = registers(t, threads, (COLUMNS,), "float32")
                starts = T.alloc_var("int32", init=0)

                starts = load_state
                if masked != 0:
                    starts = T.if_then_else(T.cast(has_initial_state[sequence], "int32") != 0, load_state, 0)
                for thread in each_thread(t, threads):
                    row, lane = thread // lanes_v * rows, thread % lanes_v * COLUMNS
                    for r in unrolled(t, rows):
                        for e in unrolled(t, COLUMNS):
                            total[own(t, thread, r, e)] = 0.0
                            if starts != 0:
                                total[own(t, thread, r, e)] = initial_state[
                                    state_slot, value_head, row + r, where[0] * block_v + lane + e
                                ]
                        if delta:
                            for e in vectorized(t, COLUMNS):
                                held[0, row + r, lane + e] = total[own(t, thread, r, e)]
                        for e in vectorized(t, COLUMNS):
                            segment_states[sequence, 0, value_head, row + r, where[0] * block_v + lane + e] = total[
                                own(t, thread, r, e)
                            ]
                for segment in T.serial(T.truncdiv(length - 1, tokens)):
                    if delta:
                        if not t.is_cpu:
                            T.sync_threads()
                        for thread in each_thread(t, threads):
                            row, lane = thread // lanes_v * rows, thread % lanes_v * COLUMNS
                            for r in unrolled(t, rows):
                                for e in vectorized(t, COLUMNS):
                                    total[own(t, thread, r, e)] = biases[
                                        sequence, segment, value_head, row + r, where[0] * block_v + lane + e
                                    ]
                            load_columns(t, transitions, column, 0, thread, 0, sequence, segment, value_head, row, rows, ahead)
                            for step in T.serial(K // (2 * ahead)):
                                for half in list(range(2)):
                                    c = (step * 2 + half) * ahead
                                    if c + ahead < K:
                                        load_columns(t, transitions, column, 1 - half, thread, c + ahead, sequence, segment,
                                                     value_head, row, rows, ahead)  # fmt: skip
                                    for m in unrolled(t, ahead):
                                        for e in vectorized(t, COLUMNS):
                                            state_row[own(t, thread, e)] = held[segment % 2, c + m, lane + e]
                                        for r in unrolled(t, rows):
                                            for e in unrolled(t, COLUMNS):
                                                total[own(t, thread, r, e)] = (
                                                    total[own(t, thread, r, e)]
                                                    + column[own(t, thread, half, m, r)] * state_row[own(t, thread, e)]
                                                )
                    else:
                        for thread in each_thread(t, threads):
                            row, lane = thread // lanes_v * rows, thread % lanes_v * COLUMNS
                            for r in unrolled(t, rows):
                                for e in vectorized(t, COLUMNS):
                                    state_row[own(t, thread, e)] = biases[
                                        sequence, segment, value_head, row + r, where[0] * block_v + lane + e
                                    ]
                                for e in unrolled(t, COLUMNS):
                                    total[own(t, thread, r, e)] = (
                                        state_row[own(t, thread, e)]
                                        + transitions[sequence, segment, value_head, 0, row + r] * total[own(t, thread, r, e)]
                                    )
                    for thread in each_thread(t, threads):
                        row, lane = thread // lanes_v * rows, thread % lanes_v * COLUMNS
                        for r in unrolled(t, rows):
                            if delta:
                                for e in vectorized(t, COLUMNS):
                                    held[(segment + 1) % 2, row + r, lane + e] = total[own(t, thread, r, e)]
                            for e in vectorized(t, COLUMNS):
                                segment_states[sequence, segment + 1, value_head, row + r, where[0] * block_v + lane + e] = (
                                    total[own(t, thread, r, e)]
                                )

    return intracard_merge


@T.macro
def load_columns(t, transitions, column, into, thread, first, sequence, segment, value_head, row, rows, ahead):
    """The thread's rows of `ahead` columns of M."""
    for m in unrolled(t, ahead):
        for r in vectorized(t, rows):
            column[own(t, thread, into, m, r)] = transitions[sequence, segment, value_head, first + m, row + r]
