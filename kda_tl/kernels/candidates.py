"""Every kernel's legal schedules by its spec, and chunk_wy's own."""

from __future__ import annotations

import importlib

from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.candidates import IDLE, Block, Candidate, objection, space
from kda_tl.specs.kernels import ChunkWySpec, KernelSpec
from kda_tl.specs.schedules import ChunkWySchedule, Schedule

__all__ = ["candidates", "rejection"]


def candidates(spec: KernelSpec, arch: str) -> list[Candidate]:
    """Every schedule that a tuner tries for `spec` on `arch`, and those it does not, with the reason."""
    if isinstance(spec, ChunkWySpec):
        return chunk_wy_candidates(spec, arch)
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
        shared = operands + 2 * C * C * 4 + 3 * schedule.parts * K * 4 + (K + 4 * C) * 4
        return objection(Block(threads, shared, held + 32, schedule.min_blocks), arch, spare=2)

    if arch_row(arch).is_cpu:
        return space(ChunkWySchedule, judge, parts=(2, 4, 8), min_blocks=(1,))
    return space(ChunkWySchedule, judge, parts=(2, 4, 8), min_blocks=(1, 2, 3, 4))
