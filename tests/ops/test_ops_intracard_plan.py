"""When and how sequences are cut: a pure function of sizes, head counts and the device."""

from __future__ import annotations

import dataclasses
import heapq
import random

import pytest
import torch

from kda_tl.ops.intracard import (
    MAX_BYTES,
    MAX_SEGMENTS,
    MULTIPROCESSORS,
    NEAR,
    POOL_US,
    WORTH_WHILE,
    Device,
    SplitInfo,
    Tiling,
    Work,
    _microseconds,
    device_of,
    multiprocessors,
    plan_split,
)
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkScanSpec

H200 = Device(132)


def dense(chunks: int, HV: int, B: int = 1) -> Work:
    return Work(B, HV, chunks, chunks * B, (chunks,))


def pack(*chunks: int, HV: int = 4) -> Work:
    return Work(len(chunks), HV, max(chunks), sum(chunks), chunks, dense=False)


def unknown(chunks: int, N: int, HV: int = 4) -> Work:
    return Work(N, HV, chunks, chunks + N, None, dense=False)


@pytest.mark.parametrize("HV", [1, 2, 4, 8])
def test_few_heads_and_long_sequences_are_cut(HV: int) -> None:
    split = plan_split(dense(128, HV), H200)
    assert split.segments > 1 and split.segments * split.segment_chunks >= 128 > (split.segments - 1) * split.segment_chunks
    assert "by the model" in split.reason and "instead of 197 us" in split.reason


@pytest.mark.parametrize("work", [dense(128, 96), dense(128, 33), dense(64, 8, B=16), dense(4, 4), dense(1, 1), dense(2, 8)])
def test_a_full_device_and_short_sequences_are_not(work: Work) -> None:
    split = plan_split(work, H200)
    assert split.segments == 1 and split.segment_chunks >= work.longest and split.reason


def test_more_multiprocessors_never_cut_less_often() -> None:
    for HV in (1, 4, 16, 32):
        cut = [plan_split(dense(256, HV), Device(count)).segments > 1 for count in (20, 66, 108, 132, 264)]
        assert cut == sorted(cut)


def test_the_longest_sequence_of_a_pack_decides() -> None:
    assert plan_split(pack(*[8] * 64), H200).segments == 1
    long_one = plan_split(pack(1, 0, 256, 1), H200)
    assert long_one.segments > 1 and long_one.chunks == (1, 0, 256, 1)
    assert str(long_one).startswith(f"up to {long_one.segments} per sequence (1, 0, {long_one.segments}, 1 by sequence)")
    # However many short ones are beside it, as long as the maps, which have a row for each of them, stay small.
    assert plan_split(pack(256, *[1] * 20), H200).segments > 1
    assert plan_split(pack(256, *[1] * 2000), H200).segments == 1


def test_lengths_that_a_device_alone_knows() -> None:
    """T stands for the longest; many sequences are taken to be alike."""
    assert plan_split(unknown(256, 2), H200).segments > 1
    full = plan_split(unknown(256, 64), H200)
    assert full.segments == 1 and "1024 blocks fill 132 multiprocessors" in full.reason


@pytest.mark.parametrize(("chunks", "forced", "segments", "segment_chunks"), [
    (128, 4, 4, 32), (128, 7, 7, 19), (5, 4, 3, 2), (5, 100, 5, 1), (1, 4, 1, 1), (128, 1, 1, 128), (130, 8, 8, 17),
])  # fmt: skip
def test_a_number_of_segments_that_the_caller_asks_for(chunks: int, forced: int, segments: int, segment_chunks: int) -> None:
    for work in (dense(chunks, 96, B=8), pack(chunks, 0, 1), unknown(chunks, 3)):
        split = plan_split(work, H200, forced)
        assert (split.segments, split.segment_chunks) == (segments, segment_chunks)
        assert split.reason == f"intracard_segments={forced}"
        tokens = chunks * 64 - 5
        bounds = split.of_sequence(tokens)
        assert len(bounds) == segments and bounds[0][0] == 0 and bounds[-1][1] == tokens
        assert all(first % 64 == 0 for first, _ in bounds)


def test_the_number_of_scans() -> None:
    """What the model counts with is what the launch is told."""
    assert SplitInfo(1, 128, "whole", (128,)).scans(3) == 3 == SplitInfo(1, 9, "whole", (9, 0, 4)).scans(3)
    for work in (dense(128, 4, B=3), dense(5, 4), pack(256, 1, 0, 100), pack(64, 64), unknown(256, 2), unknown(256, 1)):
        for forced in (1, 2, 4, 7):
            split = plan_split(work, H200, forced)
            scans = split.scans(work.N)
            assert scans == work.scans(split.segment_chunks)
            if split.segments > 1 and work.chunks is not None:
                lengths = work.chunks * work.N if work.dense else work.chunks
                assert scans == sum(len(split.of_sequence(n * 64)) for n in lengths)


def test_the_class_of_the_cut_counts_not_that_of_the_whole() -> None:
    """Cut, 8 heads are 32 scans or more: a class with wide tiles for these makes the cut slower, so that fewer are made."""
    narrow, wide = Tiling(None, 4, step_us=1.5), Tiling(None, 1, step_us=30.0)
    uncut = plan_split(dense(128, 8), Device(132, scan=(narrow._replace(up_to=8), wide)))
    assert uncut.segments == 1 < plan_split(dense(128, 8), Device(132, scan=(narrow,))).segments
    cut = plan_split(dense(128, 8), Device(132, scan=(wide._replace(up_to=8), narrow)))
    assert cut.segments > 1 and "instead of 3845 us" in cut.reason


