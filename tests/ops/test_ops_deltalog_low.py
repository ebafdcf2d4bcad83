"""The low bits of bfloat16 bases: pairs in torch, the same in the programs' own words, and what they are for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from chunk_kda_cases import relative_error
from deltalog_cases import OPS, Walk, hold
from low_cases import every_pair, joined

from kda_tl.ops.deltalog_low import join, split

EDGES = [0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1.17549435e-38, 255.9999, -0.99999994, math.inf, -math.inf, math.nan]


def numbers() -> torch.Tensor:
    """Rows of 16: the edges, and random bits of every exponent."""
    bits = torch.randint(-(2**31), 2**31 - 1, (1000, 16), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    edges = torch.tensor(EDGES + [1.0] * 4)
    return torch.cat([edges[None], bits.view(torch.float32)])


def test_a_pair_is_the_nearest_and_stands_for_itself() -> None:
    x = numbers()
    base, low = split(x)
    back = join(base, low)
    assert base.dtype == torch.bfloat16 and low.shape == (x.shape[0], 2) and low.dtype == torch.int32
    assert torch.equal(back.isnan(), x.isnan())
    plain = x.isfinite() & (x.abs() > 1e-30) & back.isfinite()
    assert ((back - x).abs() <= x.abs() * 2.0**-12)[plain].all()  # 12 bits of a significand, rounded
    assert ((base.float() - x).abs() <= x.abs() * 2.0**-8 * 1.07)[plain].all()  # the base alone is the state, nearly rounded
    assert torch.equal(back[x.isinf()], x[x.isinf()]) and (back.isinf() <= (x.abs() > 3.3e38) | x.isnan()).all()
    again = split(back)
    assert torch.equal(again[1], low) and torch.equal(again[0].view(torch.int16), base.view(torch.int16))


def test_any_low_bits_move_any_base_by_less_than_its_last_bit() -> None:
    bits, words, low = every_pair()
    base = torch.from_numpy(bits).view(torch.bfloat16)
    back = join(base, torch.from_numpy(words)).numpy()
    finite = bits & 0x7F80 != 0x7F80
    expected = joined(bits, low)
    assert np.array_equal(back[finite], expected[finite])
    assert np.array_equal(np.signbit(back[finite]), (bits < 0)[finite])
    alone = joined(bits, np.zeros_like(low))
    assert np.array_equal(base.float().numpy()[finite], alone[finite])
    last_bit = 2.0 ** (np.maximum(bits >> 7 & 255, 1) - 127.0 - 7)
    assert (np.abs(expected - alone) < last_bit)[finite].all()
    number = bits & 0x7FFF <= 0x7F80
    assert np.isnan(back[~number]).all()
    assert np.isinf(back[(bits & 0x7FFF == 0x7F80) & (low == 0)]).all()


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("rule", OPS)
def test_stale_low_bits_cost_a_rounding_and_no_more(rule: str) -> None:
    """Another op writes the base in place, zeros too, and nobody flushes."""
    walks = [Walk(rule, state_dtype=torch.bfloat16, slots=1, HV=1, gate="weak", merge_every=2, seed=3) for _ in range(2)]
    state = torch.randn(1, 1, 128, 128, generator=torch.Generator().manual_seed(4))
    state[..., ::3, :] = 0.0
    state[..., ::7, :] *= -0.0
    for walk in walks:
        walk.cache.base.copy_(state)
    words = torch.randint(-(2**31), 2**31 - 1, walks[1].cache.base_low.shape, generator=torch.Generator().manual_seed(5))
    walks[1].cache.base_low.copy_(words)
    states = []
    for walk in walks:
        for _ in range(3):
            walk.decode([0])
        assert walk.cache.base.isfinite().all()
        states.append(walk.cache.read_state().double())
    assert 0 < relative_error(states[1], states[0]) < 2.0**-8


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("rule", OPS)
def test_a_bfloat16_base_does_not_gather_its_roundings(rule: str) -> None:
    walk = Walk(rule, state_dtype=torch.bfloat16, slots=1, HV=1, gate="weak", merge_every=1, seed=1)
    walk.write([0])
    for _ in range(200):
        walk.decode([0])
    hold(walk)
    assert walk.errors["state"] < 2e-3  # a 16th of what folds that round to bfloat16 alone gather by then
    state = walk.cache.read_state(state_v_first=True)
    walk.cache.flush()  # the pool is the state then, for ops that know nothing of low bits
    assert torch.equal(walk.cache.base, state.to(torch.bfloat16)) and not walk.cache.base_low.any()
    assert relative_error(walk.cache.base.float().transpose(-1, -2), walk.cache.read_state().double()) < 1e-2
