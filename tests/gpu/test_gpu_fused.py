"""Prefill calls on a device that come again: their launches are one native call then, and nothing else about them changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_calls import CALLS, inputs, unfused

import kda_tl
from kda_tl.ops.prefill_decision import key_of, known
from kda_tl.runtime import dispatcher

pytestmark = pytest.mark.gpu


def is_fused(x: dict[str, Any]) -> bool:
    decision = known(key_of(kda_tl.chunk_kda.op, kda_tl.chunk_kda.arguments(**x)))
    return decision is not None and decision.fused is not None


def is_recognised(x: dict[str, Any], op: Any = kda_tl.chunk_kda) -> bool:
    """Whether a call is made without asking the dispatcher for a kernel, nor torch for a view."""
    asked: list[Any] = []
    find = dispatcher.kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "kernel", lambda *which: asked.append(which) or find(*which))
        patch.setattr("kda_tl.ops.prefill_launch._inputs", lambda *given: pytest.fail("the call was not recognised"))
        op(**x)
    return not asked


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("name", CALLS)
def test_a_fused_call_gives_the_same_bits(name: str) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        x = CALLS[name](seed, "cuda")
        other = {n: value.clone() if n == "initial_state" else value for n, value in x.items()}
        found, expected = kda_tl.chunk_kda(**x), unfused(other)
        assert same((*found, x.get("initial_state")), (*expected, other.get("initial_state")))
    assert is_fused(x) or is_recognised(x)


@torch.no_grad()
def test_in_a_graph_on_other_streams_and_beside_other_memory() -> None:
    """The workspace of a fused call is torch's memory of the stream at hand, as any other."""
    x = inputs(0, "cuda", T=3000, heads=4)
    for _ in range(3):
        kda_tl.chunk_kda(**x)
    assert is_recognised(x)
    expected = kda_tl.chunk_kda(**x)[0]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(kda_tl.chunk_kda(**x)[0])
                torch.empty(1 << 24, dtype=torch.uint8, device="cuda").fill_(255)  # what a freed workspace becomes
        torch.cuda.synchronize()
        assert all(torch.equal(o, expected) for o in results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = kda_tl.chunk_kda(**x)[0]
    for seed in range(3):
        for name, tensor in inputs(seed, "cuda", T=3000, heads=4).items():
            x[name].copy_(tensor)
        graph.replay()
        assert torch.equal(o, unfused(x)[0])


@torch.no_grad()
def test_each_device_has_its_own() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    results = []
    for device in ("cuda:0", "cuda:1"):
        x = {name: tensor.to(device) for name, tensor in inputs(0, "cuda:0").items()}
        for _ in range(3):
            o = kda_tl.chunk_kda(**x)[0]
        assert o.device == torch.device(device) and torch.cuda.current_device() == 0
        with torch.cuda.device(device):
            assert is_recognised(x) and torch.equal(kda_tl.chunk_kda(**x)[0], o)
        results.append(o.cpu())
    assert torch.equal(*results)


def decode_inputs(op: Any, device: str = "cuda") -> dict[str, Any]:
    """Three requests on slots of a pool of eight."""
    heads, half = 4, {"device": device, "dtype": torch.bfloat16}
    x: dict[str, Any] = {name: torch.randn(3, 1, heads, 128, **half) for name in ("q", "k", "v", "g")}
    x |= {"beta": torch.randn(3, 1, heads, **half), "state_indices": torch.tensor([3, 1, 2], dtype=torch.int32, device=device)}
    fused = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    x |= dict.fromkeys(fused, True) | {"lower_bound": -5.0, "dt_bias": torch.randn(heads, 128, device=device)}
    x["A_log"] = torch.rand(heads, device=device)
    if op is kda_tl.deltalog_decode_kda:
        return x | {"cache": kda_tl.DeltaLogCache(8, heads, device=device)}
    return x | {"initial_state": torch.zeros(8, heads, 128, 128, device=device), "state_v_first": True, "inplace": True}


@torch.no_grad()
@pytest.mark.parametrize("op", [kda_tl.recurrent_kda, kda_tl.deltalog_decode_kda], ids=["recurrent", "deltalog"])
def test_decode_that_comes_again_eagerly_and_in_a_graph(op: Any) -> None:
    x, y = decode_inputs(op), decode_inputs(op)
    y |= {name: value for name, value in x.items() if name not in ("initial_state", "cache")}

    def outputs(found: Any) -> torch.Tensor:
        return found if isinstance(found, torch.Tensor) else found[0]

    for step in range(40):  # over a fold of every log
        x["v"].normal_()
        assert torch.equal(outputs(op(**x)), outputs(unfused(y, op)))
        assert step < 2 or is_recognised(x, op) == bool(unfused(y, op) is not None)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        o = outputs(op(**x))
    for _ in range(20):
        x["v"].normal_()
        graph.replay()
        assert torch.equal(o, outputs(unfused(y, op)))
    states = (z["cache"].read_state() if "cache" in z else z["initial_state"] for z in (x, y))
    assert torch.equal(*states)
