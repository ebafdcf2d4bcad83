"""Contexts in one process: those of flash-linear-attention by their fields, backends of a group, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_cases import plain_op

from kda_tl.distributed import ContextParallel, Layout, Piece, from_fla
from kda_tl.distributed.exchange import Group
from kda_tl.reference import recurrent_kda

FIELDS: dict[str, Any] = {
    "group": None,
    "cu_seqlens": torch.tensor([0, 3, 10]),
    "cu_seqlens_cpu": None,
    "pre_num_ranks": 0,
    "post_num_ranks": 0,
}


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def inputs(T: int) -> dict[str, torch.Tensor]:
    k = torch.nn.functional.normalize(torch.randn(1, T, 1, 8), dim=-1)
    return {"q": torch.randn(1, T, 1, 8), "k": k, "v": torch.randn(1, T, 2, 6), "g": -torch.rand(1, T, 2, 8),
            "beta": torch.rand(1, T, 2)}  # fmt: skip


def test_no_group_is_no_parallelism() -> None:
    x = inputs(10)
    o, state = plain_op(**x, cu_seqlens=torch.tensor([0, 10]), cp_context=SimpleNamespace(**FIELDS))
    o_true, state_true = recurrent_kda(**x, cu_seqlens=[0, 3, 10])
    torch.testing.assert_close((o, state), (o_true, state_true), msg="the context's offsets count, not the caller's")


def test_one_rank(alone: dist.ProcessGroup) -> None:
    x = inputs(10)
    truth = recurrent_kda(**x, cu_seqlens=[0, 3, 10])
    for context in (SimpleNamespace(**{**FIELDS, "group": alone}), ContextParallel.packed([0, 3, 10])):
        torch.testing.assert_close(plain_op(**x, cp_context=context), truth)


def test_what_is_something_else() -> None:
    assert from_fla(object()) is None
    assert from_fla(SimpleNamespace(group=None, cu_seqlens=None)) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cu_seqlens": None}, "cp_context.cu_seqlens must be the local offsets, got None"),
        ({"pre_num_ranks": None}, "pre_num_ranks and post_num_ranks must be numbers of ranks, got None"),
        ({"pre_num_ranks": 1}, "says 1 ranks before this one and 0 after it, but it is rank 0 of 1"),
        ({"post_num_ranks": 2}, "0 ranks before this one and 2 after it"),
    ],
)
def test_fields_that_cannot_be(change: dict[str, Any], text: str, alone: dist.ProcessGroup) -> None:
    """Refused by the op, in its turn, so that other ranks are told."""
    with pytest.raises(ValueError, match=f"{text}.*build_cp_context"):
        plain_op(**inputs(10), cp_context=SimpleNamespace(**{**FIELDS, "group": alone, **change}))


@pytest.mark.parametrize(
    ("backends", "device", "wire"),
    [
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda", "cuda"),
        ({"cpu": "gloo", "cuda": "nccl"}, "cpu", "cpu"),
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", "cpu"),
        ({"cpu": "gloo", "cuda": "gloo"}, "cpu", "cpu"),
        ({"cuda": "nccl"}, "cuda", "cuda"),
        ({"cuda": "nccl"}, "cpu", None),
    ],
)
def test_tensors_travel_where_the_group_reaches(
    backends: dict[str, str], device: str, wire: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "backends", lambda self: backends)
    group = Group(None, 0, 2)
    if wire is None:
        with pytest.raises(ValueError, match="no backend for cpu tensors, only for cuda"):
            group.wire(torch.device(device))
    else:
        assert group.wire(torch.device(device)) == torch.device(wire)


def test_backends_of_a_group(alone: dist.ProcessGroup) -> None:
    assert Group.of(None).backends()["cpu"] == "gloo"
    assert (Group.of(None).rank, Group.of(alone).size) == (0, 1)


def test_what_a_context_refuses_and_says(alone: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="layout must be for the 1 ranks of the group, got 2"):
        ContextParallel.packed([0, 5], [0, 2, 5])
    with pytest.raises(ValueError, match="cuts must end at tokens = 5"):
        ContextParallel.dense(2, 5, [0, 4])
    with pytest.raises(ValueError, match="tokens must be a number"):
        ContextParallel.dense(2, -1)
    context = ContextParallel.packed([0, 2, 5])
    with pytest.raises(ValueError, match="offsets of the whole pack, got None"):
        context.take(torch.zeros(1, 5))
    for x, offsets, error, text in [
        (torch.zeros(1, 4), [0, 2, 5], ValueError, r"x must have shape \[1, T, ..\] with T of at least 5, got \[1, 4\]"),
        (torch.zeros(2, 5), [0, 2, 5], ValueError, r"x must have shape \[1, T, ..\]"),
        (torch.zeros(1, 5), [0, 3, 5], ValueError, "cu_seqlens must be of sequences of the lengths"),
        (torch.zeros(1, 5), torch.zeros(3, device="meta").int(), TypeError, "cu_seqlens must have values"),
        (5, [0, 2, 5], TypeError, "x must be a torch.Tensor, got int"),
    ]:
        with pytest.raises(error, match=text):
            context.take(x, offsets)
    for wrong in (torch.zeros(2, 4), torch.zeros(1, 5), torch.zeros(5)):
        with pytest.raises(ValueError, match=r"x must have shape \[B, T, ..\] = \[2, 5, ..\]"):
            ContextParallel.dense(2, 5).take(wrong)
    with pytest.raises(TypeError, match="layout must be a Layout, got str"):
        ContextParallel("x")
    with pytest.raises(TypeError, match=r"sequences must hold integers, got \[0.5\]"):
        ContextParallel.from_local([0, 5], [0.5], [0])
    with pytest.raises(ValueError, match=r"\[0, 2, 5\] on this rank, got \[0, 5\]"):
        context.cu_seqlens(torch.tensor([0, 5]))
    assert context.cu_seqlens() is context.cu_seqlens(torch.tensor([0, 2, 5])), "copied once"
    assert context.starts_here == context.ends_here == (True, True) and context.exchange_bytes(4, 8, 8) == 0
    assert ContextParallel.dense(2, 5).cu_seqlens() is None


def test_zigzag_on_one_rank(alone: dist.ProcessGroup) -> None:
    """Pieces of one sequence out of order on one rank: the maps go through the exchange, not through a group."""
    x = inputs(10)
    layout = Layout(((Piece(0, 6, 4), Piece(0, 0, 3), Piece(0, 3, 3)),))
    context = ContextParallel(layout)
    assert context.exchange_bytes(2, 8, 6) == 4 * 2 * 2 * 8 * (8 + 6)
    part = {name: context.take(t, [0, 10]) for name, t in x.items()}
    o, state = plain_op(**part, cp_context=context)
    o_true, state_true = recurrent_kda(**x)
    torch.testing.assert_close(o, context.take(o_true, [0, 10]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state[0], state_true[0], rtol=1e-5, atol=1e-6)
