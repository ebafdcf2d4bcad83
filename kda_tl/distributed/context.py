"""ContextParallel: this process's share of sequences that the ranks of a process group hold together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kda_tl.distributed.errors import ContextParallelError
from kda_tl.distributed.exchange import Group, fold
from kda_tl.distributed.layout import Layout, Piece, Route, check_integers, check_offsets

__all__ = ["ContextParallel", "RoutedContext"]


class RoutedContext:
    """What an op asks of a context (`kda_tl.ops.context.ContextProtocol`), given a route over a group."""

    def __init__(self, group: Group, route: Route, offsets: Sequence[int], row_tokens: int | None = None) -> None:
        """offsets [num_local + 1]: of the local pack; or, with row_tokens, of the rows of a dense batch laid end to end."""
        self._group, self._route, self.offsets = group, route, tuple(offsets)
        self.num_local, self.is_packed = len(self.offsets) - 1, row_tokens is None
        self.num_tokens = self.offsets[-1] if row_tokens is None else row_tokens
        self.handed_over, self.received = route.handed_over, route.received
        self._cu_seqlens: dict[torch.device, Tensor] = {}

    @property
    def rank(self) -> int:
        """Of this process within the group, as `size` is the number of its processes."""
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def cu_seqlens(self, given: Tensor | None = None, device: torch.device | str = "cpu") -> Tensor | None:
        """[num_local + 1] int32 on `device`: the local pack's offsets, None of a dense batch. Copied there once.

        given: the caller's own, compared where the host knows its values. Raises ValueError where it is another.
        """
        if not self.is_packed:
            return None
        if given is not None:
            if not isinstance(given, Tensor):
                raise TypeError(f"cu_seqlens must be a torch.Tensor, got {type(given).__name__}")
            if given.numel() != len(self.offsets) or (given.device.type == "cpu" and given.tolist() != list(self.offsets)):
                values = given.tolist() if given.device.type == "cpu" else f"{given.numel()} offsets"
                raise ValueError(
                    "cu_seqlens must be left out, or be the local offsets of cp_context, not those of the whole pack: "
                    f"{list(self.offsets)} on this rank, got {values}"
                )
        device = torch.device(device)
        if device not in self._cu_seqlens:
            self._cu_seqlens[device] = torch.tensor(self.offsets, dtype=torch.int32, device=device)
        return self._cu_seqlens[device]

    def exchange(
        self, op: str, sizes: tuple[int, int, int], device: torch.device, maps: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        return fold(self._route, self._group.gather(op, self._route, sizes, device, maps), sizes[1])

    def withdraw(self, op: str, error: Exception, device: torch.device | None) -> None:
        self._group.fail(op, error, device)


class ContextParallel(RoutedContext):
    """Sequences whose tokens lie on several ranks, for the argument `cp_context` of an op. Exact for any gate.

    A token axis of 12 tokens with the sequences 0 (5 tokens) and 1 (7 tokens), cut at 3 and 9 for three ranks:

        token axis    0  1  2  3  4 | 5  6  7  8  9 10 11
        sequence      0  0  0  0  0 | 1  1  1  1  1  1  1
        rank          0  0  0  1  1   1  1  1  1  2  2  2

        rank 0   seq 0 [0:3] ->                       cu_seqlens [0, 3]
        rank 1   -> seq 0 [3:5]   seq 1 [0:4] ->      cu_seqlens [0, 2, 6]
        rank 2   -> seq 1 [4:7]                       cu_seqlens [0, 3]

    Each rank calls the op with its own tokens alone, as local sequences. Before its scan, a rank computes the affine map
    (M, B) of each piece that goes on elsewhere; one all-gather brings all of them to all ranks; each rank folds those that
    precede its own pieces, S <- M S + B in time order and float64, and scans from there. A call moves
    `exchange_bytes(HV, K, V)` to each rank, whatever the number of tokens.

    **States are local**: `initial_state` and the final state have a row per local sequence.

    - initial_state: the row of a piece that starts its sequence (`starts_here`) is read. The others may hold anything.
    - final state: every row is the state after the last token that this rank holds of the sequence. Where `ends_here`, that
      is the sequence's final state; elsewhere it is the state at the cut, as one process would have it there.

    Every rank of the group makes the context from the same arguments, and calls the op; also one that holds no token. A rank
    that fails before the exchange (bad input, an exception from a kernel's launch) raises its own error, and the others a
    ContextParallelError that names it, instead of waiting; the group stays usable. A process that dies, or a fault that the
    device reports later, is left to the group's timeout. No gradient crosses from one rank to another: inputs that
    require one raise NotImplementedError.

    A context may serve any number of calls, ops and layers. `print` it to see who holds what.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup | None = None) -> None:
        """layout: the same on all ranks, of as many ranks as `group` has. group: None is the default one. No communication.

        Raises RuntimeError without init_process_group; ValueError where the sizes differ or this process is not in the group.
        """
        if not isinstance(layout, Layout):
            raise TypeError(f"layout must be a Layout, got {type(layout).__name__}: see packed, dense and from_local")
        members = Group.of(group)
        if len(layout.pieces) != members.size:
            raise ValueError(f"layout must be for the {members.size} ranks of the group, got {len(layout.pieces)}")
        self.layout = layout
        self.pieces: tuple[Piece, ...] = layout.pieces[members.rank]
        offsets = [0]
        for piece in self.pieces:
            offsets.append(offsets[-1] + piece.length)
        rows = None if layout.is_packed else max((piece.length for piece in self.pieces), default=0)
        super().__init__(members, layout.route(members.rank), offsets, rows)

    @classmethod
    def packed(
        cls, cu_seqlens: Sequence[int] | Tensor, cuts: Sequence[int] | None = None, group: dist.ProcessGroup | None = None
    ) -> ContextParallel:
        """N sequences packed along one token axis, which is cut into a run of tokens per rank.

        cu_seqlens: [N + 1], of the whole pack; on the host, or it is waited for. cuts: [ranks + 1], rank r holds the tokens
        cuts[r] .. cuts[r + 1] - 1, any number of them; default even. An empty sequence is on the rank of the token that
        follows it, at the end of the pack on the last rank.
        """
        bounds = check_offsets("cu_seqlens", cu_seqlens)
        return cls(Layout.packed(bounds, _even(bounds[-1], group) if cuts is None else cuts), group)

    @classmethod
    def dense(
        cls, batch: int, tokens: int, cuts: Sequence[int] | None = None, group: dist.ProcessGroup | None = None
    ) -> ContextParallel:
        """A dense batch [batch, tokens, ..]: rank r holds the tokens cuts[r] .. cuts[r + 1] - 1 of every row; default even."""
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise ValueError(f"tokens must be a number of tokens per row, got {tokens!r}")
        cuts = _even(tokens, group) if cuts is None else cuts
        if len(cuts) and cuts[-1] != tokens:
            raise ValueError(f"cuts must end at tokens = {tokens}, got {list(cuts)}")
        return cls(Layout.dense(batch, cuts), group)

    @classmethod
    def from_local(
        cls, cu_seqlens: Sequence[int] | Tensor, sequences: Sequence[int], starts: Sequence[int],
        group: dist.ProcessGroup | None = None,
    ) -> ContextParallel:  # fmt: skip
        """From what each rank knows of itself. Collective: the ranks tell each other; call it on all of them.

        cu_seqlens: [num_local + 1], of this rank's pack. sequences: [num_local], a number per sequence that all ranks agree
        on. starts: [num_local], where within its sequence each piece starts.

        Raises, where one rank has bad arguments, its own error there and ContextParallelError on the others; ValueError on all
        of them where the pieces do not make whole sequences.
        """
        members = Group.of(group)
        pieces: tuple[Piece, ...] = ()
        error: Exception | None = None
        try:
            offsets = check_offsets("cu_seqlens", cu_seqlens)
            if not len(offsets) - 1 == len(sequences) == len(starts):
                raise ValueError(
                    f"sequences and starts must have an entry per local sequence, {len(offsets) - 1}, "
                    f"got {len(sequences)} and {len(starts)}"
                )
            pieces = tuple(
                Piece(n, start, last - first)
                for n, start, (first, last) in zip(
                    check_integers("sequences", sequences), check_integers("starts", starts), itertools.pairwise(offsets)
                )
            )
        except Exception as caught:  # whatever it is, the others are waiting
            error = caught
        told: list[Any] = [None] * members.size
        dist.all_gather_object(told, (pieces, None if error is None else f"{type(error).__name__}: {error}"), group)
        if error is not None:
            raise error
        failed = {rank: of_rank[1] for rank, of_rank in enumerate(told) if of_rank[1] is not None}
        if failed:
            what = "; ".join(f"{members.name(rank)} failed: {of_rank}" for rank, of_rank in failed.items())
            raise ContextParallelError(f"ContextParallel.from_local cannot go on: {what}", list(failed))
        return cls(Layout(tuple(of_rank[0] for of_rank in told)), group)

    @property
    def sequences(self) -> tuple[int, ...]:
        """[num_local]: the sequence that each local one is, or is a piece of."""
        return tuple(piece.sequence for piece in self.pieces)

    @property
    def starts_here(self) -> tuple[bool, ...]:
        """[num_local]: its initial state is the row given on this rank."""
        return tuple(piece.start == 0 for piece in self.pieces)

    @property
    def ends_here(self) -> tuple[bool, ...]:
        """[num_local]: the final state of the whole sequence is the row returned on this rank."""
        return tuple(piece.end == self.layout.lengths[piece.sequence] for piece in self.pieces)

    def take(self, x: Tensor, cu_seqlens: Sequence[int] | Tensor | None = None) -> Tensor:
        """This rank's tokens of a whole tensor: x [B, T, ..] of a dense batch, or [1, T, ..] of the pack with the offsets
        `cu_seqlens` [N + 1] of all sequences. Returns [B, num_tokens, ..], a view where the pieces lie side by side.

        Raises TypeError or ValueError where x or cu_seqlens is not of this context's sequences."""
        lengths = self.layout.lengths
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if not self.is_packed:
            rows = (len(lengths), next(iter(lengths.values()), 0))
            if x.dim() < 2 or (rows[0] and tuple(x.shape[:2]) != rows):
                raise ValueError(f"x must have shape [B, T, ..] = [{rows[0]}, {rows[1]}, ..], got {list(x.shape)}")
            if len({(piece.start, piece.end) for piece in self.pieces}) == 1 and self.sequences == tuple(range(len(x))):
                return x[:, self.pieces[0].start : self.pieces[0].end]
            taken = [x[piece.sequence, piece.start : piece.end] for piece in self.pieces]
            return torch.stack(taken) if taken else x[:0, :0]
        if cu_seqlens is None:
            raise ValueError("cu_seqlens must be the offsets of the whole pack, got None")
        bounds = check_offsets("cu_seqlens", cu_seqlens)
        given = {n: last - first for n, (first, last) in enumerate(itertools.pairwise(bounds))}
        if any(given.get(n) != length for n, length in lengths.items()):
            raise ValueError(f"cu_seqlens must be of sequences of the lengths {lengths}, got {list(bounds)}")
        if x.dim() < 2 or x.shape[0] != 1 or x.shape[1] < bounds[-1]:
            raise ValueError(f"x must have shape [1, T, ..] with T of at least {bounds[-1]}, got {list(x.shape)}")
        spans = [(bounds[p.sequence] + p.start, bounds[p.sequence] + p.end) for p in self.pieces if p.length]
        if all(before[1] == after[0] for before, after in itertools.pairwise(spans)):
            return x[:, spans[0][0] : spans[-1][1]] if spans else x[:, :0]
        return torch.cat([x[:, first:last] for first, last in spans], 1)

    def exchange_bytes(self, HV: int, K: int, V: int) -> int:
        """Bytes that the all-gather of one call brings to each rank."""
        return 4 * self.size * self._route.slots * HV * K * (K + V)

    def __str__(self) -> str:
        lengths = self.layout.lengths
        kind = "packed sequences" if self.is_packed else "rows of a dense batch"
        total = sum(lengths.values())
        lines = [f"context of {self.size} ranks: {len(lengths)} {kind}, {total} tokens; this is rank {self.rank}"]
        for rank in range(self.size):
            tokens = sum(piece.length for piece in self.layout.pieces[rank])
            lines.append(f"  rank {rank}  {tokens:>8} tokens  {self.layout.describe(rank)}")
        slots = self._route.slots
        lines.append(f"  all-gather of {slots} map{'' if slots == 1 else 's'} (M, B) per rank and value head")
        return "\n".join(lines)


def _even(tokens: int, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    size = Group.of(group).size
    return tuple(rank * tokens // size for rank in range(size + 1))
