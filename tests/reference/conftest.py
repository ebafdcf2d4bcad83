"""Fixtures of the reference tests. They are functions, session-wide, so that hypothesis tests can use them too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kda_tl.specs.rules import RULES, Rule

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


def _rule_inputs(
    rule: Rule, B: int, T: int, H: int, HV: int, K: int, V: int, gate: str = "mild", seed: int = 0, N: int | None = None
) -> dict[str, Tensor]:
    """What `_inputs` makes, with g, beta and bonus as the rule has them."""
    x = _inputs(B, T, H, HV, K, V, gate, seed, N)
    if rule.decay == "none":
        del x["g"]
    elif rule.decay == "scalar":
        x["g"] = x["g"][..., 0].clone()
    if not rule.delta:
        del x["beta"]
    if rule.read_first:
        x["bonus"] = torch.randn(H, K, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return x


def _token_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    bonus: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
    rule: Rule = RULES["kda"],
) -> tuple[Tensor, Tensor]:
    """The recurrence as a loop over single vectors in numpy float64: one batch row and one head at a time."""
    B, T, HV, V = v.shape
    H, K = q.shape[2:]
    q_, k_, v_ = (x.double().numpy() for x in (q, k, v))
    g_ = np.zeros((B, T, HV, 1)) if g is None else (g if g.dim() == 4 else g.unsqueeze(-1)).double().numpy()
    beta_ = np.ones((B, T, HV)) if beta is None else beta.double().numpy()
    bonus_ = np.zeros((H, K)) if bonus is None else bonus.double().numpy()
    o = np.zeros((B, T, HV, V))
    final = np.zeros((B, HV, K, V)) if initial_state is None else initial_state.double().numpy().copy()
    for b, h in np.ndindex(B, HV):
        head = h // (HV // H)
        S = final[b, h]
        for t in range(T):
            if rule.read_first:
                own = sum(q_[b, t, head, c] * bonus_[head, c] * k_[b, t, head, c] for c in range(K))
                o[b, t, h] = scale * (S.T @ q_[b, t, head] + own * v_[b, t, h])
            S = np.exp(g_[b, t, h])[:, None] * S
            u = beta_[b, t, h] * (v_[b, t, h] - S.T @ k_[b, t, head]) if rule.delta else v_[b, t, h]
            S = S + np.outer(k_[b, t, head], u)
            if not rule.read_first:
                o[b, t, h] = scale * S.T @ q_[b, t, head]
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
def rule_inputs() -> Callable[..., dict[str, Tensor]]:
    """rule_inputs(rule, B, T, H, HV, K, V, gate, seed, N): the arguments of `recurrent_rule` for the rule, by name."""
    return _rule_inputs


@pytest.fixture(scope="session")
def token_loop() -> Callable[..., tuple[Tensor, Tensor]]:
    return _token_loop


@pytest.fixture(scope="session")
def relative_error() -> Callable[[Tensor, Tensor], float]:
    return _relative_error