def busiest(blocks: list[int], multiprocessors: int) -> int:
    """Chunks until the last of the blocks ends, where each takes the multiprocessor that is free first."""
    free = [0] * multiprocessors
    for chunks in blocks:
        heapq.heapreplace(free, free[0] + chunks)
    return max(free)


def test_chunks_that_the_busiest_multiprocessor_walks() -> None:
    """Of pre-scans, whose blocks are alike in packs too, as many as they are; of scans, whose order counts, no fewer."""
    rng = random.Random(0)
    none, one = (Tiling(None, 1, 0.0, 0.0),), (Tiling(None, 1, 0.0, 1.0),)
    for _ in range(200):
        chunks = [rng.choice((0, 1, 7, 64, 256)) for _ in range(rng.randint(1, 40))]
        work, cut = pack(*chunks, 64, HV=rng.choice((1, 4, 32))), rng.choice((5, 16, 32))
        segments = [min(cut, n - first) for n in work.chunks or () for first in range(0, n, cut)]
        mapped = [cut for n in work.chunks or () for _ in range(cut, n, cut)]
        fixed = _microseconds(work, Device(132, none, none, none), cut)  # launches, and more waves
        pre_scan = _microseconds(work, Device(132, none, one, none), cut) - fixed
        assert pre_scan == pytest.approx(busiest(sorted(mapped * work.HV), 132))
        scan = _microseconds(work, Device(132, one, none, none), cut) - fixed
        assert busiest(segments * work.HV, 132) - 1e-6 <= scan <= 2 * busiest(segments * work.HV, 132) + 1e-6


def test_equal_problems_are_cut_alike() -> None:
    """A dense batch, and a pack of as many sequences of that length."""
    for chunks in (1, 2, 33, 128, 1000):
        for B in (1, 2, 16):
            for HV in (1, 8, 32, 96):
                split, packed = plan_split(dense(chunks, HV, B), H200), plan_split(pack(*[chunks] * B, HV=HV), H200)
                assert packed == dataclasses.replace(split, chunks=(chunks,) * B)


def test_of_the_cuts_that_are_about_as_fast_the_one_into_fewest_segments() -> None:
    """And none that is not worth while, or whose pool torch copies for longer than it saves."""
    rng, cuts = random.Random(1), 0
    for _ in range(100):
        lengths = [rng.choice((1, 40, 100, 300, 1000)) for _ in range(rng.randint(1, 4))]
        work = dataclasses.replace(pack(*lengths, HV=rng.choice((1, 2, 4, 8))), pooled=rng.random() < 0.3)
        chunks = {-(-work.longest // count) for count in range(2, min(work.longest, MAX_SEGMENTS) + 1)}
        times = {n: _microseconds(work, H200, n) for n in sorted(chunks, reverse=True)}
        whole = _microseconds(work, H200, work.longest)
        good = [n for n, time in times.items() if time <= NEAR * min(times.values()) and time <= WORTH_WHILE * whole]
        assert plan_split(work, H200).segment_chunks == (good[0] if good else work.longest)
        own = dataclasses.replace(work, pooled=False)
        assert all(time - _microseconds(own, H200, n) == pytest.approx(POOL_US * work.pooled) for n, time in times.items())
        cuts += bool(good)
    assert 20 < cuts < 80


def test_copies_of_a_pool_are_told() -> None:
    own, pooled = dense(128, 4), dataclasses.replace(dense(128, 4), pooled=True)
    assert "pool" not in plan_split(own, H200).reason and plan_split(own, H200).segments > 1
    assert "no cut, with 100 us for copies of the pool, is worth while" in plan_split(pooled, H200).reason
    assert plan_split(pooled, H200, 4).reason == "intracard_segments=4, with copies of the pool"
    long = plan_split(dataclasses.replace(dense(1000, 4), pooled=True), H200)
    assert long.segments > 1 and "100 us of them for copies of the pool, instead of" in long.reason


def test_an_uncut_scan_of_a_pool_has_schedules_of_its_own() -> None:
    """Coarser ones may be slower, so that a cut is worth while that else is not."""
    work = dataclasses.replace(dense(192, 4), pooled=True)
    slow = Device(132, scan=(Tiling(None, 8, 4.5, 0.95),), whole=(Tiling(None, 4, 6.5, 1.75),))
    assert plan_split(work, dataclasses.replace(slow, whole=None)).segments == 1 < plan_split(work, slow).segments
    assert _microseconds(work, slow, 192) == pytest.approx(6.5 + 192 * 1.75)


def test_a_plan_is_a_value() -> None:
    assert plan_split(dense(128, 4), H200) is plan_split(dense(128, 4), Device(132))
    assert hash(plan_split(dense(128, 4), H200)) == hash(dataclasses.replace(plan_split(dense(128, 4), H200)))


def test_limits() -> None:
    assert plan_split(dense(100_000, 1), Device(10_000)).segments <= MAX_SEGMENTS
    work = dense(1000, 2, B=16)
    split = plan_split(work, H200)
    assert split.segments * work.N * work.HV * work.segment_bytes <= MAX_BYTES


@pytest.mark.parametrize("arch", ARCHS)
def test_what_the_model_knows_of_a_device(arch: str) -> None:
    for delta in (True, False):
        scan = ChunkScanSpec(delta=delta)
        device = device_of(scan, scan, IntracardPreScanSpec(delta=delta), IntracardMergeSpec(delta=delta), arch, 100)
        assert device.multiprocessors == 100
        for classes, least in ((device.scan, 1), (device.pre_scan, 2 if delta else 1), (device.merge, 1)):
            assert all(one.tiles >= least for one in classes)
            assert [one.up_to for one in classes if one.up_to is None] == [classes[-1].up_to]
    count = multiprocessors(torch.device("cpu"), arch)
    assert count == (1 if arch == "cpu" else MULTIPROCESSORS[arch])
