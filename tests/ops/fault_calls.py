"""Short words for the calls that tests of known faults make."""

from __future__ import annotations

import itertools
from typing import Any

import deltalog_cases
import torch
from chunk_kda_cases import nan_filled_memory
from decode_cases import DecodeCase, make_decode_inputs
from rule_inputs import call
from torch import Tensor

import kda_tl

LIMIT = 1e-5
PER_TOKEN = ("q", "k", "v", "g", "beta")


def run(rule: str, x: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """A chunk op where memory that was freed is full of NaN."""
    with nan_filled_memory(), torch.no_grad():
        o, state = call(rule, x, output_final_state=True, **options)
    return o, state


def one_by_one(rule: str, x: dict[str, Any], bounds: list[int]) -> tuple[Tensor, Tensor]:
    """The sequences of a pack, each in a call of its own."""
    found = []
    for n, (first, last) in enumerate(itertools.pairwise(bounds)):
        own = {
            key: y[:, first:last] if key in PER_TOKEN else y[n : n + 1] if key == "initial_state" else y for key, y in x.items()
        }
        found.append(run(rule, own))
    return torch.cat([o for o, _ in found], 1), torch.cat([state for _, state in found])


def decode(rule: str, **fields: Any) -> dict[str, Any]:
    return make_decode_inputs(DecodeCase(rule, rule=rule, dtype=torch.float32, **fields), "cpu", 0).args


def deltalog(rule: str, x: dict[str, Any], cache: kda_tl.DeltaLogCache, slots: list[int] | Tensor, **options: Any) -> Tensor:
    return deltalog_cases.call(rule, x, cache, torch.as_tensor(slots, dtype=torch.int32), **options)
