"""Every prefill op under one hand: the same fresh inputs for any rule, called by the op's own names, and the float64 truth."""

from __future__ import annotations

from typing import Any

import torch
from op_inputs import poisoned
from torch import Tensor

import kda_tl
from kda_tl.reference import recurrent_rule
from kda_tl.specs.rules import RULES

OPS: dict[str, Any] = {
    "kda": kda_tl.chunk_kda,
    "gdn": kda_tl.chunk_gdn,
    "delta_rule": kda_tl.chunk_delta_rule,
    "gla": kda_tl.chunk_gla,
    "simple_gla": kda_tl.chunk_simple_gla,
    "linear_attention": lambda *args, **kwargs: kda_tl.chunk_linear_attention(*args, normalize=False, **kwargs),
    "rwkv6": kda_tl.chunk_rwkv6,
}
NAMES = {"rwkv6": {"q": "r", "g": "w", "bonus": "u"}}


def inputs(
    rule: str, T: int, B: int = 1, H: int = 1, HV: int = 1, K: int = 64, V: int = 64, N: int | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """q, k of unit norm, v, and what else the rule reads, in float32 amid NaN; initial_state [N, HV, K, V]."""
    generator = torch.Generator().manual_seed(seed)
    traits = RULES[rule]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = {
        "q": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        "k": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, HV, V),
    }
    if traits.decay != "none":
        shape = (B, T, HV, K) if traits.decay == "per_key" else (B, T, HV)
        x["g"] = -2.0 * torch.rand(shape, generator=generator) ** 4
    if traits.delta:
        x["beta"] = torch.rand((B, T, HV), generator=generator)
    x = {name: poisoned(tensor) for name, tensor in x.items()}
    if traits.read_first:
        x["bonus"] = normal(H, K)
    return {**x, "initial_state": normal(B if N is None else N, HV, K, V)}


def call(rule: str, x: dict[str, Any], **options: Any) -> Any:
    names = NAMES.get(rule, {})
    return OPS[rule](**{names.get(name, name): tensor for name, tensor in x.items()}, **options)


def truth(rule: str, x: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    return recurrent_rule(**x, **RULES[rule].as_dict(), **options)
