"""Calls that were seen before: what an eager call is recognised by, and what was decided about it.

A call is known by values alone: shapes, strides, dtypes, devices, alignment and options. Addresses are no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Known", "any_mode", "is_plain", "offsets_known", "traits"]

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
STRIDED = torch.strided
OFFSETS = (torch.int32, torch.int64)
D = TypeVar("D")


class Known(Generic[D]):
    """A dictionary that forgets the oldest of more than `most` entries. Safe to use from several threads."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._found: dict[object, D] = {}
        self.get_hashable: Callable[[object], D | None] = self._found.get
        """As `get`, without a frame of Python's."""

    def get(self, key: object) -> D | None:
        try:
            return self._found.get(key)
        except TypeError:  # an option that cannot be hashed is none that passes the checks
            return None

    def put(self, key: object, decision: D) -> None:
        while len(self._found) >= self._most:
            with suppress(RuntimeError, StopIteration):  # another thread was at it
                self._found.pop(next(iter(self._found)), None)
        self._found[key] = decision

    def once(self, key: object, make: Callable[[], D]) -> D:
        """What is kept under `key`, else what `make` makes, which is kept; with a key of None, nothing is."""
        found = None if key is None else self.get(key)
        if found is None:
            found = make()
            if key is not None:
                self.put(key, found)
        return found

    def __len__(self) -> int:
        return len(self._found)


def any_mode() -> bool:
    """Whether torch's dispatcher has to see a call: fake tensors, tracers, transforms."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Plain tensors, of which none needs a gradient."""
    grad = torch.is_grad_enabled()
    return all(x is None or (type(x) in PLAIN_TENSORS and not (grad and x.requires_grad)) for x in tensors)


def traits(key: list[object], tensors: Sequence[Tensor | None], aligned: int = 0) -> bool:
    """Appends what a decision may depend on of each; False where one is not plain: a subclass, sparse, or with a
    gradient to record.

    aligned: of how many tensors, from the first, it depends on the alignment in memory too.
    """
    grad = torch.is_grad_enabled()
    try:
        for x in tensors:
            if x is None:
                key.append(None)
                continue
            if (type(x) is not Tensor and type(x) not in PLAIN_TENSORS) or (grad and x.requires_grad):
                return False
            if x.layout is not STRIDED:
                return False
            key += (x.shape, x.stride(), x.dtype, x.device, x.is_neg())
        for x in tensors[:aligned]:
            key.append(None if x is None else x.data_ptr() & 15)
    except Exception:  # what no plain tensor raises: the checks will name it
        return False
    return True


def offsets_known(key: list[object], cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> bool:
    """Appends the offsets that the host knows, which checks and plans look at; False where that would wait for a device."""
    for offsets in (cu_seqlens, cu_seqlens_cpu):
        if offsets is None:
            continue
        if type(offsets) is not Tensor or offsets.layout is not STRIDED or offsets.is_nested:
            return False
        if offsets.dim() != 1 or offsets.dtype not in OFFSETS:
            return False
        if offsets.device.type == "cpu":
            key += (offsets.dtype, *offsets.tolist())
        elif offsets is cu_seqlens_cpu:
            return False
    return True
