from __future__ import annotations

import math

import pytest
import torch

from kda_tl.reference import beta_sigmoid, check_log_decay, gdn_gate, kda_gate, l2norm


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


FORMS = {
    "softplus": lambda x, a: -math.exp(a) * softplus(x),
    "bounded": lambda x, a: -5.0 * sigmoid(math.exp(a) * x),
    "bounded without A_log": lambda x, a: -5.0 * sigmoid(x),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flat_bias", [True, False])
def test_gate_forms_against_scalar_formulas(form: str, flat_bias: bool) -> None:
    torch.manual_seed(0)
    B, T, HV, K = 2, 3, 4, 5
    g = 30.0 * torch.randn(B, T, HV, K, dtype=torch.float64)
    A_log, dt_bias = torch.randn(HV, dtype=torch.float64), torch.randn(HV, K, dtype=torch.float64)
    out = kda_gate(
        g,
        A_log=None if form == "bounded without A_log" else A_log,
        dt_bias=dt_bias.flatten() if flat_bias else dt_bias,
        lower_bound=None if form == "softplus" else -5.0,
    )
    for b, t, h, c in torch.cartesian_prod(*(torch.arange(n) for n in g.shape)).tolist():
        x = float(g[b, t, h, c] + dt_bias[h, c])
        assert float(out[b, t, h, c]) == pytest.approx(FORMS[form](x, float(A_log[h])), rel=1e-12, abs=0)


def test_gate_of_the_bounded_example() -> None:
    # A clamped softplus would give -0.693.
    zero = torch.zeros(1, 1, 1, 1)
    out = kda_gate(zero, A_log=torch.zeros(1), dt_bias=torch.zeros(1), lower_bound=-5.0)
    assert out.item() == -2.5
    assert kda_gate(zero, A_log=torch.zeros(1), dt_bias=torch.zeros(1)).item() == pytest.approx(-math.log(2.0))
    assert kda_gate(zero, lower_bound=-5.0).item() == -2.5


def test_gate_without_bias_is_the_gate_with_zero_bias() -> None:
    g, A_log = torch.randn(1, 7, 2, 3, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    assert torch.equal(kda_gate(g, A_log), kda_gate(g, A_log, torch.zeros(6)))


def test_gate_softplus_has_no_linear_branch() -> None:
    # softplus(25) - 25 = 1.4e-11 is what a threshold at 20 drops.
    g = torch.tensor([25.0, 800.0, -800.0], dtype=torch.float64).reshape(1, 1, 1, 3)
    out = kda_gate(g, A_log=torch.zeros(1, dtype=torch.float64)).flatten()
    assert -float(out[0]) - 25.0 == pytest.approx(math.log1p(math.exp(-25.0)), rel=1e-3)
    assert out[1] == -800.0 and out[2] == 0.0


@pytest.mark.parametrize("A_log", [79.5, 85.0, 88.0])
def test_a_rate_that_float32_holds_is_exact(A_log: float) -> None:
    """Where it is large enough to matter, softplus(x) is e^x, or x is tiny in the sigmoid."""
    x = [-A_log - 2.0, -A_log, -A_log + 2.0, 1e-37, 1e-36, 1.0]
    g, rate = torch.tensor(x, dtype=torch.float64), torch.tensor([A_log], dtype=torch.float64)
    for form, bound in (("softplus", None), ("bounded", -5.0)):
        out = kda_gate(g.reshape(1, 6, 1, 1), rate, lower_bound=bound).flatten().tolist()
        assert out == pytest.approx([FORMS[form](value, A_log) for value in x], rel=1e-12, abs=0)
    assert gdn_gate(g.reshape(1, 6, 1), rate).flatten().tolist() == pytest.approx(
        [FORMS["softplus"](value, A_log) for value in x], rel=1e-12, abs=0
    )


def test_a_rate_beyond_float32_is_held_in_every_dtype() -> None:
    g = torch.tensor([-90.0, 0.0, 1.0]).reshape(1, 3, 1, 1)
    for dtype in (torch.float32, torch.float64):
        held, beyond = (kda_gate(g.to(dtype), torch.tensor([A_log], dtype=dtype)) for A_log in (88.0, 200.0))
        assert torch.equal(held, beyond) and beyond.isfinite().all()


def test_gate_needs_a_form() -> None:
    g = torch.zeros(1, 1, 2, 3)
    with pytest.raises(ValueError, match="A_log, lower_bound"):
        kda_gate(g)
    with pytest.raises(ValueError, match="A_log, lower_bound"):
        kda_gate(g, dt_bias=torch.zeros(6))


@pytest.mark.parametrize("bound", [0.0, 5.0, math.nan, -math.inf])
def test_gate_refuses_a_bound_that_is_not_finite_and_negative(bound: float) -> None:
    with pytest.raises(ValueError, match="lower_bound"):
        kda_gate(torch.zeros(1, 1, 2, 3), lower_bound=bound)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("A_log", {"A_log": torch.zeros(3)}),
        ("A_log", {"A_log": torch.zeros(2, 1)}),
        ("dt_bias", {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}),
        ("dt_bias", {"A_log": torch.zeros(2), "dt_bias": torch.zeros(3, 2)}),
        ("g", {"g": torch.zeros(1, 1, 2), "lower_bound": -5.0}),
    ],
)
def test_gate_names_the_argument_of_a_wrong_shape(name: str, arguments: dict) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        kda_gate(**{"g": torch.zeros(1, 1, 2, 3), **arguments})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gate_gradients_are_finite_at_saturation(dtype: torch.dtype) -> None:
    # The derivative 0 of the sigmoid meets exp(100), an infinity in float32.
    g = torch.tensor([-1.0, 1.0], dtype=dtype).reshape(1, 2, 1, 1).requires_grad_()
    A_log = torch.tensor([100.0], dtype=dtype, requires_grad=True)
    dt_bias = torch.zeros(1, dtype=dtype, requires_grad=True)
    out = kda_gate(g, A_log, dt_bias, lower_bound=-5.0)
    assert out.flatten().tolist() == pytest.approx([0.0, -5.0])
    out.sum().backward()
    for x in (g, A_log, dt_bias):
        assert x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("A_log", [-100.0, 0.0, 80.0, 100.0, 1e4])
