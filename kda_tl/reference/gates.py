"""What is applied to raw inputs before the recurrence: l2 norm, decay gate and sigmoid of beta.

All functions compute and return in the promoted dtype of their arguments, float32 at the least: a half-precision gate,
norm or beta would be rounded before it reaches the state, and the state keeps that error.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

LARGEST_EXPONENT = 88.0  # exp of it is finite in float32


def _promoted(*tensors: Tensor) -> list[Tensor]:
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
    return [x.to(dtype) for x in tensors]


def _rate(A_log: Tensor) -> Tensor:
    """exp(A_log), with A_log held at 88, in float64 as well: there the kernels hold it, since float32 ends at e^88.7. An
    infinite rate would meet zeros, in the gate at x = 0 and in its gradient where the sigmoid saturates."""
    return A_log.clamp(max=LARGEST_EXPONENT).exp()


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dim; x [..., K]. A zero row stays zero, with a finite gradient.

    eps is inside the root, so that a unit row comes out shorter than 1 by about eps / 2.
    """
    (x,) = _promoted(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def kda_gate(g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None) -> Tensor:
    """Natural-log decay (<= 0) of KDA from the raw gate input.

    g [B, T, HV, K]; A_log [HV]; dt_bias [HV * K] or [HV, K], zero if left out; returns [B, T, HV, K]. Three forms:

    - A_log only:                -exp(A_log) * softplus(g + dt_bias), unbounded below;
    - A_log and lower_bound:     lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), between lower_bound and 0;
    - lower_bound only:          lower_bound * sigmoid(g + dt_bias).

    The softplus is exact, log(1 + e^x), with no linear branch for large x.
    Raises ValueError where neither A_log nor lower_bound is given, lower_bound is not below 0 and finite, or a shape is
    wrong.
    Source: Kimi Linear, arXiv 2510.26692 (softplus form); the bounded forms follow flash-linear-attention's safe gate.
    """
    if A_log is None and lower_bound is None:
        raise ValueError("kda_gate needs A_log, lower_bound or both: with neither the gate has no scale")
    if lower_bound is not None and not (lower_bound < 0 and math.isfinite(lower_bound)):
        raise ValueError(f"lower_bound must be finite and below 0 (a natural-log decay per token), got {lower_bound}")
    if g.dim() != 4:
        raise ValueError(f"g must be [B, T, HV, K], got {tuple(g.shape)}")
    HV, K = g.shape[2:]
    if A_log is not None and A_log.shape != (HV,):
        raise ValueError(f"A_log must be [HV] = {(HV,)}, got {tuple(A_log.shape)}")
    if dt_bias is not None and dt_bias.shape not in ((HV * K,), (HV, K)):
        raise ValueError(f"dt_bias must be [HV * K] = {(HV * K,)} or [HV, K] = {(HV, K)}, got {tuple(dt_bias.shape)}")

    x, *parameters = _promoted(*(p for p in (g, A_log, dt_bias) if p is not None))
    if dt_bias is not None:
        x = x + parameters.pop().reshape(HV, K)
    rate = _rate(parameters.pop()).unsqueeze(-1) if A_log is not None else None
    if lower_bound is None:
        assert rate is not None
        return -rate * _softplus(x)
    return lower_bound * torch.sigmoid(x if rate is None else rate * x)


def gdn_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """Natural-log decay (<= 0) of GDN from the raw gate input: -exp(A_log) * softplus(g + dt_bias).

    g [B, T, HV]; A_log [HV]; dt_bias [HV], zero if left out; returns [B, T, HV]. The softplus is exact.
    Raises ValueError for a wrong shape.
    Source: Gated Delta Networks, arXiv 2412.06464, after Mamba-2.
    """
    if g.dim() != 3:
        raise ValueError(f"g must be [B, T, HV], got {tuple(g.shape)}")
    for name, parameter in {"A_log": A_log, "dt_bias": dt_bias}.items():
        if parameter is not None and parameter.shape != g.shape[2:]:
            raise ValueError(f"{name} must be [HV] = {tuple(g.shape[2:])}, got {tuple(parameter.shape)}")
    x, A_log, *bias = _promoted(*(p for p in (g, A_log, dt_bias) if p is not None))
    return -_rate(A_log) * _softplus(x + bias[0] if bias else x)


def check_log_decay(g: Tensor) -> None:
    """Raises ValueError where g holds what is no natural-log decay: a value above 0, as exp(g) in place of g would be.

    NaN passes: it is for the caller to see. Reads every value, so on a GPU it waits for the device.
    """
    if g.numel() and bool((g > 0).any()):
        above = int((g > 0).sum())
        raise ValueError(
            f"g must hold natural-log decays <= 0 (exp(g) is the decay), got {above} of {g.numel()} values above 0, "
            f"the largest {float(g.nan_to_num(nan=0.0).max())}"
        )


def beta_sigmoid(beta: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """Write strength from its logit, any shape: sigmoid(beta) in (0, 1), or 2 sigmoid(beta) in (0, 2).

    With a unit key the token's transition I - beta k k^T has the eigenvalue 1 - beta along k; `allow_neg_eigval` lets
    it reach -1.
    """
    (beta,) = _promoted(beta)
    return 2.0 * beta.sigmoid() if allow_neg_eigval else beta.sigmoid()
