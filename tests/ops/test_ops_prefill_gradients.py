"""Every prefill op gives every input its gradient, against autograd through the token recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from rule_inputs import OPS, call, inputs, truth

import kda_tl
from kda_tl.reference import beta_sigmoid, gdn_gate, kda_gate, l2norm

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, leaf in expected.items():
        gradient = found[name].grad
        assert gradient is not None and gradient.shape == leaf.shape and gradient.dtype == found[name].dtype, name
        assert leaf.grad is not None and gradient.isfinite().all(), name
        assert (gradient.double() - leaf.grad).norm() <= 1e-5 * leaf.grad.norm(), name


@pytest.mark.parametrize("rule", OPS)
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_every_input(rule: str, packed: bool) -> None:
    x = inputs(rule, 80, B=1, H=2, HV=2 if rule == "rwkv6" else 4, N=3 if packed else None)
    pack = torch.tensor([0, 66, 66, 75]) if packed else None
    found = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
    o, state = call(rule, found, cu_seqlens=pack, output_final_state=True)
    (o.sin().sum() + state.sin().sum()).backward()
    expected = {name: tensor.double().requires_grad_() for name, tensor in x.items()}
    o_true, state_true = truth(rule, expected, cu_seqlens=pack)
    (o_true.sin().sum() + state_true.sin().sum()).backward()
    close(found, expected)
    if packed:
        assert not any(found[name].grad[:, 75:].any() for name in x.keys() - {"initial_state", "bonus"})


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_gradients_through_norm_gate_and_sigmoid(rule: str) -> None:
    x = inputs(rule, 70, H=1, HV=2)
    x["A_log"], x["dt_bias"] = torch.tensor([-0.5, 0.5]), torch.linspace(-1.0, 1.0, 128 if rule == "kda" else 2)
    found = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
    o, state = call(
        rule, found, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    (o.sin().sum() + state.sin().sum()).backward()
    expected = {name: tensor.double().requires_grad_() for name, tensor in x.items()}
    q, k, v, g, beta, S, A_log, dt_bias = expected.values()
    gate = kda_gate if rule == "kda" else gdn_gate
    plain = {"q": l2norm(q), "k": l2norm(k), "v": v, "g": gate(g, A_log, dt_bias), "beta": beta_sigmoid(beta)}
    o_true, state_true = truth(rule, {**plain, "initial_state": S})
    (o_true.sin().sum() + state_true.sin().sum()).backward()
    close(found, expected)


@pytest.mark.parametrize("rule", OPS)
def test_any_single_input_may_be_the_one_that_needs_it(rule: str) -> None:
    x = inputs(rule, 10)
    for name in x:
        leaf = x[name].clone().requires_grad_()
        for tensor in (leaf, leaf * 1.0):
            o, _ = call(rule, {**x, name: tensor})
            assert o.requires_grad
        o.sum().backward()
        assert leaf.grad is not None and leaf.grad.any()
    with torch.no_grad():
        assert not call(rule, {**x, "q": x["q"].clone().requires_grad_()})[0].requires_grad


def test_a_compiled_step_has_the_same_gradients() -> None:
    x, gradients = inputs("gdn", 70, H=1, HV=2), []

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        o, state = kda_tl.chunk_gdn(*tensors[:5], initial_state=tensors[5], output_final_state=True)
        return o.sin().sum() + state.sin().sum()

    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = [x[name].clone().requires_grad_() for name in ("q", "k", "v", "g", "beta", "initial_state")]
        function(*leaves).backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
