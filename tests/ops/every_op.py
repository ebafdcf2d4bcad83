"""Every op that launches kernels, under one hand: calls with all the tensors that they can take, to be spoilt one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import decode_cases
import deltalog_cases
import rule_inputs
import torch
from torch import Tensor

import kda_tl

GATED = ("kda", "gdn")


@dataclass(frozen=True)
class Subject:
    """make(): the same arguments afresh, packed tokens or drafts, slots of a pool. call(arguments): o, and what is stored."""

    name: str
    make: Callable[[], dict[str, Any]]
    call: Callable[[dict[str, Any]], tuple[Tensor, ...]]

    def stored(self, x: dict[str, Any]) -> tuple[Tensor, ...]:
        """What a refused call must leave as it was, copied."""
        cache = x.get("cache")
        # What lies past a cursor is no state: the first of two launches may write there.
        held = (x["initial_state"],) if cache is None else (cache.base, cache.cursor, cache.read_state())
        return tuple(tensor.clone() for tensor in held)


def _prefill(rule: str, size: int, segments: int = 1) -> Subject:
    last = 20 if segments == 1 else 135

    def make() -> dict[str, Any]:
        x: dict[str, Any] = rule_inputs.inputs(rule, last + 4, H=2, HV=4, K=size, V=size, N=4)
        x = {rule_inputs.NAMES.get(rule, {}).get(name, name): tensor for name, tensor in x.items()}
        if rule in GATED:
            generator = torch.Generator().manual_seed(1)
            bias = torch.randn((4, size) if rule == "kda" else (4,), generator=generator)
            x |= {"A_log": torch.randn(4, generator=generator), "dt_bias": bias, "use_gate_in_kernel": True}
        if segments > 1:
            x["intracard_segments"] = segments
        return x | _pack([0, 3, 3, 5, last]) | {"state_indices": torch.tensor([3, -1, 0, 2], dtype=torch.int32)}

    def call(x: dict[str, Any]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return rule_inputs.OPS[rule](**x)[0], x["initial_state"]

    return Subject(f"chunk {rule} {size}" + f" in {segments} segments" * (segments > 1), make, call)


def _recurrent(rule: str, size: int) -> Subject:
    case = decode_cases.DecodeCase(
        "", rule=rule, K=size, V=size, slots=4, null=1, inplace=True, lengths=(2, 0, 3, 1), tail=2, dtype=torch.float32,
        gate="softplus" if rule in GATED else "none", beta="sigmoid" if rule in GATED else "given",
    )  # fmt: skip

    def make() -> dict[str, Any]:
        x = decode_cases.make_decode_inputs(case, "cpu", 0).args
        return x | _pack([0, 2, 2, 5, 6]) | {"initial_state": x["initial_state"].clone()}

    def call(x: dict[str, Any]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return decode_cases.OPS[rule](**x)[0], x["initial_state"]

    return Subject(f"recurrent {rule} {size}", make, call)


def _deltalog(rule: str, launches: int = 1) -> Subject:
    T = 1 if launches == 2 else 2

    def make() -> dict[str, Any]:
        x = deltalog_cases.tokens(4, T, 1, 2, rule, "weak", "cpu", 0, fused=rule in GATED)
        cache = kda_tl.DeltaLogCache(4, 2, rule=rule, merge_every=2, launches=launches)
        cache.write_state(range(4), torch.randn(4, 2, 128, 128, generator=torch.Generator().manual_seed(5)))
        x |= {"valid": torch.tensor([T, 1, 1, 0], dtype=torch.int32), "cache": cache}
        return x | {"state_indices": torch.tensor([2, -1, 0, 1], dtype=torch.int32)}

    def call(x: dict[str, Any]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return deltalog_cases.OPS[rule](**x), x["cache"].read_state(), x["cache"].lengths()

    return Subject(f"deltalog {rule}" + " in two launches" * (launches == 2), make, call)


def _pack(offsets: list[int]) -> dict[str, Tensor]:
    starts = torch.arange(len(offsets) - 1) != 2
    return {"cu_seqlens": torch.tensor(offsets), "cu_seqlens_cpu": torch.tensor(offsets), "has_initial_state": starts}


SUBJECTS = [
    *(_prefill(rule, 64) for rule in rule_inputs.OPS),
    *(_prefill(rule, 128) for rule in GATED),
    _prefill("kda", 128, segments=2),
    *(_recurrent(rule, 128) for rule in decode_cases.OPS),
    _recurrent("kda", 64),
    *(_deltalog(rule) for rule in deltalog_cases.OPS),
    _deltalog("kda", launches=2),
]


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN for NaN."""
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
