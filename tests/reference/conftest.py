"""Fixtures of the reference tests. They are functions, session-wide, so that hypothesis tests can use them too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

GATES = {
    "none": lambda r: torch.zeros_like(r),
    "mild": lambda r: -0.1 * r,
    "bounded": lambda r: -5.0 * r,
    "strong": lambda r: -60.0 * r,
    "constant -60": lambda r: torch.full_like(r, -60.0),
    "half open": lambda r: torch.where(r < 0.5, 0.0, -r),
    "masked": lambda r: torch.where(r < 0.1, -1000.0, -0.1 * r),
}


def _inputs(
    B: int, T: int, H: int, HV: int, K: int, V: int, gate: str = "mild", seed: int = 0, N: int | None = None
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    return {
        "q": unit(B, T, H, K),
        "k": unit(B, T, H, K),
        "v": normal(B, T, HV, V),
        "g": GATES[gate](uniform(B, T, HV, K)),
        "beta": 2.0 * uniform(B, T, HV),
        "initial_state": normal(B if N is None else N, HV, K, V),
    }


def _token_loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The recurrence as a loop over single vectors in numpy float64: one batch row and one head at a time."""
    arrays = [x.double().numpy() for x in (q, k, v, g, beta)]
    o = np.zeros(v.shape)
    final = initial_state.double().numpy().copy()
    B, T, HV = beta.shape
    group = HV // q.shape[2]
    for b, h in np.ndindex(B, HV):
        q_h, k_h, v_h, g_h, beta_h = (x[b, :, h // group if i < 2 else h] for i, x in enumerate(arrays))
        S = final[b, h]
        for t in range(T):
            S = np.exp(g_h[t])[:, None] * S
            u = beta_h[t] * (v_h[t] - S.T @ k_h[t])
            S = S + np.outer(k_h[t], u)
            o[b, t, h] = scale * S.T @ q_h[t]
        final[b, h] = S
    return torch.from_numpy(o), torch.from_numpy(final)


def _relative_error(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||; infinite where a shape differs or x is not finite."""
    if x.shape != truth.shape or not x.isfinite().all():
        return float("inf")
    x, truth = x.detach().double(), truth.detach().double()
    return float((x - truth).norm() / truth.norm().clamp(min=1e-300))


@pytest.fixture(scope="session")
def inputs() -> Callable[..., dict[str, Tensor]]:
    """inputs(B, T, H, HV, K, V, gate, seed, N): unit q and k, beta in [0, 2), an initial state; float64."""
    return _inputs


@pytest.fixture(scope="session")
def token_loop() -> Callable[..., tuple[Tensor, Tensor]]:
    return _token_loop


@pytest.fixture(scope="session")
def relative_error() -> Callable[[Tensor, Tensor], float]:
    return _relative_error
