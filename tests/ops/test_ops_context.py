"""What an op does with a context, on a context that is no group: one process plays all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_inputs import GATES, make
from torch import Tensor

import kda_tl
from kda_tl.ops.context import ContextProtocol, Turn, register_adapter, segment_maps, takes_context
from kda_tl.reference import recurrent_kda


class Alone:
    """A pack of which the first sequence began elsewhere, with the state `came`, and the last goes on elsewhere."""

    def __init__(self, offsets: tuple[int, ...], came: Tensor) -> None:
        self.offsets, self.came, self.is_packed = offsets, came, True
        self.num_local, self.num_tokens = len(offsets) - 1, offsets[-1]
        self.received, self.handed_over = (0,), (len(offsets) - 2,)
        self.maps: tuple[Tensor, Tensor] | None = None
        self.withdrawn: list[tuple[str, str, torch.device | None]] = []

    def cu_seqlens(self, given: Tensor | None, device: torch.device) -> Tensor:
        return torch.tensor(self.offsets, dtype=torch.int32, device=device)

    def exchange(self, op: str, sizes: Any, device: torch.device, maps: Any) -> Tensor:
        self.maps = maps
        return self.came

    def withdraw(self, op: str, error: Exception, device: torch.device | None) -> None:
        self.withdrawn.append((op, str(error), device))


def relative(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("scalar", [False, True])
def test_maps_are_the_recurrence(gate: str, scalar: bool) -> None:
    """A span's map takes any state to where the recurrence takes it. Rows of a batch, parts of rows, NaN around them."""
    x = make(330, B=2, H=1, HV=2, gate=gate)
    x = {name: t[..., :16] if name in ("q", "k", "g") else t[..., :24] if name == "v" else t for name, t in x.items()}
    if scalar:
        x["g"] = x["g"][..., 0]
    spans = [(0, 0, 1), (1, 3, 68), (0, 5, 330), (1, 7, 7), (1, 266, 330)]
    transition, bias = segment_maps(x["k"], x["v"], x["g"], x["beta"], spans)
    assert transition.dtype == bias.dtype == torch.float32
    state = torch.randn(1, 2, 16, 24)
    for n, (row, first, last) in enumerate(spans):
        part = {name: x[name][row : row + 1, first:last] for name in ("q", "k", "v", "g", "beta")}
        _, truth = recurrent_kda(**part, initial_state=state)
        assert relative(transition[n].double() @ state[0].double() + bias[n], truth[0]) < 1e-6


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("positional", [False, True])
def test_the_op_starts_from_what_it_receives_and_hands_over_the_rest(positional: bool) -> None:
    x = make(70, HV=2, gate="weak", N=2)
    given = x["initial_state"].clone()
    came = torch.randn(1, 2, 128, 128)
    context = Alone((0, 20, 70), came)
    assert isinstance(context, ContextProtocol)
    if positional:
        x_list = [x[name] for name in ("q", "k", "v", "g", "beta")]
        o, state = kda_tl.chunk_kda(*x_list, None, given, True, False, False, False, False, False, None, False, False,
                                    False, None, None, context)  # fmt: skip
    else:
        o, state = kda_tl.chunk_kda(**x, output_final_state=True, cp_context=context)
    assert torch.equal(given, x["initial_state"]), "the caller's initial state is not written to"
    x["initial_state"] = torch.stack([came[0], given[1]])
    o_true, state_true = recurrent_kda(**x, cu_seqlens=[0, 20, 70])
    assert state is not None and relative(o, o_true) < 1e-5 and relative(state, state_true) < 1e-5
    assert context.maps is not None and relative(context.maps[1][0], state_true[1]) < 1e-6, "its state is in the bias"
    assert not context.withdrawn


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_piece_that_began_elsewhere_hands_over_its_bare_map(sequences: int) -> None:
    """One piece both received and handed over: the local initial state is in neither."""
    context = Alone((0, 30) if sequences == 1 else (0, 0, 30), torch.randn(1, 1, 128, 128))
    x = make(30, N=sequences)
    x["initial_state"][0] = torch.nan
    turn = Turn("an op", context, None)
    states = turn.initial_state(x["k"], x["v"], x["g"], x["beta"], x["initial_state"])
    assert states is not None and torch.equal(states[0], context.came[0])
    assert context.maps is not None and not context.maps[1].isnan().any()
    without = Turn("an op", context, None).initial_state(x["k"], x["v"], x["g"], x["beta"], None)
    assert without is not None and torch.equal(without[0], context.came[0]) and not without[1:].any()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": "a string"}, TypeError, "q must be a torch.Tensor, got str"),
        ({"q": torch.zeros(3)}, ValueError, "q must have shape"),
        ({"q": torch.zeros(2, 70, 1, 128)}, ValueError, "B = 1 and T of at least 70"),
        ({"g": torch.zeros(1, 70, 3, 128)}, ValueError, "g must have shape"),
        ({"beta": None}, TypeError, "beta must be a torch.Tensor"),
        ({"scale": "a"}, TypeError, "scale must be a number"),
        ({"state_indices": torch.tensor([0, 1])}, NotImplementedError, "state_indices must be None with cp_context"),
        ({"v": 3}, TypeError, "v must be a torch.Tensor, got int"),
        (
            {"q": torch.zeros(1, 70, 1, 128, requires_grad=True)},
            NotImplementedError,
            "q requires a gradient and chunk_kda with cp_context has no backward",
        ),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
)
def test_whatever_an_op_raises_is_told(change: dict[str, Any], error: type[Exception], text: str) -> None:
    context = Alone((0, 20, 70), torch.zeros(1, 1, 128, 128))
    with pytest.raises(error, match=text):
        kda_tl.chunk_kda(**{**make(70, N=2), **change}, cp_context=context)
    ((op, told, device),) = context.withdrawn
    assert op == "chunk_kda" and text in told and device == torch.device("cpu")


