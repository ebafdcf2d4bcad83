"""Named ranges around ops and kernels, for Nsight Systems (NVTX) and for torch's profiler.

Off, they cost nothing: what is not wrapped is called as it is. KDA_TL_NVTX=1, set before the process starts, wraps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from kda_tl.runtime import environment

__all__ = ["annotate", "annotate_op", "span"]

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def span(name: str) -> Iterator[None]:
    """A range in both profilers. NVTX exists in CUDA builds of torch alone."""
    nvtx = torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()


def annotate(function: F, name: str | None = None) -> F:
    """`function` inside a range of that name (default: kda_tl::ITS_NAME) where KDA_TL_NVTX=1, else `function` itself.

    Raises:
        ValueError: KDA_TL_NVTX has a value that does not exist.
    """
    if not environment.nvtx():
        return function
    label = name or f"kda_tl::{getattr(function, '__name__', 'kernel')}"

    def inside(*args: Any, **kwargs: Any) -> Any:
        with span(label):
            return function(*args, **kwargs)

    return functools.wraps(function)(inside)  # type: ignore[return-value]


def annotate_op(function: F, name: str) -> F:
    """`annotate` for a public op, while the package is imported: a wrong KDA_TL_NVTX is left to the first kernel that is
    loaded, so that `kda-tl doctor` can still name it."""
    try:
        return annotate(function, name)
    except ValueError:
        return function
