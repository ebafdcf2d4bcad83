"""Contexts of flash-linear-attention, by their public fields; the library itself is not imported.

Its build_cp_context cuts a pack evenly and tells a rank about itself only: the local offsets, how many ranks before it hold a
part of its first local sequence (pre_num_ranks), and how many after it a part of its last (post_num_ranks). That is enough:
each rank hands over one map, of its last local sequence, and folds those of the ranks before it.
"""

from __future__ import annotations

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

    def cu_seqlens(self, given: Tensor | None = None, device: torch.device | str = "cpu") -> Tensor | None:
        return super().cu_seqlens(None, device)


def from_fla(given: Any) -> FlaContext | None:
    """The context of flash-linear-attention as one of ours, with no communication; None where it is something else.

    Where its cu_seqlens_cpu is None, the offsets are read from the device, which waits for it.
    Raises ValueError where a field that is needed is None.
    """
    if not all(hasattr(given, field) for field in FIELDS):
        return None
    if given.cu_seqlens is None:
        raise ValueError("cp_context.cu_seqlens must be the local offsets, got None: make it with build_cp_context")
    offsets = (given.cu_seqlens if given.cu_seqlens_cpu is None else given.cu_seqlens_cpu).tolist()
    if given.group is None:  # its word for: no context parallelism
        return FlaContext(Group(None, 0, 1), Route((), (), (), 1, "fla"), offsets)
    members = Group.of(given.group)
    before, after = given.pre_num_ranks, given.post_num_ranks
    if before is None or after is None:
        raise ValueError("cp_context.pre_num_ranks and post_num_ranks must be numbers of ranks, got None: "
                         "make it with build_cp_context")  # fmt: skip
    if not (0 <= before <= members.rank and 0 <= after < members.size - members.rank):
        raise ValueError(f"cp_context says {before} ranks before this one and {after} after it, but it is rank {members.rank} "
                         f"of {members.size}")  # fmt: skip
    route = Route(
        handed_over=(len(offsets) - 2,) if after else (),
        received=(0,) if before else (),
        chains=(tuple(range(members.rank - before, members.rank)),) if before else (),
        slots=1,
        digest="fla",
    )
    return FlaContext(members, route, offsets)
