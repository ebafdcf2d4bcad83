"""Every kernel's legal schedules by its spec; those of chunk_wy and DeltaLog are listed here."""

from __future__ import annotations

import importlib

from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.candidates import IDLE, Block, Candidate, objection, space
from kda_tl.specs.deltalog import DeltaLogDecodeSchedule, DeltaLogDecodeSpec, DeltaLogPrepSchedule, DeltaLogPrepSpec
from kda_tl.specs.kernels import ChunkWySpec, KernelSpec
from kda_tl.specs.schedules import ChunkWySchedule, Schedule

__all__ = ["candidates", "rejection"]

ROW_LANES = 8  # threads that share a row of a DeltaLog base


def candidates(spec: KernelSpec, arch: str) -> list[Candidate]:
    """Every schedule that a tuner tries for `spec` on `arch`, and those it does not, with the reason."""
    if isinstance(spec, ChunkWySpec):
        return chunk_wy_candidates(spec, arch)
    if isinstance(spec, DeltaLogDecodeSpec):
        return deltalog_decode_candidates(spec, arch)
    if isinstance(spec, DeltaLogPrepSpec):
        return deltalog_prep_candidates(spec, arch)
    found: list[Candidate] = importlib.import_module(f"kda_tl.kernels.{spec.kernel}").candidates(spec, arch)
    return found


def rejection(spec: KernelSpec, schedule: Schedule, arch: str) -> str | None:
    """Why `schedule`, one of another spec of the same kernel, does not serve `spec`; None where it does."""
    for candidate in candidates(spec, arch):
        if candidate.schedule == schedule:
            return None if candidate.reason is None or candidate.reason.startswith(IDLE) else candidate.reason
    return f"not among the candidates of {spec.key}"


def chunk_wy_candidates(spec: ChunkWySpec, arch: str) -> list[Candidate]:
    """A block keeps its chunk's decays, gates, q and k in registers, and both block products in shared memory."""
    C, K, width = spec.chunk_size, spec.head_dim_k, 4 if spec.operand_dtype == "float32" else 2

    def judge(schedule: ChunkWySchedule) -> str | None:
        threads = schedule.parts * K // 2
        if threads % 128:
            return f"divisibility: parts * head_dim_k / 2 = {threads} threads are no whole warpgroups"
        rows = C // schedule.parts
        held = rows * (2 + 3 * width // 2) if spec.decay == "per_key" else rows * (2 + width)
        operands = C * K * 3 // 2 * width
        if arch == "sm_90" and width == 2:  # two stages, in columns of 8 with a row more than there are
            operands = 2 * K * (C + 1 + C // 2 + 1) * width
        shared = operands + 2 * C * (C + 8) * 4 + 3 * schedule.parts * K * 4 + (3 * K + 4 * C) * 4
        return objection(Block(threads, shared, held + 32, schedule.min_blocks), arch, spare=2)

    if arch_row(arch).is_cpu:
        return space(ChunkWySchedule, judge, parts=(2, 4, 8))
    return space(ChunkWySchedule, judge, parts=(2, 4, 8), min_blocks=(1, 2, 3, 4))


def deltalog_decode_candidates(spec: DeltaLogDecodeSpec, arch: str) -> list[Candidate]:
    """By rows of the base per block, and blocks in flight; and by the interval between folds, a run-time value, around the
    minimum of the traffic."""
    K, V, D, capacity = spec.head_dim_k, spec.head_dim_v, spec.decay_size, spec.capacity

    def judge(schedule: DeltaLogDecodeSchedule) -> str | None:
        if V % schedule.block_v:
            return f"divisibility: block_v {schedule.block_v} does not divide V = {V}"
        if schedule.merge_every > capacity:
            return f"divisibility: a log has room for {capacity} entries, not for {schedule.merge_every}"
        rows = schedule.block_v * ROW_LANES // schedule.threads
        held = rows * (K // ROW_LANES) * (4 if spec.state_dtype == "float32" else 2) // 4
        width = 2 if spec.dtype != "float32" else 4
        shared = (capacity + 1) * (K * width + D * 4 + schedule.block_v * 4) + (5 * K + D + schedule.block_v) * 4 + 256
        strided = 0 if spec.state_v_first else 80  # an address per element
        return objection(Block(schedule.threads, shared, held + 32 + strided, schedule.min_blocks), arch, spare=1)

    if arch_row(arch).is_cpu:
        return space(DeltaLogDecodeSchedule, judge, block_v=(32, 64), merge_every=(4, 8))
    narrow = spec.state_dtype != "float32"
    intervals = (6, 8, 12, 16) if narrow or D == 1 else (6, 8, 10, 12)
    return space(DeltaLogDecodeSchedule, judge, block_v=(16, 32, 64, 128), threads=(128, 256), min_blocks=(1, 2, 3, 4, 5, 6, 7),
                 merge_every=intervals)  # fmt: skip


def deltalog_prep_candidates(spec: DeltaLogPrepSpec, arch: str) -> list[Candidate]:
    """By threads of a block: an entry of the log is a warp's job."""
    shared = (spec.capacity + 1) * 4 * (spec.head_dim_k + spec.decay_size) + 24 * spec.head_dim_k

    def judge(schedule: DeltaLogPrepSchedule) -> str | None:
        return objection(Block(schedule.threads, shared, 72), arch)

    return space(DeltaLogPrepSchedule, judge, threads=(64, 128, 256))
