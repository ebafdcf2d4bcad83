"""Prefill calls on a device that come again: their launches are one native call then, and nothing else about them changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_calls import CALLS, inputs, unfused

import kda_tl
from kda_tl.ops.prefill_decision import key_of, known

pytestmark = pytest.mark.gpu


def is_fused(x: dict[str, Any]) -> bool:
    decision = known(key_of(kda_tl.chunk_kda.op, kda_tl.chunk_kda.arguments(**x)))
    return decision is not None and decision.fused is not None


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
    assert is_fused(x)


@torch.no_grad()
def test_in_a_graph_on_other_streams_and_beside_other_memory() -> None:
    """The workspace of a fused call is torch's memory of the stream at hand, as any other."""
    x = inputs(0, "cuda", T=3000, heads=4)
    for _ in range(3):
        kda_tl.chunk_kda(**x)
    assert is_fused(x)
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
        results.append(o.cpu())
    assert torch.equal(*results)
