"""Inputs of the ops in float32 on the cpu, each in the middle of a buffer full of NaN."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

GATES = {
    "zero": torch.zeros_like,
    "weak": lambda r: -1e-3 * r,
    "strong": lambda r: -20.0 * r,
    "minus 60": lambda r: torch.full_like(r, -60.0),
    "half open": lambda r: torch.where(r < 0.5, 0.0, -r),
    "masked": lambda r: torch.where(r[..., :1] < 0.1, -1000.0, -0.01 * r),
    "cleared": lambda r: torch.where(r < 0.05, -torch.inf, -0.1 * r),
}


def poisoned(x: Tensor, strided: bool = False) -> Tensor:
    """The values of x [B, T, ...] in a view whose neighbours in memory are NaN."""
    B, T, *rest = x.shape
    heads = [rest[0] + 3, *rest[1:]] if strided else rest
    buffer = torch.full((B, T + 80, *heads), torch.nan, dtype=x.dtype)
    view = buffer[:, 40 : 40 + T, : rest[0]]
    return view.copy_(x)


def make(
    T: int, B: int = 1, H: int = 1, HV: int = 1, gate: str = "weak", N: int | None = None, seed: int = 0, strided: bool = False
) -> dict[str, Tensor]:
    """q, k of unit norm, v, g, beta in [0, 1], initial_state [N, HV, K, V]; K = V = 128."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    uniform = torch.rand((B, T, HV, 128), generator=generator)
    x = {
        "q": torch.nn.functional.normalize(normal(B, T, H, 128), dim=-1),
        "k": torch.nn.functional.normalize(normal(B, T, H, 128), dim=-1),
        "v": normal(B, T, HV, 128),
        "g": GATES[gate](uniform),
        "beta": torch.rand((B, T, HV), generator=generator),
    }
    placed = {name: poisoned(tensor, strided) for name, tensor in x.items()}
    return {**placed, "initial_state": normal(B if N is None else N, HV, 128, 128)}


def offsets(lengths: Iterable[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def sequences(x: dict[str, Tensor], cu_seqlens: list[int] | None) -> Iterator[tuple[int, slice]]:
    """(batch row, tokens) of every sequence."""
    if cu_seqlens is None:
        yield from ((b, slice(0, x["q"].shape[1])) for b in range(x["q"].shape[0]))
    else:
        yield from ((0, slice(a, b)) for a, b in itertools.pairwise(cu_seqlens))