def test_gates_and_their_gradients_are_finite_for_any_rate(A_log: float) -> None:
    for lower_bound in (None, -5.0):
        g = torch.tensor([-800.0, -1.0, 0.0, 1.0, 800.0]).reshape(1, 5, 1, 1).requires_grad_()
        rate, dt_bias = torch.tensor([A_log], requires_grad=True), torch.zeros(1, requires_grad=True)
        out = kda_gate(g, rate, dt_bias, lower_bound)
        assert (out <= 0).all() and (out.isfinite() | (A_log > 80) & (g == 800) & (lower_bound is None)).all()
        out.exp().sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in (g, rate, dt_bias))


@pytest.mark.parametrize("with_bias", [True, False])
def test_gdn_gate_against_the_scalar_formula(with_bias: bool) -> None:
    torch.manual_seed(0)
    g = 30.0 * torch.randn(2, 5, 3, dtype=torch.float64)
    A_log, dt_bias = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    out = gdn_gate(g, A_log, dt_bias if with_bias else None)
    for b, t, h in torch.cartesian_prod(*(torch.arange(n) for n in g.shape)).tolist():
        x = float(g[b, t, h]) + (float(dt_bias[h]) if with_bias else 0.0)
        assert float(out[b, t, h]) == pytest.approx(FORMS["softplus"](x, float(A_log[h])), rel=1e-12, abs=0)
    as_kda = kda_gate(g.unsqueeze(-1), A_log, dt_bias if with_bias else None)
    assert torch.equal(out, as_kda.squeeze(-1))


def test_gdn_gate_gradients_and_dtypes() -> None:
    torch.manual_seed(0)
    arguments = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 3, 2), (2,), (2,))]
    assert torch.autograd.gradcheck(gdn_gate, arguments)
    assert gdn_gate(torch.zeros(1, 1, 2, dtype=torch.bfloat16), torch.zeros(2)).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "change"),
    [("g", {"g": torch.zeros(1, 1, 2, 3)}), ("A_log", {"A_log": torch.zeros(3)}), ("dt_bias", {"dt_bias": torch.zeros(2, 3)})],
)
def test_gdn_gate_names_the_argument_of_a_wrong_shape(name: str, change: dict) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        gdn_gate(**{"g": torch.zeros(1, 1, 2), "A_log": torch.zeros(2), **change})


def test_decay_in_place_of_its_logarithm_is_found() -> None:
    g = -torch.rand(1, 9, 2, 4)
    for fine in (g, torch.zeros(3), torch.tensor([-torch.inf, torch.nan, -0.0]), torch.zeros(0)):
        check_log_decay(fine)
    for wrong in (g.exp(), g.abs(), torch.tensor([-1.0, 1e-3]), torch.tensor([torch.nan, torch.inf])):
        with pytest.raises(ValueError, match=r"^g must hold natural-log decays <= 0"):
            check_log_decay(wrong)


def test_gate_gradients() -> None:
    torch.manual_seed(0)
    arguments = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 3, 2, 2), (2,), (4,))]
    assert torch.autograd.gradcheck(kda_gate, arguments)
    assert torch.autograd.gradcheck(lambda *x: kda_gate(*x, lower_bound=-5.0), arguments)


def test_l2norm_formula_zero_rows_and_gradient() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]], dtype=torch.float64, requires_grad=True)
    out = l2norm(x)
    expected = [[3 / math.sqrt(25 + 1e-6), 4 / math.sqrt(25 + 1e-6)], [0.0, 0.0], [math.sqrt(0.5), 0.0]]
    assert torch.allclose(out, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    out.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert l2norm(torch.full((2,), 2.0), eps=1.0).tolist() == pytest.approx([2.0 / 3.0] * 2)


def test_beta_sigmoid() -> None:
    logits = torch.tensor([-40.0, 0.0, 0.5, 40.0], dtype=torch.float64)
    expected = torch.tensor([sigmoid(x) for x in logits.tolist()], dtype=torch.float64)
    assert torch.allclose(beta_sigmoid(logits), expected, rtol=1e-14, atol=0)
    assert torch.equal(beta_sigmoid(logits, allow_neg_eigval=True), 2.0 * beta_sigmoid(logits))


def test_half_precision_inputs_are_not_rounded_on_the_way() -> None:
    logit = torch.tensor([0.5], dtype=torch.bfloat16)
    assert beta_sigmoid(logit).item() == pytest.approx(0.62245935, abs=1e-7)  # 0.62109375 if rounded
    for x in (l2norm(logit), kda_gate(logit.reshape(1, 1, 1, 1), lower_bound=-5.0)):
        assert x.dtype == torch.float32
    assert kda_gate(logit.reshape(1, 1, 1, 1), torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
