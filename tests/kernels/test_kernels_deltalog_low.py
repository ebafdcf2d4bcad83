"""The low bits of bfloat16 bases as folds write them, bit for bit those of `kda_tl.ops.deltalog_low`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from low_cases import every_pair, joined

from kda_tl.ops.deltalog_low import join, split

pytestmark = pytest.mark.tilelang


def test_programs_and_torch_split_alike(compile_cpu) -> None:
    from low_program import low_program

    bits = torch.randint(-(2**31), 2**31 - 1, (4000, 8), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    x = torch.cat(
        [bits.view(torch.float32), torch.tensor([[0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 3.4e38, 1e-40]])]
    )
    upper, back, words = torch.empty_like(x), torch.empty_like(x), torch.empty(x.shape[0], dtype=torch.int32)
    compile_cpu("low_bits", low_program())(x, upper, words, back)
    base, low = split(x)
    number = ~x.isnan()
    assert torch.equal(words, low[:, 0])
    assert torch.equal(upper[number], base.float()[number]) and upper[~number].isnan().all()
    assert torch.equal(back[number], join(base, low)[number]) and back[~number].isnan().all()


def test_programs_join_any_base_with_any_low_bits(compile_cpu) -> None:
    from low_program import join_program

    bits, words, low = every_pair()
    upper = torch.from_numpy(bits).view(torch.bfloat16).float()
    back = torch.empty_like(upper)
    compile_cpu("join_bits", join_program())(upper, torch.from_numpy(words[:, 0].copy()), back)
    finite = bits & 0x7F80 != 0x7F80
    assert np.array_equal(back.numpy()[finite], joined(bits, low)[finite])
    assert np.array_equal(np.signbit(back.numpy()[finite]), (bits < 0)[finite])
    # A regular pair goes round unchanged.
    base, again = split(back)
    regular = torch.from_numpy(finite & ((bits & 0x7FFF != 0) | (low >= 0))).all(-1)
    assert torch.equal(again[regular, 0], torch.from_numpy(words[:, 0].copy())[regular])
    assert np.array_equal(base.view(torch.int16).numpy()[regular.numpy()], bits[regular.numpy()])
