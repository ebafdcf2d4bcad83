"""Legal schedules: how a kernel file lists those it can be built with, and what an arch has to say about a block.

Each kernel file has `candidates(spec, arch)`, all that the tuner ever tries. Register counts are estimates: a candidate that
passes here and spills when it is compiled is turned down then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.schedules import Schedule

__all__ = ["IDLE", "Block", "Candidate", "objection", "space"]

MULTIPROCESSOR_REGISTERS = 65536
MOST_REGISTERS = 255
IDLE = "idle:"
"""How the reason of a schedule begins that can be built and run, and leaves a part of every multiprocessor idle."""
BLOCK_RESERVE = 1024
"""Bytes of shared memory that the system takes of every block."""


@dataclass(frozen=True)
class Candidate:
    """One schedule of a spec.

    Attributes:
        fields: of the schedule, by name; those left out have their defaults.
        schedule: None where the fields make none.
        reason: why it cannot be built or run; None where it can.
    """

    fields: Mapping[str, object]
    schedule: Schedule | None
    reason: str | None = None


@dataclass(frozen=True)
class Block:
    """What a block takes of a multiprocessor.

    Attributes:
        threads: of the block.
        shared_memory: bytes, static and dynamic.
        registers: per thread, by estimate.
        min_blocks: blocks that must fit side by side.
    """

    threads: int
    shared_memory: int
    registers: int
    min_blocks: int = 1


def objection(block: Block, arch: str, spare: int | None = None) -> str | None:
    """Why such blocks do not fit on `arch`; None where they do. The cpu has no limits.

    spare: for kernels that wait for memory, which more blocks hide: where so many more of them fit beside `min_blocks`, the
    schedule counts as one that leaves a multiprocessor idle.
    """
    row = arch_row(arch)
    if row.is_cpu:
        return None
    if block.threads > 1024:
        return f"threads: a block has {block.threads}, 1024 at most"
    if block.shared_memory > row.shared_memory:
        return f"shared memory: a block needs {block.shared_memory} bytes, {arch} allows {row.shared_memory}"
    blocks = block.min_blocks
    allowed = min(MOST_REGISTERS, MULTIPROCESSOR_REGISTERS // (blocks * block.threads) // 8 * 8)
    if block.registers > allowed:
        return f"registers: a thread needs about {block.registers}, {blocks} x {block.threads} threads get {allowed}"
    together, available = blocks * (block.shared_memory + BLOCK_RESERVE), row.multiprocessor_shared_memory
    if together > available:
        return f"{IDLE} {blocks} blocks need {together} bytes of shared memory, a multiprocessor has {available}"
    if blocks * block.threads > row.multiprocessor_threads:
        return f"{IDLE} {blocks} blocks of {block.threads} threads, a multiprocessor runs {row.multiprocessor_threads}"
    if spare is not None and objection(replace(block, min_blocks=blocks + spare), arch) is None:
        return f"{IDLE} {blocks + spare} blocks fit where the schedule keeps room for {blocks}"
    return None


def space(kind: type[Schedule], judge: Callable[[Any], str | None], **values: Sequence[object]) -> list[Candidate]:
    """Every combination of `values`, the last one varying fastest. The schedule's own rules come first, then `judge`, which
    returns a reason or None."""
    found = []
    for combination in itertools.product(*values.values()):
        fields = dict(zip(values, combination, strict=True))
        try:
            schedule = kind(**fields)
        except ValueError as error:
            found.append(Candidate(fields, None, f"divisibility: {error}"))
        else:
            found.append(Candidate(fields, schedule, judge(schedule)))
    return found
