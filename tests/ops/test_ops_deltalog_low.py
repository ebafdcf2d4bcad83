"""The low bits of bfloat16 bases: pairs in torch, the same in the programs' own words, and what they are for."""

from __future__ import annotations

import math

import pytest
import torch
from chunk_kda_cases import relative_error
from deltalog_cases import OPS, Walk, hold

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
