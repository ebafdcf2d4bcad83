"""What a context raises."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ContextParallelError"]


class ContextParallelError(RuntimeError):
    """Another rank of the context failed, or the ranks disagree. `ranks`: those that the message names, within the group."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
