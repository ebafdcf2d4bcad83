"""Layouts: what is refused, and that following a route gives what one process would have, with no process group."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from context_cases import NAMED, any_layout, zigzag
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_tl.distributed import Layout, Piece
from kda_tl.distributed.exchange import fold


def affine_fold(layout: Layout, maps: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each rank's received states from a gathered buffer that is NaN where no map is."""
    HV, K, V = 2, 4, 3
    slots = layout.route(0).slots
    gathered = torch.full((len(layout.pieces) * slots, HV, K, K + V), torch.nan)
    truth: dict[tuple[int, int], torch.Tensor] = {}
    for n, length in layout.lengths.items():
        state = torch.zeros(HV, K, V, dtype=torch.float64)
        for t in range(length):
            M, B = maps[n, t]
            state = M @ state + B
            truth[n, t + 1] = state
    for rank, pieces in enumerate(layout.pieces):
        for slot, index in enumerate(layout.route(rank).handed_over):
            piece = pieces[index]
            M, B = torch.eye(K, dtype=torch.float64).expand(HV, K, K), torch.zeros(HV, K, V, dtype=torch.float64)
            for t in range(piece.start, piece.end):
                M, B = maps[piece.sequence, t][0] @ M, maps[piece.sequence, t][0] @ B + maps[piece.sequence, t][1]
            gathered[rank * slots + slot] = torch.cat([M * (torch.nan if piece.start == 0 else 1), B], -1)
    for rank, pieces in enumerate(layout.pieces):
        route = layout.route(rank)
        assert route.slots == slots
        assert [pieces[i].start > 0 for i in range(len(pieces))] == [i in route.received for i in range(len(pieces))]
        states = fold(route, gathered, K)
        assert states.dtype == torch.float32 and states.shape == (len(route.received), HV, K, V)
        for state, index in zip(states, route.received):
            torch.testing.assert_close(state.double(), truth[pieces[index].sequence, pieces[index].start], rtol=1e-5, atol=1e-5)


def any_maps(layout: Layout) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {
        (n, t): (
            torch.rand((2, 4, 4), generator=generator, dtype=torch.float64) / 3,
            torch.randn((2, 4, 3), generator=generator, dtype=torch.float64),
        )
        for n, length in layout.lengths.items()
        for t in range(length)
    }


@pytest.mark.parametrize("name", [name for name in NAMED])
def test_routes_of_named_layouts(name: str) -> None:
    affine_fold(NAMED[name], any_maps(NAMED[name]))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 6))
def test_routes_of_any_layout(seed: int, ranks: int) -> None:
    layout = any_layout(seed, ranks)
    affine_fold(layout, any_maps(layout))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_pieces_in_any_order_on_any_rank(data: Any) -> None:
    """Cut sequences anywhere, deal the pieces out at random."""
    ranks = data.draw(st.integers(1, 4))
    held: list[list[Piece]] = [[] for _ in range(ranks)]
    for n in range(data.draw(st.integers(1, 3))):
        length = data.draw(st.integers(0, 12))
        cuts = [0, *sorted(data.draw(st.lists(st.integers(0, length), max_size=4))), length]
        for start, end in itertools.pairwise(cuts):
            of_rank = held[data.draw(st.integers(0, ranks - 1))]
            of_rank.insert(data.draw(st.integers(0, len(of_rank))), Piece(n, start, end - start))
    layout = Layout(tuple(map(tuple, held)))
    affine_fold(layout, any_maps(layout))


def test_every_token_of_a_pack_is_on_one_rank() -> None:
    layout = Layout.packed([0, 5, 5, 12], [0, 3, 3, 9, 12])
    assert layout.pieces == ((Piece(0, 0, 3),), (), (Piece(0, 3, 2), Piece(1, 0, 0), Piece(2, 0, 4)), (Piece(2, 4, 3),))
    assert layout.describe(2) == "-> seq 0 [3:5]   seq 1 [0:0]   seq 2 [0:4] ->"
    assert layout.describe(1) == "nothing"
    assert Layout.packed([0, 2, 2], [0, 2, 2]).pieces == ((Piece(0, 0, 2),), (Piece(1, 0, 0),))


def test_one_map_per_rank_is_enough_for_a_cut_pack() -> None:
    assert Layout.packed([0, 10, 20, 30], [0, 5, 15, 25, 30]).route(0).slots == 1
    assert Layout.packed([0, 10, 20, 30], [0, 10, 20, 30]).route(0).slots == 0, "nothing goes on elsewhere"
    assert Layout.dense(3, [0, 5, 9]).route(0).slots == 3
    assert zigzag([60], 3).route(0).slots == 2


def test_layouts_that_differ_have_other_digests() -> None:
    digests = {
        layout.digest
        for layout in (
            Layout.packed([0, 10], [0, 5, 10]),
            Layout.packed([0, 10], [0, 6, 10]),
            Layout.packed([0, 5, 10], [0, 5, 10]),
            Layout.dense(1, [0, 5, 10]),
        )
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Layout(()), ValueError, "at least one rank"),
        (lambda: Layout(((Piece(0, 0, 3),), (Piece(0, 4, 3),))), ValueError, "tokens 3 to 3 of sequence 0 are on no rank"),
        (lambda: Layout(((Piece(0, 1, 3),),)), ValueError, "tokens 0 to 0 of sequence 0"),
        (lambda: Layout(((Piece(0, 0, 3),), (Piece(0, 2, 3),))), ValueError, "token 2 of sequence 0 is on rank 1"),
        (lambda: Layout(((Piece(0, 0, 3),), (Piece(0, 0, 3),))), ValueError, "token 0 of sequence 0 is on rank 1"),
        (lambda: Layout(((Piece(0, 0, 3),), (Piece(0, 4, 0),))), ValueError, "rank 1 holds an empty piece at token 4"),
        (lambda: Layout(((Piece(0, -1, 3),),)), ValueError, "must not be negative"),
        (lambda: Layout(((Piece(0, 0, 3), Piece(1, 0, 2)),), is_packed=False), ValueError, "must have one length"),
        (lambda: Layout.packed([0, 5, 3], [0, 3]), ValueError, "cu_seqlens must not decrease, got 5 then 3"),
        (lambda: Layout.packed([1, 5], [0, 5]), ValueError, "cu_seqlens must start at 0"),
        (lambda: Layout.packed([], [0, 5]), ValueError, "cu_seqlens must start at 0"),
        (lambda: Layout.packed([0.0, 5.5], [0, 5]), TypeError, "cu_seqlens must hold integers"),
        (lambda: Layout.packed(torch.tensor([0.0, 5.5]), [0, 5]), TypeError, "cu_seqlens must hold integers"),
        (lambda: Layout.packed([0, 5], [0, 4]), ValueError, "end at 5, got [0, 4]"),
        (lambda: Layout.packed([0], [0]), ValueError, "an entry per rank and one more"),
        (lambda: Layout.packed([0, 5], [0, 3, 2, 5]), ValueError, "cuts must not decrease"),
        (lambda: Layout.dense(-1, [0, 4]), ValueError, "batch must be"),
        (lambda: Layout.dense(2, [0]), ValueError, "an entry per rank and one more"),
    ],
)
def test_refusals(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()
