"""DeltaLog decode on a device: the walks of the cpu tests, CUDA graphs, many slots, and what only a device has.

DELTALOG_EXAMPLES and DELTALOG_SEED choose how many random sequences, and which."""

from __future__ import annotations

import os
import secrets

import pytest
import torch
from chunk_kda_cases import relative_error
from deltalog_cases import GATES, OPS, K, V, Walk, call, hold, recurrence, tokens
from deltalog_machine import run_machine

from kda_tl.ops.deltalog import DeltaLogCache
from kda_tl.specs.archs import ARCHS, archs_for_capability

pytestmark = pytest.mark.gpu

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = int(os.environ.get("DELTALOG_SEED", secrets.randbelow(2**31)))


@pytest.fixture(params=[name for name, row in ARCHS.items() if not row.is_cpu][::-1], autouse=True)
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every arch whose artifacts this device can load, forced."""
    if request.param not in archs_for_capability(torch.cuda.get_device_capability()):
        pytest.skip(f"{torch.cuda.get_device_name()} runs no {request.param} artifacts")
    monkeypatch.setenv("KDA_TL_ARCH", request.param)
    return request.param


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", OPS)
def test_every_rule_base_and_gate(rule: str, state_dtype: torch.dtype, gate: str) -> None:
    walk = Walk(rule, "cuda", state_dtype, slots=40, H=2, HV=4, gate=gate, merge_every=7, seed=1)
    walk.write(list(range(40)))
    for step in range(40):
        walk.decode(list(range(step % 3, 40, 1 + step % 4)))
    hold(walk)


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("merge_every", range(1, 17))
def test_every_interval(merge_every: int, launches: int) -> None:
    walk = Walk("kda", "cuda", slots=9, merge_every=merge_every, launches=launches, seed=2)
    walk.write(list(range(9)))
    for _ in range(2 * merge_every + 2):
        walk.decode([8, 0, 3, -1, 9])
        walk.check()
    hold(walk)


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_gate_norm_and_sigmoid_in_the_kernel(rule: str) -> None:
    walk = Walk(rule, "cuda", H=2, HV=8, fused=True, seed=3)
    for _ in range(33):
        walk.decode([1, 4, 0])
    hold(walk)


@pytest.mark.parametrize("rule", OPS)
def test_drafts_and_their_rollback(rule: str) -> None:
    walk = Walk(rule, "cuda", gate="masked keys", seed=4)
    walk.write([0, 1, 2, 3, 4, 5])
    for T, drop in [(4, [0, 4]), (7, [3, 1]), (1, [1, 0]), (16, [16, 5]), (5, [2, 5])]:
        walk.decode([4, 1], T=T, verify=True)
        walk.truncate([4, 1], drop)
        walk.decode([1, 4, 2])
        walk.check()
    hold(walk)


@pytest.mark.slow
@pytest.mark.parametrize("rule", OPS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_narrow_base_over_2048_steps(rule: str, state_dtype: torch.dtype) -> None:
    walk = Walk(rule, "cuda", state_dtype, gate="weak", seed=5)
    walk.write([0, 1, 2, 3, 4, 5])
    for _ in range(2048):
        walk.decode([0, 3])
    hold(walk)


@pytest.mark.parametrize("rule", OPS)
def test_random_sequences(rule: str) -> None:
    run_machine(rule, torch.float32, "cuda", int(os.environ.get("DELTALOG_EXAMPLES", "200")) // 3, SEED)


def test_one_graph_serves_every_cursor_and_slot() -> None:
    """Slots, counts and cursors live on the device: what was captured with some replays with others."""
    walk = Walk("kda", "cuda", slots=8, merge_every=3, seed=6)
    walk.write(list(range(8)))
    x = {name: torch.zeros_like(y) for name, y in tokens(3, 1, 1, 2, "kda", "bounded", "cuda", 0).items()}
    indices = torch.tensor([-1, -1, -1], dtype=torch.int32, device="cuda")
    call("kda", x, walk.cache, indices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        o = OPS["kda"](**x, cache=walk.cache, state_indices=indices)
    for step in range(12):
        slots = [(step * 3) % 8, (step + 5) % 8 if (step + 5) % 8 != (step * 3) % 8 else -1, 8]
        fresh = tokens(3, 1, 1, 2, "kda", "bounded", "cuda", step + 1)
        for name, y in fresh.items():
            x[name].copy_(y)
        indices.copy_(torch.tensor(slots))
        graph.replay()
        live = [i for i, slot in enumerate(slots) if 0 <= slot < 8]
        used = [slots[i] for i in live]
        o_true, states = recurrence("kda", {name: y[live] for name, y in fresh.items()}, walk.truth[used])
        walk.truth[used] = states[-1]
        assert relative_error(o[live], o_true) < 4e-3 and not o[2].any()
    walk.check()
    assert walk.errors["state"] < 1e-4


def test_a_graph_of_drafts_and_truncation() -> None:
    cache = DeltaLogCache(4, 2, device="cuda", merge_every=5)
    x = tokens(2, 3, 1, 2, "kda", "bounded", "cuda", 7)
    indices, drop = torch.tensor([3, 1], dtype=torch.int32, device="cuda"), torch.tensor([1, 2], device="cuda")
    call("kda", x, cache, indices)
    cache.truncate(drop, indices)
    cache.reset()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        OPS["kda"](**x, cache=cache, state_indices=indices)
        cache.truncate(drop, indices)
    truth = torch.zeros(2, 2, K, V, dtype=torch.float64, device="cuda")
    for _ in range(9):
        graph.replay()
        _, states = recurrence("kda", x, truth)
        truth = torch.stack([states[2][0], states[1][1]])
    assert relative_error(cache.read_state([3, 1]), truth) < 1e-4


def test_illegal_drops_are_passed_over_on_a_device() -> None:
    walk = Walk("kda", "cuda", seed=8)
    walk.decode([0, 1, 2], T=3)
    walk.cache.truncate(torch.tensor([4, -1, 1, 9], device="cuda"), walk.indices([0, 1, 2, -1]))
    assert walk.cache.lengths().tolist()[:3] == [3, 3, 2]


@pytest.mark.slow
def test_slots_past_two_to_the_31_elements() -> None:
    slots, HV = 4200, 32
    cache = DeltaLogCache(slots, HV, state_dtype=torch.bfloat16, device="cuda", merge_every=2)
    chosen = torch.tensor([4095, 4096, slots - 1, 7], dtype=torch.int32, device="cuda")
    truth = torch.zeros(4, HV, K, V, dtype=torch.float64, device="cuda")
    for step in range(3):
        x = tokens(4, 1, 32, HV, "kda", "weak", "cuda", step)
        o = call("kda", x, cache, chosen)
        o_true, states = recurrence("kda", x, truth)
        truth = states[-1]
        assert relative_error(o, o_true) < 5e-3
    assert relative_error(cache.read_state(chosen), truth) < 5e-3
    assert not cache.base[:7].any() and not cache.base[8:4095].any() and not cache.base[4097:-1].any()


def test_calls_alike_give_the_same_bits() -> None:
    x = [tokens(64, 1, 4, 8, "kda", "bounded", "cuda", s) for s in range(6)]
    indices = torch.randperm(64, device="cuda", dtype=torch.int32)
    outs = []
    for _ in range(5):
        cache = DeltaLogCache(64, 8, device="cuda", merge_every=4)
        outs.append(torch.stack([call("kda", y, cache, indices) for y in x]))
    assert all(torch.equal(out, outs[0]) for out in outs)
