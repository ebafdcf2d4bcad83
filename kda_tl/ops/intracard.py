"""Intracard parallelism: whether a prefill call cuts its sequences into segments, and into how many.

A scan walks the chunks of a sequence one after another, so few sequences and heads leave most of a device idle. Cut at chunk
boundaries, all segments run at once, from states that two more kernels find out first: intracard_pre_scan, the affine map of
every segment but the last, and intracard_merge, which applies them in turn. That is worth while where the chain of chunks gets
shorter by more than the maps cost, and `plan_split` says so from sizes alone: lengths where the host knows them, head counts,
what `Device` says, and whether torch would have to copy a pool of states for it. Equal calls get the same cut in every process,
and nothing is read from a device.

Where a device alone knows the lengths of a pack, T stands for the longest one: grids are upper bounds then, and blocks of
segments that a sequence does not have leave at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kda_tl.runtime import dispatcher
from kda_tl.runtime.environment import registry_setting
from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.intracard import IntracardMergeSchedule, IntracardMergeSpec, IntracardPreScanSchedule, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkScanSpec
from kda_tl.specs.schedules import ChunkScanSchedule
from kda_tl.specs.sizes import problem_size

__all__ = ["Device", "SplitInfo", "Tiling", "Work", "device_of", "multiprocessors", "plan_split"]

# The model, in microseconds. A block takes so long to start and end, and then for every chunk it walks, or map it applies, as
# {tile: (start, step)}: fitted to times of the warp-specialized scans and the merge on one NVIDIA H200, in 160 cuts of 1,024 to
# 32,768 tokens and 1 to 32 heads. tests/gpu/test_gpu_tuning.py holds what is chosen to the best cut of other sizes. The rest is
# assumed: plain variants, a merge's tile of 64, and that K = V = 64 and rules without the delta correction take as long.
SCAN_US = {16: (4.5, 0.95), 32: (6.5, 1.15), 64: (7.0, 1.75), 128: (12.0, 3.0)}
PRE_SCAN_US = (6.0, 1.2)
PRE_SCAN_WAVE_US = 3.0  # for each further block that a multiprocessor has in turn
MERGE_US = {8: (2.7, 2.05), 16: (2.7, 3.0), 32: (2.7, 5.2), 64: (2.7, 9.2)}  # 0.2 of each step: what a segment costs the others
PLAIN_US = (6.0, 8.0)
EXTRA_LAUNCHES_US = 3.0  # the gaps that two more kernels leave
POOL_US = 100.0  # of a pool that kernels take of whole sequences alone: torch copies it, 45 in a CUDA graph, else 200 to 400
WORTH_WHILE = 0.97  # a cut must bring the time after chunk_wy down to this part of it
NEAR = 1.04  # of cuts that take up to so many times the fastest one's time, the one into fewest segments
MAX_SEGMENTS = 64
MAX_BYTES = 2**29  # of maps and states between segments, where nobody asked for a number of segments

MULTIPROCESSORS = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 188}
"""Of the usual device of an arch, for plans without a device."""


class Tiling(NamedTuple):
    """A size class of a kernel, as the model sees it: the largest problem (None: any), blocks per segment (merge: per sequence)
    and value head, and microseconds of a block: to start and end, and per chunk (merge: per map)."""

    up_to: int | None
    tiles: int
    start_us: float = 5.0
    step_us: float = 1.5


@dataclass(frozen=True)
class Device:
    """What the model knows of a device and its schedules: of each kernel the classes, smallest problems first.

    whole: of the scan of sequences that are not cut, where that is another one, for the states of a pool.
    """

    multiprocessors: int
    scan: tuple[Tiling, ...] = (Tiling(None, 4),)
    pre_scan: tuple[Tiling, ...] = (Tiling(None, 8),)
    merge: tuple[Tiling, ...] = (Tiling(None, 8),)
    whole: tuple[Tiling, ...] | None = None

    def scan_of(self, cut: bool) -> tuple[Tiling, ...]:
        return self.scan if cut or self.whole is None else self.whole


def _class_of(classes: tuple[Tiling, ...], kernel: str, items: int, HV: int) -> Tiling:
    size = problem_size(kernel, items, HV)
    return next(one for one in classes if one.up_to is None or size <= one.up_to)


@dataclass(frozen=True)
class Work:
    """chunks: of every sequence, where the host knows them; else None, and `longest` and `total` are upper bounds.
    A dense batch has `chunks` of one sequence, and N of them. segment_bytes: maps and state of a segment and value head.
    pooled: states are in a pool that kernels take of whole sequences alone."""

    N: int
    HV: int
    longest: int
    total: int
    chunks: tuple[int, ...] | None = None
    dense: bool = True
    segment_bytes: int = 3 * 4 * 128 * 128
    pooled: bool = False

    def segments(self, segment_chunks: int) -> int:
        """Of all sequences together."""
        if self.chunks is None:
            return -(-self.longest // segment_chunks) + self.N - 1
        found = sum(-(-n // segment_chunks) for n in self.chunks)
        return found * self.N if self.dense else found

    def scans(self, segment_chunks: int) -> int:
        """What chunk_scan runs side by side for a value head: `SplitInfo.scans` of that cut."""
        return self.N if segment_chunks >= self.longest else self.segments(segment_chunks)


@dataclass(frozen=True)
class SplitInfo:
    """How every sequence is cut: at every `segment_chunks` chunks, so into at most `segments` pieces; and why."""

    segments: int
    segment_chunks: int
    reason: str
    chunks: tuple[int, ...] | None = None
    chunk_size: int = 64

    def of_sequence(self, tokens: int) -> list[tuple[int, int]]:
        """(first token, last token + 1) of each segment of a sequence; none of an empty one."""
        size = self.segment_chunks * self.chunk_size if self.segments > 1 else max(tokens, 1)
        return [(first, min(first + size, tokens)) for first in range(0, tokens, size)]

    def scans(self, N: int) -> int:
        """Segments of all N sequences together, upper bounds where a device alone knows their lengths."""
        if self.segments == 1:
            return N
        if self.chunks is None:
            return self.segments + N - 1
        if len(self.chunks) == 1:
            return self.segments * N
        return sum(-(-n // self.segment_chunks) for n in self.chunks)

    def __str__(self) -> str:
        if self.segments == 1:
            return f"1 per sequence: {self.reason}"
        counts = "" if self.chunks is None or len(self.chunks) == 1 else f" ({', '.join(self._counts())} by sequence)"
        return f"up to {self.segments} per sequence{counts}, {self.segment_chunks} chunks each: {self.reason}"

    def _counts(self, shown: int = 16) -> Iterator[str]:
        assert self.chunks is not None
        for n in self.chunks[:shown]:
            yield str(-(-n // self.segment_chunks))
        if len(self.chunks) > shown:
            yield "..."


def plan_split(work: Work, device: Device, forced: int | None = None) -> SplitInfo:
    """The cut of a call. forced: `intracard_segments` of the caller."""
    if forced == 1:
        return SplitInfo(1, max(work.longest, 1), "intracard_segments=1", work.chunks)
    if forced is not None:
        return _cut(work, forced, f"intracard_segments={forced}{', with copies of the pool' if work.pooled else ''}")
    return _planned(work, device)


@functools.lru_cache(maxsize=4096)
def _planned(work: Work, device: Device) -> SplitInfo:
    if work.longest < 2:
        return SplitInfo(1, max(work.longest, 1), "no sequence is longer than a chunk", work.chunks)
    blocks = work.N * work.HV * _class_of(device.scan_of(False), "chunk_scan", work.N, work.HV).tiles
    if work.chunks is None and blocks >= device.multiprocessors:
        reason = f"{blocks} blocks fill {device.multiprocessors} multiprocessors, if lengths are alike"
        return SplitInfo(1, work.longest, reason)
    whole = _microseconds(work, device, work.longest)
    times: dict[int, float] = {}  # fewest segments first
    # Counts that come to the same segments are tried once.
    for segment_chunks in dict.fromkeys(-(-work.longest // count) for count in range(2, min(work.longest, MAX_SEGMENTS) + 1)):
        if work.N * -(-work.longest // segment_chunks) * work.HV * work.segment_bytes > MAX_BYTES:
            break
        times[segment_chunks] = _microseconds(work, device, segment_chunks)
    limit = min(NEAR * min(times.values(), default=whole), WORTH_WHILE * whole)
    best = next((segment_chunks for segment_chunks, time in times.items() if time <= limit), None)
    if best is None:
        reason = f"{blocks} blocks on {device.multiprocessors} multiprocessors, by the model {whole:.0f} us"
        copies = f", with {POOL_US:.0f} us for copies of the pool," if work.pooled and times else ""
        return SplitInfo(1, work.longest, f"{reason}, and no cut{copies} is worth while", work.chunks)
    copies = f", {POOL_US:.0f} us of them for copies of the pool," if work.pooled else ""
    return _cut(work, -(-work.longest // best), f"by the model {times[best]:.0f} us{copies} instead of {whole:.0f} us")


def _cut(work: Work, count: int, reason: str) -> SplitInfo:
    """`count` segments of the longest sequence, or as many as whole chunks allow."""
    longest = max(work.longest, 1)
    segment_chunks = -(-longest // count)
    return SplitInfo(-(-longest // segment_chunks), segment_chunks, reason, work.chunks)


def _microseconds(work: Work, device: Device, segment_chunks: int) -> float:
    """Of the scan, and of what cutting costs, by the model. One block of a scan runs on a multiprocessor at a time."""
    segments, HV, scans = work.segments(segment_chunks), work.HV, work.scans(segment_chunks)
    cut = segment_chunks < work.longest
    tiling = _class_of(device.scan_of(cut), "chunk_scan", scans, HV)
    blocks = segments * HV * tiling.tiles
    # In waves where blocks are alike; else a long one may come last.
    packed = blocks * work.total / max(segments, 1) / device.multiprocessors + segment_chunks
    scan = tiling.start_us + min(_waves(blocks, device) * segment_chunks, packed) * tiling.step_us
    if not cut:
        return scan
    alike = work.chunks is None or work.dense
    mapped = segments - (work.N if alike else sum(n > 0 for n in work.chunks or ()))
    merged = work.N if alike else sum(n > segment_chunks for n in work.chunks or ())
    tiling = _class_of(device.pre_scan, "intracard_pre_scan", scans, HV)
    waves = _waves(mapped * HV * tiling.tiles, device)  # only the last segment of a sequence is shorter, and has no map
    pre_scan = tiling.start_us + (waves - 1) * PRE_SCAN_WAVE_US + waves * segment_chunks * tiling.step_us
    tiling = _class_of(device.merge, "intracard_merge", work.N, HV)
    maps = -(-work.longest // segment_chunks) - 1
    merge = tiling.start_us + maps * tiling.step_us * _waves(merged * HV * tiling.tiles, device)
    return scan + pre_scan + merge + EXTRA_LAUNCHES_US + (POOL_US if work.pooled else 0.0)


def _waves(blocks: int, device: Device) -> int:
    return -(-blocks // device.multiprocessors)


def device_of(
    scan: ChunkScanSpec, whole: ChunkScanSpec, pre_scan: IntracardPreScanSpec, merge: IntracardMergeSpec, arch: str, count: int
) -> Device:
    """The model's view of `count` multiprocessors with the schedules that these kernels have on `arch`.

    whole: scans sequences that are not cut.
    """
    return _device(scan, whole, pre_scan, merge, arch, count, registry_setting())


@functools.cache
def _device(
    scan: ChunkScanSpec, whole: ChunkScanSpec, pre_scan: IntracardPreScanSpec, merge: IntracardMergeSpec, arch: str, count: int,
    registry: object,
) -> Device:  # fmt: skip
    columns = scan.head_dim_v + (scan.head_dim_k if scan.delta else 0)
    pre_scans, merges = [], []
    for one in dispatcher.schedule_classes(pre_scan, arch):
        assert isinstance(one.schedule, IntracardPreScanSchedule)
        specialized = one.schedule.variant == "warp_specialized"
        pre_scans.append(Tiling(one.up_to, columns // one.schedule.block, *(PRE_SCAN_US if specialized else PLAIN_US)))
    for one in dispatcher.schedule_classes(merge, arch):
        assert isinstance(one.schedule, IntracardMergeSchedule)
        block_v = one.schedule.block_v
        merges.append(Tiling(one.up_to, merge.head_dim_v // block_v, *MERGE_US[block_v]))
    return Device(count, _tilings(scan, arch), tuple(pre_scans), tuple(merges), _tilings(whole, arch))


def _tilings(scan: ChunkScanSpec, arch: str) -> tuple[Tiling, ...]:
    found = []
    for one in dispatcher.schedule_classes(scan, arch):
        assert isinstance(one.schedule, ChunkScanSchedule)
        block_v, specialized = one.schedule.block_v, one.schedule.variant == "warp_specialized"
        found.append(Tiling(one.up_to, scan.head_dim_v // block_v, *(SCAN_US[block_v] if specialized else PLAIN_US)))
    return tuple(found)


@functools.cache
def multiprocessors(device: torch.device, arch: str) -> int:
    """Of the device, or of the usual one of an arch that is planned for elsewhere; 1 for the cpu."""
    if arch_row(arch).is_cpu:
        return 1
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return MULTIPROCESSORS[arch]
