"""A problem in tensors: what a kernel is called with, what it has to write, and how near it must come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Case", "Random", "nothing", "relative_error", "tolerance", "torch_dtype"]


@dataclass(frozen=True, eq=False)
class Case:
    """Attributes:
    calls: positional arguments of launches that follow one another; a pass is all of them.
    reset: before a pass whose outputs count: poisons them with NaN, and restores what launches change in place.
    outputs: what a pass has written, by name.
    truth: the same in float64, from the reference; None for full-size problems, which are held to another candidate's outputs.
    tolerance: of ||out - truth|| / ||truth||, for each of the outputs.
    """

    calls: Sequence[tuple[Any, ...]]
    reset: Callable[[], None]
    outputs: Mapping[str, Tensor]
    truth: Mapping[str, Tensor] | None
    tolerance: float

    def error(self, truth: Mapping[str, Tensor]) -> float:
        """The largest error of an output; infinite where there is a NaN."""
        return max(relative_error(self.outputs[name], expected) for name, expected in truth.items())


def relative_error(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||; infinite where x is not finite."""
    exact = truth.double()
    error = float((x.double() - exact).norm() / exact.norm().clamp_min(1e-30))
    return error if error == error else float("inf")


def tolerance(dtype: str) -> float:
    """What the tests hold kernels to, by dtype of activations."""
    return {"bfloat16": 4e-3, "float16": 2e-3, "float32": 2e-5}[dtype]


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True)
class Random:
    """Fresh values on a device, the same ones for the same seed."""

    device: torch.device
    generator: torch.Generator

    @classmethod
    def of(cls, device: torch.device, seed: int) -> Random:
        return cls(device, torch.Generator(device).manual_seed(seed))

    def normal(self, *shape: int, dtype: str = "float32") -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(torch_dtype(dtype))

    def uniform(self, *shape: int, dtype: str = "float32") -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device).to(torch_dtype(dtype))


def nothing(device: torch.device, dtype: str, rank: int = 1) -> Tensor:
    """One element, for what a kernel does not read."""
    return torch.zeros((1,) * rank, dtype=torch_dtype(dtype), device=device)
