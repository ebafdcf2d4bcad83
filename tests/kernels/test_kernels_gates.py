"""The gate macros against float64, over the whole range of float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kda_tl.specs.gates import BetaForm, GateForm, gate_form

pytestmark = pytest.mark.tilelang

EDGES = [0.0, -0.0, 1e-30, -1e-30, 1e-6, -1e-6, 87.0, -87.0, 88.8, 104.0, -104.0, 3e38, -3e38, math.inf, -math.inf, math.nan]
X = torch.cat([torch.linspace(-80, 80, 20001), torch.logspace(-8, 2, 1000), -torch.logspace(-8, 1.9, 1000)])


@pytest.fixture
def gates(compile_cpu):
    from gate_program import gate_program

    kernel = compile_cpu("gates", gate_program("cpu"))

    def run(x: Tensor, form: int = 0, beta_form: int = 0, A_log: float = 0.0, lower_bound: float = -5.0) -> list[Tensor]:
        out = [torch.full_like(x, torch.nan) for _ in range(3)]
        kernel(x, *out, int(form), int(beta_form), A_log, lower_bound)
        return out

    return run


def truth(x: Tensor, form: GateForm, A_log: float, lower_bound: float) -> Tensor:
    x, rate = x.double(), math.exp(A_log)
    if form == GateForm.IDENTITY:
        return x
    if form == GateForm.SOFTPLUS:
        return -rate * torch.logaddexp(x, torch.zeros_like(x))
    return lower_bound * torch.sigmoid(x if form == GateForm.BOUNDED_UNSCALED else rate * x)


@pytest.mark.parametrize("A_log", [-3.0, 0.0, 2.75])
@pytest.mark.parametrize("form", GateForm)
def test_decay_in_relative_terms(gates, form: GateForm, A_log: float) -> None:
    rate = math.exp(A_log) if form == GateForm.BOUNDED else 1.0
    # A sigmoid inherits the rounding of its argument, absolutely.
    x = X[(X * rate).abs() < 80]
    found, want = gates(x, form, A_log=A_log)[0].double(), truth(x, form, float(torch.tensor(A_log)), -5.0)
    allowed = 4e-7 * want.abs() * (1 + 0.3 * (rate * x.double()).abs() * (form == GateForm.BOUNDED))
    assert (found - want).abs().le(allowed + 1e-37).all()


@pytest.mark.parametrize("A_log", [-80.0, 0.0, 3.0, 88.0, 100.0])
@pytest.mark.parametrize("form", GateForm)
def test_decay_at_the_edges(gates, form: GateForm, A_log: float) -> None:
    x = torch.tensor(EDGES)
    if A_log == 100.0:  # a rate beyond float32 is held at e^88: moderate arguments go to their limits, and 0 has none
        x = x[(x.abs() > 1e-20) & ((x > 0) | (form == GateForm.BOUNDED)) | x.isnan() | (x == 0)]
    found, want = gates(x, form, A_log=A_log)[0].double(), truth(x, form, A_log, -5.0)
    if form == GateForm.SOFTPLUS and A_log == 100.0:
        found, want = found.exp(), want.exp()
    want = torch.where(want < -3.4e38, -torch.inf, want)
    underflow = 1.2e-38 * math.exp(min(A_log, 88.0))  # of a softplus, times the rate
    torch.testing.assert_close(found, want, rtol=2e-6, atol=max(underflow, 1e-37), equal_nan=True)


def test_a_rate_is_held_where_the_reference_holds_it() -> None:
    from kda_tl.kernels.tiles.gates import LARGEST_EXPONENT
    from kda_tl.reference import gates

    assert LARGEST_EXPONENT == gates.LARGEST_EXPONENT


def test_known_values(gates) -> None:
    """A bounded gate is no clamped softplus, and sigmoid(0.5) no bfloat16."""
    zero = torch.zeros(1)
    assert gates(zero, GateForm.BOUNDED)[0].item() == gates(zero, GateForm.BOUNDED_UNSCALED)[0].item() == -2.5
    assert gates(zero, GateForm.SOFTPLUS)[0].item() == pytest.approx(-math.log(2), rel=1e-7)
    assert gates(torch.full((1,), 0.5), beta_form=BetaForm.SIGMOID)[1].item() == pytest.approx(0.62245935, rel=1e-7)


@pytest.mark.parametrize("form", BetaForm)
def test_write_strength(gates, form: BetaForm) -> None:
    x = torch.cat([X, torch.tensor(EDGES)])
    want = [x.double(), torch.sigmoid(x.double()), 2 * torch.sigmoid(x.double())][form]
    torch.testing.assert_close(gates(x, beta_form=form)[1].double(), want, rtol=4e-7, atol=1e-37, equal_nan=True)


def test_inverse_norm(gates) -> None:
    x = torch.cat([X.abs(), torch.tensor([0.0, 1e-12, 1e30, math.inf, math.nan])])
    torch.testing.assert_close(gates(x)[2].double(), (x.double() + 1e-6).rsqrt(), rtol=3e-7, atol=0, equal_nan=True)


def test_the_form_that_arguments_name() -> None:
    assert gate_form(False, True, -5.0) == GateForm.IDENTITY
    assert gate_form(True, True, None) == GateForm.SOFTPLUS
    assert gate_form(True, True, -5.0) == GateForm.BOUNDED
    assert gate_form(True, False, -5.0) == GateForm.BOUNDED_UNSCALED
    with pytest.raises(ValueError, match="A_log, lower_bound or both"):
        gate_form(True, False, None)
