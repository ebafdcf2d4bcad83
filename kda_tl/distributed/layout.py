"""Which tokens of which sequence are on which rank, and what follows from it for each of them. No communication here."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

__all__ = ["Layout", "Piece", "Route", "check_integers", "check_offsets"]


@dataclass(frozen=True, order=True)
class Piece:
    """The tokens start .. start + length - 1 of a sequence, counted from that sequence's first token."""

    sequence: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def __str__(self) -> str:
        return f"seq {self.sequence} [{self.start}:{self.end}]"


@dataclass(frozen=True)
class Route:
    """What one rank hands over and receives. `slots` and `digest` are the same on all ranks of a context.

    handed_over, received: indices of local pieces. chains[i]: which gathered maps lead to piece received[i], in time order; the
    map in slot s of rank r has the number r * slots + s, and a rank fills its slots in the order of handed_over.
    """

    handed_over: tuple[int, ...]
    received: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]
    slots: int
    digest: str


@dataclass(frozen=True)
class Layout:
    """pieces[r]: the local sequences of rank r, in the order in which they lie there; with is_packed along one token axis,
    else as the rows of a dense batch, all of one length on a rank.

    Every token of every sequence is on one rank exactly. Pieces may be cut anywhere, be empty, and lie in any order: a rank may
    hold several pieces of one sequence (zigzag).

    A piece that starts at token 0 enters with the initial state given on its rank; any other one with the state after the token
    before it. So an empty sequence keeps its initial state, and an empty piece further on gets the state there.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    is_packed: bool = True

    def __post_init__(self) -> None:
        if not self.pieces:
            raise ValueError("a layout needs at least one rank, got none")
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                if min(piece.sequence, piece.start, piece.length) < 0:
                    raise ValueError(f"sequence, start and length must not be negative, got {piece!r} on rank {rank}")
            if not self.is_packed and len({piece.length for piece in pieces}) > 1:
                raise ValueError(f"the rows of a dense batch must have one length, got {_listed(pieces)} on rank {rank}")
        for sequence, held in self._by_sequence.items():
            at = 0
            for piece, rank, _ in held:
                if piece.length == 0:
                    continue
                if piece.start > at:
                    raise ValueError(f"tokens {at} to {piece.start - 1} of sequence {sequence} are on no rank")
                if piece.start < at:
                    raise ValueError(f"token {piece.start} of sequence {sequence} is on rank {rank} and on another piece too")
                at = piece.end
            for piece, rank, _ in held:
                if piece.start > at:
                    raise ValueError(f"rank {rank} holds an empty piece at token {piece.start} of sequence {sequence}, "
                                     f"which ends at {at}")  # fmt: skip

    @staticmethod
    def packed(cu_seqlens: Sequence[int] | Tensor, cuts: Sequence[int]) -> Layout:
        """N sequences packed along one token axis, of which rank r holds the tokens cuts[r] .. cuts[r + 1] - 1.

        cu_seqlens [N + 1], of the whole pack; cuts [ranks + 1], from 0 to cu_seqlens[-1], not decreasing. An empty sequence is
        on the rank of the token that follows, at the end of the pack on the last rank.
        """
        bounds = check_offsets("cu_seqlens", cu_seqlens)
        cuts = check_offsets("cuts", cuts)
        if len(cuts) < 2 or cuts[-1] != bounds[-1]:
            raise ValueError(f"cuts must have an entry per rank and one more, and end at {bounds[-1]}, got {list(cuts)}")
        pieces = []
        for rank, (low, high) in enumerate(itertools.pairwise(cuts)):
            is_last = rank == len(cuts) - 2
            held = []
            for n, (first, last) in enumerate(itertools.pairwise(bounds)):
                start, end = max(first, low), min(last, high)
                if start < end or (first == last and (low <= first < high or (is_last and first == high))):
                    held.append(Piece(n, start - first, end - start))
            pieces.append(tuple(held))
        return Layout(tuple(pieces))

    @staticmethod
    def dense(batch: int, cuts: Sequence[int]) -> Layout:
        """A dense batch, of which rank r holds the tokens cuts[r] .. cuts[r + 1] - 1 of every row. cuts [ranks + 1], from 0."""
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
            raise ValueError(f"batch must be a number of rows, got {batch!r}")
        cuts = check_offsets("cuts", cuts)
        if len(cuts) < 2:
            raise ValueError(f"cuts must have an entry per rank and one more, got {list(cuts)}")
        rows = range(batch)
        return Layout(
            tuple(tuple(Piece(n, low, high - low) for n in rows) for low, high in itertools.pairwise(cuts)), is_packed=False
        )

    @cached_property
    def _by_sequence(self) -> dict[int, list[tuple[Piece, int, int]]]:
        """sequence -> its (piece, rank, local index), in time order."""
        held: dict[int, list[tuple[Piece, int, int]]] = {}
        for rank, pieces in enumerate(self.pieces):
            for index, piece in enumerate(pieces):
                held.setdefault(piece.sequence, []).append((piece, rank, index))
        return {sequence: sorted(held[sequence]) for sequence in sorted(held)}

    @cached_property
    def lengths(self) -> dict[int, int]:
        """sequence -> its tokens."""
        return {n: max(piece.end for piece, _, _ in held) for n, held in self._by_sequence.items()}

    @cached_property
    def _handed_over(self) -> tuple[tuple[int, ...], ...]:
        """Per rank: its pieces that another piece continues."""
        latest = {n: max(piece.start for piece, _, _ in held) for n, held in self._by_sequence.items()}
        return tuple(
            tuple(i for i, piece in enumerate(pieces) if piece.length and latest[piece.sequence] >= piece.end)
            for pieces in self.pieces
        )

    @cached_property
    def digest(self) -> str:
        text = f"{self.is_packed} " + "|".join(
            ",".join(f"{p.sequence}:{p.start}:{p.length}" for p in pieces) for pieces in self.pieces
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def route(self, rank: int) -> Route:
        """What rank hands over and receives."""
        handed_over = self._handed_over
        slots = max(len(of_rank) for of_rank in handed_over)
        number = {(r, index): r * slots + slot for r, of_rank in enumerate(handed_over) for slot, index in enumerate(of_rank)}
        received, chains = [], []
        for index, piece in enumerate(self.pieces[rank]):
            if piece.start:
                received.append(index)
                held = self._by_sequence[piece.sequence]
                chains.append(tuple(number[r, i] for p, r, i in held if p.length and p.end <= piece.start))
        return Route(handed_over[rank], tuple(received), tuple(chains), slots, self.digest)

    def describe(self, rank: int) -> str:
        """One line: the pieces of a rank. Arrows: it goes on from, or goes on at, another one."""
        words = []
        for index, piece in enumerate(self.pieces[rank]):
            before = "-> " if piece.start else ""
            after = " ->" if index in self._handed_over[rank] else ""
            words.append(f"{before}{piece}{after}")
        return "   ".join(words) or "nothing"


def check_integers(name: str, values: Iterable[int] | Tensor) -> tuple[int, ...]:
    """The values as Python integers. Raises TypeError, which names the argument."""
    if isinstance(values, Tensor) and values.is_meta:
        raise TypeError(f"{name} must have values, got a tensor on meta")
    listed = values.tolist() if isinstance(values, Tensor) else values
    try:
        return tuple(operator.index(x) for x in listed)
    except TypeError:
        raise TypeError(f"{name} must hold integers, got {values!r}") from None


def check_offsets(name: str, values: Iterable[int] | Tensor) -> tuple[int, ...]:
    """Whole numbers from 0 that do not decrease, at least one. Raises TypeError or ValueError, which name the argument."""
    offsets = check_integers(name, values)
    if not offsets or offsets[0] != 0:
        raise ValueError(f"{name} must start at 0, got {list(offsets[:1])}")
    for index, (first, last) in enumerate(itertools.pairwise(offsets)):
        if last < first:
            raise ValueError(f"{name} must not decrease, got {first} then {last} at index {index + 1}")
    return offsets


def _listed(pieces: Iterable[Piece]) -> str:
    return ", ".join(map(str, pieces))
