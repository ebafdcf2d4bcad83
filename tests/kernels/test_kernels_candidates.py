"""Spaces of schedules: complete, reasoned, and in step with what compiled kernels take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from built_specs import CUDA_ARCHS, built_specs

from kda_tl.registry import Registry
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.candidates import IDLE, Block, objection, space
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec
from kda_tl.specs.schedules import SCHEDULES, ChunkScanSchedule, schedule_for

pytestmark = pytest.mark.tilelang
REASONS = ("shared memory:", "registers:", "threads:", "divisibility:", "warp_specialized:", IDLE)


@pytest.fixture(scope="module")
def candidates() -> Callable[..., list]:
    from kda_tl.kernels.candidates import candidates

    return candidates


@pytest.mark.parametrize("arch", ARCHS)
def test_every_spec_has_legal_schedules_and_every_other_one_a_reason(candidates: Callable[..., list], arch: str) -> None:
    for spec in default_specs(arch):
        found = candidates(spec, arch)
        legal = [one.schedule for one in found if one.reason is None]
        assert legal and None not in legal and len(set(legal)) == len(legal), spec.key
        assert all(isinstance(schedule, SCHEDULES[spec.kernel]) for schedule in legal)
        assert all(one.reason.startswith(REASONS) for one in found if one.reason is not None)
        assert all(one.reason for one in found if one.schedule is None)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "cpu"])
def test_warp_specialized_schedules_are_for_sm_90_alone(candidates: Callable[..., list], arch: str) -> None:
    spec = ChunkScanSpec() if arch != "cpu" else ChunkScanSpec(dtype="float32")
    legal = [one.schedule for one in candidates(spec, arch) if one.reason is None]
    assert {schedule.variant for schedule in legal} == {"plain"}
    assert "warp_specialized" in {one.schedule.variant for one in candidates(ChunkScanSpec(), "sm_90") if one.reason is None}


def test_float32_products_have_no_warp_specialized_variant(candidates: Callable[..., list]) -> None:
    for one in candidates(ChunkScanSpec(dtype="float32"), "sm_90"):
        if one.schedule.variant == "warp_specialized":
            assert one.reason == "warp_specialized: its products take 16-bit operands"


@pytest.mark.cuda_compile
@pytest.mark.parametrize("arch", CUDA_ARCHS)
def test_what_was_built_without_spills_is_legal_or_leaves_room(
    candidates: Callable[..., list], built: Callable[[str], Registry], arch: str
) -> None:
    """The model must not turn down what compiles and fits. A schedule in force may keep fewer blocks in flight than fit."""
    registry = built(arch)
    for spec in built_specs(arch):
        path = registry.find(arch, spec.key)
        assert path is not None
        schedule = schedule_for(spec, arch)
        for one in candidates(spec, arch):
            if one.schedule == schedule and registry.load_meta(path)["schedule"] == schedule.as_dict():
                assert one.reason is None or one.reason.startswith(IDLE), (spec.key, one.reason)


def test_more_shared_memory_than_there_is(candidates: Callable[..., list]) -> None:
    """Three stages of 64 columns: 3 (3 x 64 x 128 + 64 x 64 + 2 x 64 x 64) elements of two bytes, and more, of 227 KiB."""
    reasons = {
        (one.schedule.block_v, one.schedule.stages): one.reason
        for one in candidates(ChunkScanSpec(), "sm_90")
        if one.schedule.variant == "warp_specialized"
    }
    assert reasons[64, 2] is None and reasons[64, 3].startswith("shared memory: a block needs 25")
    assert 3 * (3 * 64 * 128 + 64 * 64 + 2 * 64 * 64) * 2 < int(reasons[64, 3].split()[5]) < 3 * 90 * 1024


def test_objections() -> None:
    assert objection(Block(128, 99 * 1024, 128), "sm_89") is None
    assert "shared memory" in str(objection(Block(128, 99 * 1024 + 1, 128), "sm_89"))
    assert "2 blocks need" in str(objection(Block(128, 99 * 1024, 128, min_blocks=2), "sm_89"))
    assert "registers" in str(objection(Block(512, 0, 129), "sm_90")) and objection(Block(512, 0, 128), "sm_90") is None
    assert "threads" in str(objection(Block(2048, 0, 16), "sm_90"))
    assert "a multiprocessor runs 1536" in str(objection(Block(1024, 0, 16, min_blocks=2), "sm_89"))
    assert objection(Block(1024, 2**30, 255, min_blocks=9), "cpu") is None
    assert "4 blocks fit" in str(objection(Block(128, 0, 100, min_blocks=2), "sm_90", spare=2))
    assert objection(Block(128, 0, 100, min_blocks=4), "sm_90", spare=2) is None


def test_a_space_keeps_what_makes_no_schedule() -> None:
    found = space(ChunkScanSchedule, lambda schedule: "no" if schedule.block_v == 32 else None, block_v=(32, 48, 64))
    assert found[0].fields == {"block_v": 32} and found[0].schedule is not None and found[0].reason == "no"
    assert found[1].schedule is None and str(found[1].reason).startswith("divisibility: block_v must be")
    assert found[2].reason is None


def test_a_sibling_takes_what_is_legal_for_it() -> None:
    from kda_tl.kernels.candidates import rejection

    assert rejection(ChunkScanSpec(head_dim_v=64), ChunkScanSchedule("warp_specialized", block_v=64), "sm_90") is None
    wide = ChunkScanSchedule("warp_specialized", 128, 128, 2, 208, 152, 112, 40)
    assert "does not divide V = 64" in str(rejection(ChunkScanSpec(head_dim_v=64), wide, "sm_90"))
    assert "not among" in str(rejection(ChunkScanSpec(), ChunkScanSchedule(threads=1024), "sm_90"))
    assert isinstance(rejection(ChunkWySpec(), schedule_for(ChunkWySpec(), "sm_90"), "sm_90"), str | None)
