"""Forms of the decay gate and of beta that kernels evaluate: run-time integers, the same for a whole launch."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["BetaForm", "GateForm", "gate_form"]


class GateForm(IntEnum):
    """What turns g into the natural-log decay (<= 0). x = g + dt_bias, where dt_bias is given."""

    IDENTITY = 0
    """g itself; dt_bias is not read."""
    SOFTPLUS = 1
    """-exp(A_log) * softplus(x), unbounded below."""
    BOUNDED = 2
    """lower_bound * sigmoid(exp(A_log) * x)."""
    BOUNDED_UNSCALED = 3
    """lower_bound * sigmoid(x); A_log is not read."""


class BetaForm(IntEnum):
    """What turns beta into the write strength, in float32."""

    IDENTITY = 0
    SIGMOID = 1
    TWICE_SIGMOID = 2
    """Lets the transition along a unit key reach the eigenvalue -1."""


def gate_form(use_gate: bool, has_A_log: bool, lower_bound: float | None) -> GateForm:
    """The form that an op's arguments name. Raises ValueError where a raw gate has neither A_log nor lower_bound."""
    if not use_gate:
        return GateForm.IDENTITY
    if lower_bound is None:
        if not has_A_log:
            raise ValueError("use_gate_in_kernel=True needs A_log, lower_bound or both: with neither the gate has no scale")
        return GateForm.SOFTPLUS
    return GateForm.BOUNDED if has_A_log else GateForm.BOUNDED_UNSCALED
