"""DeltaLog decode on cpu tensors, kernel to dispatcher, against the float64 token recurrence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from chunk_kda_cases import relative_error
from deltalog_cases import GATES, OPS, K, V, Walk, call, hold, recurrence, tokens

from kda_tl.ops.deltalog import DeltaLogCache, deltalog_decode_gdn, deltalog_decode_kda

pytestmark = pytest.mark.usefixtures("cpu_kernels")

STORED = ("base", "log_k", "log_u", "log_decay", "cursor")
STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def stored(cache: DeltaLogCache) -> dict[str, torch.Tensor]:
    return {name: getattr(cache, name).clone() for name in STORED}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rule", OPS)
def test_every_gate(rule: str, gate: str) -> None:
    walk = Walk(rule, gate=gate, merge_every=5, seed=1)
    walk.write([0, 1, 2, 3, 4, 5])
    for step in range(12):
        walk.decode([3, 0, 5][: 1 + step % 3])  # cursors drift apart
    hold(walk)


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("merge_every", range(1, 17))
def test_every_interval_and_every_cursor(merge_every: int, launches: int) -> None:
    walk = Walk("kda", slots=3, HV=1, merge_every=merge_every, launches=launches, seed=2)
    walk.write([0, 1, 2])
    for _ in range(merge_every + 3):
        walk.decode([0, 1, 2])
        walk.check()
    hold(walk)
    assert int(walk.cache.lengths().max()) < merge_every


@pytest.mark.parametrize("rule", OPS)
def test_an_interval_of_one_is_the_dense_recurrence(rule: str) -> None:
    walk = Walk(rule, merge_every=1, seed=3)
    walk.write([0, 1, 2, 3, 4, 5])
    for _ in range(3):
        walk.decode([5, 0])
    hold(walk)
    assert not walk.cache.lengths().any()
    assert relative_error(walk.cache.base.transpose(-1, -2), walk.truth) < 1e-6


@pytest.mark.parametrize("rule", ["kda", "gdn"])
@pytest.mark.parametrize("launches", [1, 2])
def test_gate_norm_and_sigmoid_in_the_kernel(rule: str, launches: int) -> None:
    if (rule, launches) == ("gdn", 2):
        pytest.skip("two launches are built for kda")
    walk = Walk(rule, H=2, HV=4, fused=True, merge_every=4, launches=launches, seed=4)
    walk.write([0, 1, 2, 3, 4, 5])
    for _ in range(6):
        walk.decode([1, 4])
    hold(walk)


@pytest.mark.parametrize("options", [{"lower_bound": -5.0}, {"lower_bound": -5.0, "A_log": None}, {"dt_bias": None}])
def test_other_gates(options: dict[str, Any]) -> None:
    cache = DeltaLogCache(1, 2)
    x = tokens(1, 1, 1, 2, "kda", "weak", "cpu", 5, fused=True) | options
    o = call("kda", x, cache, torch.tensor([0]))
    gate = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2, K)} | {n: x[n] for n in ("A_log", "dt_bias") if x[n] is not None}
    o_true, states = recurrence("kda", x | gate, torch.zeros(1, 2, K, V, dtype=torch.float64))
    assert relative_error(o, o_true) < 1e-5 and relative_error(cache.read_state(), states[-1]) < 1e-5


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", OPS)
def test_narrow_bases_are_rounded_once_per_fold(rule: str, state_dtype: torch.dtype) -> None:
    walk = Walk(rule, state_dtype=state_dtype, gate="weak", merge_every=8, seed=6)
    walk.write([0, 1, 2, 3, 4, 5])
    for _ in range(24):
        walk.decode([2, 0])
    hold(walk)
    assert walk.cache.base.dtype == state_dtype


@pytest.mark.parametrize("rule", OPS)
def test_drafts_and_their_rollback(rule: str) -> None:
    walk = Walk(rule, merge_every=6, gate="masked keys", seed=7)
    walk.write([0, 1, 2, 3, 4, 5])
    for T, drop in [(4, [0, 4]), (7, [3, 1]), (1, [1, 0]), (16, [16, 5]), (5, [2, 5])]:
        walk.decode([4, 1], T=T, verify=True)
        walk.check()
        walk.truncate([4, 1], drop)
        walk.check()
        walk.decode([1, 4, 2])
    hold(walk)


def test_only_valid_tokens_count() -> None:
    walk = Walk("kda", seed=8)
    walk.write([0, 1, 2, 3, 4, 5])
    walk.decode([0, 1, 2, 3, 4], T=4, valid=[4, 0, 1, -3, 99])
    assert walk.cache.lengths().tolist() == [4, 0, 1, 0, 4, 0]
    for launches in (1, 2):
        one = Walk("kda", launches=launches, merge_every=4, seed=8)
        one.write([0, 1, 2, 3, 4, 5])
        before = stored(one.cache)
        for _ in range(5):
            one.decode([0, 1, 2], valid=[1, 0, 1])
        assert all(equal(tensor[1], before[name][1]) for name, tensor in stored(one.cache).items())
        hold(one)
    hold(walk)


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("null_index", [None, -1, 0, 3])
def test_padding_is_zero_and_touches_nothing(null_index: int | None, launches: int) -> None:
    walk = Walk("kda", launches=launches, merge_every=3, seed=9)
    walk.write([0, 1, 2, 3, 4, 5])
    padding = [-1, 6, 2**31 - 1, -(2**31), *([] if null_index is None else [null_index] * 2)]
    live = [slot for slot in (2, 5) if slot != null_index]
    before = stored(walk.cache)
    for _ in range(4):
        walk.decode([*padding, *live, *padding], null_index=null_index)
        walk.decode(padding, null_index=null_index)
    walk.decode([live[0], *padding], T=3, null_index=null_index)
    idle = [slot for slot in range(6) if slot not in live]
    for name, tensor in stored(walk.cache).items():
        assert equal(tensor[idle], before[name][idle]), name
    hold(walk)


def test_nan_in_one_slot_stays_there() -> None:
    walk = Walk("kda", merge_every=3, seed=10)
    walk.write([0, 1, 2, 3, 4, 5])
    walk.cache.base[1, 0] = torch.nan
    x = tokens(3, 1, 1, 2, "kda", "bounded", "cpu", 11)
    truth = walk.truth[[0, 1, 2]]
    o = call("kda", x, walk.cache, torch.tensor([0, 1, 2], dtype=torch.int32))
    o_true, _ = recurrence("kda", x, truth)
    assert o[1, 0, 0].isnan().all() and relative_error(o[[0, 2]], o_true[[0, 2]]) < 1e-5
    assert relative_error(o[1, 0, 1], o_true[1, 0, 1]) < 1e-5  # the other head of that slot


def test_an_accumulated_state_keeps_the_float32_sigmoid() -> None:
    """sigmoid(0.5) rounded to bfloat16 would be 0.62109375, and the state keeps that."""
    cache = DeltaLogCache(1, 1)
    e0 = torch.nn.functional.one_hot(torch.tensor(0), K).to(torch.bfloat16).view(1, 1, 1, K)
    logit = torch.full((1, 1, 1), 0.5, dtype=torch.bfloat16)
    ones, open_gate = torch.ones(1, 1, 1, V, dtype=torch.bfloat16), torch.zeros(1, 1, 1, K, dtype=torch.bfloat16)
    x = {"q": e0, "k": e0, "v": ones, "g": open_gate, "beta": logit, "use_beta_sigmoid_in_kernel": True}
    o = call("kda", x, cache, torch.tensor([0], dtype=torch.int32))
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(cache.read_state()[0, 0, 0], torch.full((V,), 0.62245935), rtol=1e-6, atol=0)
    for _ in range(40):
        call("kda", x, cache, torch.tensor([0], dtype=torch.int32))
    torch.testing.assert_close(cache.read_state()[0, 0, 0], torch.full((V,), 1.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_pool_of_ones_own_is_used_in_place(state_dtype: torch.dtype) -> None:
    storage = torch.randn(4, 2, 2, V, K).to(state_dtype)
    before = storage.clone()
    cache = DeltaLogCache(4, 2, base=storage[:, 1], merge_every=1)
    x = tokens(1, 1, 1, 2, "kda", "weak", "cpu", 12)
    call("kda", x, cache, torch.tensor([2], dtype=torch.int32))
    _, states = recurrence("kda", x, before[2:3, 1].transpose(-1, -2).double())
    assert relative_error(storage[2:3, 1].transpose(-1, -2), states[-1]) < 4e-3
    assert torch.equal(storage[:, 0], before[:, 0]) and torch.equal(storage[[0, 1, 3], 1], before[[0, 1, 3], 1])
    assert not torch.equal(storage[2, 1], before[2, 1])


def test_an_axis_of_size_one_may_have_any_stride() -> None:
    storage = torch.zeros(2 * V * K + 9)
    cache = DeltaLogCache(1, 2, base=storage.as_strided((1, 2, V, K), (3, V * K, K, 1)))
    cache.write_state([0], torch.ones(1, 2, K, V))
    assert storage[: 2 * V * K].eq(1).all() and not storage[2 * V * K :].any()


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_a_pool_with_keys_first(rule: str) -> None:
    storage = torch.randn(4, 2, 2, K, V)
    before = storage.clone()
    cache = DeltaLogCache(4, 2, rule=rule, base=storage[:, 0], state_v_first=False, merge_every=3)
    truth = before[[3, 1], 0].double()
    for step in range(5):
        x = tokens(2, 1, 1, 2, rule, "bounded", "cpu", step)
        o = call(rule, x, cache, torch.tensor([3, 1], dtype=torch.int32))
        o_true, states = recurrence(rule, x, truth)
        truth = states[-1]
        assert relative_error(o, o_true) < 1e-5 and relative_error(cache.read_state([3, 1]), truth) < 1e-5
    cache.flush()
    assert relative_error(storage[[3, 1], 0], truth) < 1e-5
    assert torch.equal(storage[:, 1], before[:, 1]) and torch.equal(storage[[0, 2], 0], before[[0, 2], 0])
    cache.write_state([0], truth[:1])
    assert torch.equal(storage[0, 0], truth[0].float())


def test_states_survive_every_kind_of_move() -> None:
    walk = Walk("kda", merge_every=7, gate="masked keys", seed=13)
    walk.write([0, 1, 2, 3, 4, 5])
    for slots in ([0, 1, 2], [1, 2], [2], [2]):
        walk.decode(slots)
    walk.fork([2, 2, 0], [3, 4, 5])
    walk.decode([3, 2, 5])
    snapshot, truth = walk.cache.snapshot([2, 3]), walk.truth[[2, 3]].clone()
    walk.decode([2, 3, 4])
    walk.flush([1, 4])
    walk.reset([5])
    walk.check()
    walk.cache.restore(snapshot)
    walk.truth[[2, 3]] = truth
    walk.check()
    walk.cache.restore(snapshot, [0, 1])
    walk.truth[[0, 1]] = truth
    walk.decode([0, 1, 2, 3, 4, 5])
    hold(walk)


def test_moves_are_exact_to_the_bit() -> None:
    walk = Walk("gdn", merge_every=5, state_dtype=torch.bfloat16, seed=14)
    walk.write([0, 1, 2, 3, 4, 5])
    for _ in range(3):
        walk.decode([0, 1])
    walk.fork([0], [3])
    before = stored(walk.cache)
    assert all(equal(before[name][0], before[name][3]) for name in STORED)
    snapshot = walk.cache.snapshot()
    walk.decode([0, 1, 2, 3])
    walk.cache.restore(snapshot)
    assert all(equal(tensor, before[name]) for name, tensor in stored(walk.cache).items())
    walk.cache.flush()
    flushed = stored(walk.cache)
    walk.cache.flush()  # nothing to fold: a narrow base is not rounded again
    assert equal(walk.cache.base, flushed["base"])


def test_state_layouts() -> None:
    cache = DeltaLogCache(3, 2)
    state = torch.randn(2, 2, K, V)
    cache.write_state([2, 0], state)
    assert torch.equal(cache.read_state([2, 0]), state) and torch.equal(cache.base[2], state[0].transpose(-1, -2))
    cache.write_state([2, 0], state.transpose(-1, -2).contiguous(), state_v_first=True)
    assert torch.equal(cache.read_state([2, 0]), state)
    assert torch.equal(cache.read_state([0], state_v_first=True)[0], state[1].transpose(-1, -2))
    assert not cache.read_state([1]).any()


def test_first_windows_are_staggered() -> None:
    cache = DeltaLogCache(512, 1, merge_every=8)
    counts = torch.bincount(cache.first_window, minlength=9)
    assert counts[0] == 0 and counts[1:].min() > 512 / 8 / 2 and counts[1:].max() < 2 * 512 / 8
    # Steps of a batch fold about a merge_every-th of its slots each, never most of them.
    walk = Walk("kda", slots=64, HV=1, merge_every=8, seed=15)
    folded = []
    for _ in range(16):
        before = walk.cache.lengths()
        call("kda", tokens(64, 1, 1, 1, "kda", "weak", "cpu", 16), walk.cache, torch.arange(64, dtype=torch.int32))
        folded.append(int((walk.cache.lengths() <= before).sum()))
    assert max(folded) <= 20 and sum(folded[8:]) == 64


def test_strided_inputs_and_other_index_types() -> None:
    walk = Walk("kda", H=2, HV=4, merge_every=4, seed=17)
    x = tokens(2, 1, 2, 4, "kda", "bounded", "cpu", 18)
    o_true, states = recurrence("kda", x, walk.truth[[4, 1]])
    spread = {name: torch.stack([y, torch.full_like(y, torch.nan)], -2 if y.dim() == 4 else -1) for name, y in x.items()}
    views = {name: y[..., 0, :] if y.dim() == 5 else y[..., 0] for name, y in spread.items()}
    o = call("kda", views, walk.cache, torch.tensor([4, 1]))
    assert relative_error(o, o_true) < 1e-5 and relative_error(walk.cache.read_state([4, 1]), states[-1]) < 1e-5
    grouped = {name: y.half() for name, y in x.items()}
    assert call("kda", grouped, walk.cache, torch.tensor([0, 2])).dtype == torch.float16


def test_no_requests_and_no_tokens() -> None:
    cache = DeltaLogCache(2, 2)
    before = stored(cache)
    for n, T in itertools.product((0, 2), (0, 1)):
        if n and T:
            continue
        o = call("kda", tokens(n, T, 1, 2, "kda", "weak", "cpu", 19), cache, torch.arange(n, dtype=torch.int32))
        assert o.shape == (n, T, 2, V)
    assert all(equal(tensor, before[name]) for name, tensor in stored(cache).items())


def test_two_calls_alike_give_the_same_bits() -> None:
    outs = []
    for _ in range(2):
        walk = Walk("kda", merge_every=3, seed=20)
        walk.write([0, 1, 2, 3, 4, 5])
        x = [tokens(3, 1, 1, 2, "kda", "bounded", "cpu", s) for s in range(5)]
        outs.append(torch.stack([call("kda", y, walk.cache, torch.tensor([0, 5, 2])) for y in x]))
    assert torch.equal(*outs)


def test_drafts_equal_single_steps() -> None:
    x = tokens(2, 6, 1, 2, "gdn", "bounded", "cpu", 21)
    one, many = DeltaLogCache(2, 2, rule="gdn"), DeltaLogCache(2, 2, rule="gdn")
    indices = torch.tensor([1, 0], dtype=torch.int32)
    o = deltalog_decode_gdn(**x, cache=many, state_indices=indices)
    parts = [{name: y[:, t : t + 1] for name, y in x.items()} for t in range(6)]
    singles = [deltalog_decode_gdn(**part, cache=one, state_indices=indices) for part in parts]
    assert relative_error(o, torch.cat(singles, 1).double()) < 1e-6
    assert relative_error(many.read_state(), one.read_state().double()) < 1e-6


def test_a_damaged_cursor_stays_inside_of_the_log() -> None:
    cache = DeltaLogCache(2, 1)
    for value in (-5, 17, 2**31 - 1):
        cache.cursor[0] = value
        before = cache.base[1].clone()
        deltalog_decode_kda(**tokens(1, 1, 1, 1, "kda", "weak", "cpu", 22), cache=cache, state_indices=torch.tensor([0]))
        assert torch.equal(cache.base[1], before) and 0 <= int(cache.lengths()[0]) <= 16
