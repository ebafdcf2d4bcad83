"""Contexts of flash-linear-attention, by their public fields; the library itself is not imported.

Its build_cp_context cuts a pack evenly and tells a rank about itself only: the local offsets, how many ranks before it hold a
part of its first local sequence (pre_num_ranks), and how many after it a part of its last (post_num_ranks). That is enough:
each rank hands over one map, of its last local sequence, and folds those of the ranks before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kda_tl.distributed.context import RoutedContext
from kda_tl.distributed.exchange import Group
from kda_tl.distributed.layout import Route

__all__ = ["FlaContext", "from_fla"]

FIELDS = ("group", "cu_seqlens", "cu_seqlens_cpu", "pre_num_ranks", "post_num_ranks")


class FlaContext(RoutedContext):
    """A FLACPContext for our ops. The caller's cu_seqlens is overridden by the context's, as there. Unlike there, initial and
    final states are taken and given, as `ContextParallel` documents. Every rank holds a token."""

    def __init__(self, group: Group, route: Route, offsets: Sequence[int], wrong: str = "") -> None:
        """wrong: what is not right with its fields, raised where an op asks for the offsets, so that the others are told."""
        super().__init__(group, route, offsets)
        self._wrong = wrong

    def cu_seqlens(self, given: Tensor | None = None, device: torch.device | str = "cpu") -> Tensor | None:
        if self._wrong:
            raise ValueError(f"cp_context{self._wrong}: make it with build_cp_context")
        return super().cu_seqlens(None, device)


def from_fla(given: Any) -> FlaContext | None:
    """The context of flash-linear-attention as one of ours, with no communication; None where it is something else.

    Where its cu_seqlens_cpu is None, the offsets are read from the device, which waits for it. A field that cannot be is a
    ValueError of the op that is called with it.
    """
    if not all(hasattr(given, field) for field in FIELDS):
        return None
    nothing = Route((), (), (), 1, "fla")
    members = Group(None, 0, 1) if given.group is None else Group.of(given.group)  # None is its word for no parallelism
    if given.cu_seqlens is None:
        return FlaContext(members, nothing, [0], ".cu_seqlens must be the local offsets, got None")
    offsets = (given.cu_seqlens if given.cu_seqlens_cpu is None else given.cu_seqlens_cpu).tolist()
    if given.group is None:
        return FlaContext(members, nothing, offsets)
    before, after = given.pre_num_ranks, given.post_num_ranks
    if before is None or after is None:
        return FlaContext(members, nothing, [0], ".pre_num_ranks and post_num_ranks must be numbers of ranks, got None")
    if not (0 <= before <= members.rank and 0 <= after < members.size - members.rank):
        wrong = f" says {before} ranks before this one and {after} after it, but it is rank {members.rank} of {members.size}"
        return FlaContext(members, nothing, [0], wrong)
    route = Route(
        handed_over=(len(offsets) - 2,) if after else (),
        received=(0,) if before else (),
        chains=(tuple(range(members.rank - before, members.rank)),) if before else (),
        slots=1,
        digest="fla",
    )
    return FlaContext(members, route, offsets)