def test_an_error_after_the_exchange_is_not_told() -> None:
    @takes_context
    def op(x: dict[str, Tensor], cp_context: Any = None) -> None:
        cp_context.initial_state(x["k"], x["v"], x["g"], x["beta"], None)
        raise RuntimeError("in the scan")

    context = Alone((0, 70), torch.zeros(1, 1, 128, 128))
    with pytest.raises(RuntimeError, match="in the scan"):
        op(make(70), context)
    assert not context.withdrawn


def test_gradients_are_refused() -> None:
    context = Alone((0, 70), torch.zeros(1, 1, 128, 128))
    x = make(70)
    x["v"] = x["v"].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="v requires a gradient"):
        Turn("an op", context, None).initial_state(x["k"], x["v"], x["g"], x["beta"], None)
    with torch.no_grad():
        assert Turn("an op", context, None).initial_state(x["k"], x["v"], x["g"], x["beta"], None) is not None


def test_explain_takes_a_context() -> None:
    x = make(70, N=2)
    plan = kda_tl.explain(kda_tl.chunk_kda, **x, cp_context=Alone((0, 20, 70), torch.zeros(1, 1, 128, 128)))
    assert "2 packed sequences" in str(plan)


def test_contexts_of_others_are_adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_tl.ops.context._ADAPTERS", [])
    context = Alone((0, 70), torch.ones(1, 1, 128, 128))
    with pytest.raises(TypeError, match="got int"):
        hand_over(make(70), 7)
    register_adapter(lambda given: context if given == 7 else None)
    states = hand_over(make(70), 7)
    assert states is not None and torch.equal(states, context.came)


@takes_context
def hand_over(x: dict[str, Tensor], cp_context: Any = None) -> Tensor | None:
    states: Tensor | None = cp_context.initial_state(x["k"], x["v"], x["g"], x["beta"], None)
    return states
