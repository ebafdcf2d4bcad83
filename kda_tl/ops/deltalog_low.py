"""The low bits of a bfloat16 base, which only folds read and write.

A base that is rounded to bfloat16 at every fold gathers the roundings of all folds that it remembers: 8.5e-3 of the state after
2048 tokens of which next to nothing is forgotten. With 4 more bits per element each of them is a 16th. Steps between folds read
the base alone: the half unit in the last place that they miss is not gathered.

An element is the float32 whose leading 20 bits are 16 * (bits of the base) + low, low from -8 to 7; 8 of them lie in an int32.
Only a zero takes no low below 0. So whatever low bits stand beside a base that another op wrote, they move an element by half a
unit in the base's last place at most, and no finite one becomes an infinity or a NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PER_WORD", "join", "split"]

PER_WORD = 8
"""Elements whose low bits share an int32, the first in the lowest bits."""


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 32 // PER_WORD, dtype=torch.int32, device=device)


def split(state: Tensor) -> tuple[Tensor, Tensor]:
    """state [.., K] -> (base [.., K] bfloat16, low [.., K / 8] int32): the nearest pair. split(join(pair)) is the pair."""
    state = state.float().contiguous()
    leading = (state.view(torch.int32) + 0x800) >> 12
    upper = (leading + 8) >> 4
    number = ~state.isnan()  # the bits of a NaN may pass over into those of another number
    base = torch.where(number, (upper << 16).view(torch.float32), torch.nan).to(torch.bfloat16)
    low = torch.where(number, leading - (upper << 4), 0)
    words = (low.unflatten(-1, (-1, PER_WORD)) & 15) << _shifts(state.device)
    return base, words.sum(-1, dtype=torch.int32)


def join(base: Tensor, low: Tensor) -> Tensor:
    """The float32 state [.., K] of (base, low) as `split` gives them; of others, base but for less than its last bit."""
    words = ((low.unsqueeze(-1) << (28 - _shifts(low.device))) >> 28).flatten(-2)
    bits = base.float().contiguous().view(torch.int32)
    joined = bits + (words << 12)
    return torch.where((joined ^ bits) < 0, bits, joined).view(torch.float32)  # below a zero lies a NaN
