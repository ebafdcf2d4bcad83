"""NaN and inf in one sequence, head, slot or draft, or past the end: nothing else is affected, to the bit, in any op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import decode_cases
import deltalog_cases
import pytest
import rule_inputs
import torch
from every_op import SUBJECTS, Subject, same
from torch import Tensor

pytestmark = pytest.mark.usefixtures("cpu_kernels")

WILD = [torch.nan, torch.inf, -torch.inf]
Call = Callable[[dict[str, Any]], tuple[Tensor, Tensor]]


def _prefill(rule: str, K: int, V: int) -> tuple[dict[str, Any], Call]:
    x = rule_inputs.inputs(rule, 66, B=3, H=2, HV=4, K=K, V=V)
    return x, lambda y: rule_inputs.call(rule, y, output_final_state=True)


def _recurrent(rule: str) -> tuple[dict[str, Any], Call]:
    case = decode_cases.DecodeCase("", rule=rule, N=3, T=3, dtype=torch.float32, v_first=False)
    x = decode_cases.make_decode_inputs(case, "cpu", 0).args
    return x, lambda y: decode_cases.OPS[rule](**y)


OPS = {
    **{f"chunk {rule}": lambda rule=rule: _prefill(rule, 64, 64) for rule in rule_inputs.OPS},
    "chunk kda 128": lambda: _prefill("kda", 128, 128),
    "chunk gdn 48 80": lambda: _prefill("gdn", 48, 80),
    **{f"recurrent {rule}": lambda rule=rule: _recurrent(rule) for rule in decode_cases.OPS},
}


@pytest.mark.parametrize("value", WILD)
@pytest.mark.parametrize("name", OPS)
def test_one_head_of_one_sequence(name: str, value: float) -> None:
    """Head 1 of q and k serves the value heads 2 and 3. In chunk ops, earlier tokens of the same chunk and head may go too."""
    x, call = OPS[name]()
    o_clean, state_clean = call(x)
    for argument in [key for key, value in x.items() if isinstance(value, Tensor) and key not in ("bonus", "u")]:
        y = {key: tensor.clone() if isinstance(tensor, Tensor) else tensor for key, tensor in x.items()}
        if argument == "initial_state":
            y[argument][1, 1, 5] = value
        else:
            y[argument][1, -1, 1] = value
        hit = [2, 3] if argument in ("q", "k", "r") else [1]
        kept = [head for head in range(4) if head not in hit]
        o, state = call(y)
        assert same(o[[0, 2]], o_clean[[0, 2]]) and same(state[[0, 2]], state_clean[[0, 2]]), argument
        assert same(o[1][:, kept], o_clean[1][:, kept]) and same(state[1][kept], state_clean[1][kept]), argument
        before = 0 if argument == "initial_state" else 64 if name.startswith("chunk") else 2
        assert same(o[1, :before], o_clean[1, :before]), argument
        shows = not (o[1][:, hit].isfinite().all() and state[1][hit].isfinite().all())
        assert shows or (value == -torch.inf and argument in ("g", "w", "gk")), argument


@pytest.mark.parametrize("op", [op for op in SUBJECTS if not op.name.startswith("deltalog")], ids=lambda op: op.name)
def test_tokens_of_nobody(op: Subject) -> None:
    """Past the end of the pack, and those of padding: outputs there are zero, and no other bit changes."""
    x = op.make()
    last = int(x["cu_seqlens"][-1])
    slots, bounds = x["state_indices"].tolist(), x["cu_seqlens"].tolist()
    expected = op.call(op.make())
    padding = [n for n, slot in enumerate(slots) if slot < 0]
    assert padding
    for value in WILD:
        y = op.make()
        for name in ("q", "r", "k", "v", "g", "w", "gk", "beta"):
            if name in y:
                y[name][:, last:] = value
                for n in padding:
                    y[name][:, bounds[n] : bounds[n + 1]] = value
        found = op.call(y)
        assert all(same(a, b) for a, b in zip(found, expected)) and not found[0][:, last:].any()


@pytest.mark.parametrize("op", [op for op in SUBJECTS if op.name.startswith("deltalog")], ids=lambda op: op.name)
def test_requests_and_drafts_that_do_not_count(op: Subject) -> None:
    x = op.make()
    counts = x["valid"].tolist()
    expected = op.call(op.make())
    for value in WILD:
        y = op.make()
        for name in ("q", "r", "k", "v", "g", "w", "beta"):
            if name in y:
                y[name][1] = value  # of padding
                for n, count in enumerate(counts):
                    y[name][n, count:] = value
        assert all(same(a, b) for a, b in zip(op.call(y), expected))


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("merge_every", [1, 3, 16])
def test_drafts_that_are_taken_back_leave_nothing(merge_every: int, value: float, launches: int) -> None:
    """Two good tokens and two wild ones; the wild ones go, and the slot lives on."""
    walk = deltalog_cases.Walk("kda", merge_every=merge_every, launches=launches, seed=3)
    walk.write([0, 1, 2, 3, 4, 5])
    walk.decode([0, 1, 2])
    x = deltalog_cases.tokens(2, 4, 1, 2, "kda", "bounded", "cpu", 77)
    wild = {name: tensor.clone() for name, tensor in x.items()}
    for tensor in wild.values():
        tensor[0, 2:] = value
    deltalog_cases.call("kda", wild, walk.cache, walk.indices([1, 4]), verify=True)
    walk.cache.truncate([2], [1])
    for slot, row, kept in ((1, 0, 2), (4, 1, 4)):
        own = {name: tensor[row : row + 1, :kept] for name, tensor in x.items()}
        walk.truth[slot] = deltalog_cases.recurrence("kda", own, walk.truth[[slot]])[1][-1][0]
        walk.history[slot] = []
    deltalog_cases.hold(walk)
    for _ in range(5):
        walk.decode([1, 4, 0])
    walk.decode([1, 4], T=3, verify=True)
    deltalog_cases.hold(walk)


@pytest.mark.parametrize("rule", deltalog_cases.OPS)
def test_a_decay_of_minus_infinity_in_a_log(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(deltalog_cases.GATES, "cleared", lambda r: torch.where(r < 0.3, -torch.inf, -0.1 * r))
    walk = deltalog_cases.Walk(rule, merge_every=5, seed=4, gate="cleared")
    walk.write([0, 1, 2, 3, 4, 5])
    for _ in range(12):
        walk.decode([0, 1, 2])
    walk.decode([0, 1], T=4, verify=True)
    walk.truncate([0, 1], [2, 4])
    walk.decode([0, 1])
    deltalog_cases.hold(walk)


@pytest.mark.parametrize("op", SUBJECTS, ids=lambda op: op.name)
def test_the_default_device_is_not_looked_at(op: Subject) -> None:
    """Every tensor that an op makes lies where its arguments do, and indices given as lists on the host."""
    x, y = op.make(), op.make()
    narrow = {"initial_state": x["initial_state"].bfloat16()} if op.name.startswith("recurrent") else {}
    expected = op.call(x | {name: value.clone() for name, value in narrow.items()})
    with torch.device("meta"):
        found = op.call(y | {name: value.clone() for name, value in narrow.items()})
        if "cache" in y:
            y["cache"].fork([0], [1])
            y["cache"].truncate([0], [1])
            held = y["cache"].read_state([0, 1])
            assert same(held[0], held[1])
    assert all(map(same, found, expected))
