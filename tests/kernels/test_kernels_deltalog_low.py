"""The low bits of bfloat16 bases as folds write them, bit for bit those of `kda_tl.ops.deltalog_low`."""

from __future__ import annotations

import math

import pytest
import torch

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
