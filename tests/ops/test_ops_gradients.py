"""Gradients by recomputation, against autograd through the token recurrence in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from kda_tl.ops import gradients
from kda_tl.ops.gradients import DIFFERENTIABLE, Recomputation, differentiable, needs_gradient, recompute_gradients
from kda_tl.reference import beta_sigmoid, chunk_rule, gdn_gate, kda_gate, l2norm, recurrent_rule
from kda_tl.specs.rules import RULES

NAMES = sorted(RULES)
BF16_EPS = 2.0**-8


def make(
    name: str, B: int, T: int, H: int, HV: int, K: int, V: int, N: int | None = None, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Inputs of a rule: unit q and k, decays between exp(-1) and 1, beta in [0, 2)."""
    random, rule = torch.Generator().manual_seed(0), RULES[name]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, dtype=torch.float64)

    x = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    x["q"], x["k"] = (torch.nn.functional.normalize(x[key], dim=-1) for key in ("q", "k"))
    if rule.decay != "none":
        x["g"] = -uniform(B, T, HV, K) if rule.decay == "per_key" else -uniform(B, T, HV)
    if rule.delta:
        x["beta"] = 2.0 * uniform(B, T, HV)
    if rule.read_first:
        x["bonus"] = normal(H, K)
    x["initial_state"] = normal(B if N is None else N, HV, K, V)
    return {key: tensor.to(dtype) for key, tensor in x.items()}


def activated(x: Mapping[str, Any], options: Recomputation) -> dict[str, Any]:
    """The arguments of a reference form after norm, gate and sigmoid."""
    x = dict(x)
    A_log, dt_bias = x.pop("A_log", None), x.pop("dt_bias", None)
    used = x.pop("has_initial_state", None)
    if used is not None:
        x["initial_state"] = x["initial_state"].masked_fill(~used[:, None, None, None], 0.0)
    if options.use_qk_l2norm_in_kernel:
        x["q"], x["k"] = l2norm(x["q"]), l2norm(x["k"])
    if options.use_gate_in_kernel and options.rule.decay == "per_key":
        x["g"] = kda_gate(x["g"], A_log, dt_bias, options.lower_bound)
    elif options.use_gate_in_kernel:
        x["g"] = gdn_gate(x["g"], A_log, dt_bias)
    if options.use_beta_sigmoid_in_kernel:
        x["beta"] = beta_sigmoid(x["beta"], options.allow_neg_eigval)
    x.pop("cu_seqlens_cpu", None)
    return {**x, "scale": options.scale, "state_v_first": options.state_v_first, **options.rule.as_dict()}


def launcher(options: Recomputation, dtype: torch.dtype = torch.float64, final_state: bool = True) -> Callable[..., Any]:
    """Stands for the kernels: the recurrence, without gradients, on new tensors."""

    def launch(**tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        assert not torch.is_grad_enabled()
        o, state = recurrent_rule(**activated(tensors, options), dtype=dtype)
        return o.to(tensors["v"].dtype), state if final_state else None

    return launch


def loss(o: Tensor, state: Tensor | None) -> Tensor:
    return o.double().sin().sum() + (0.0 if state is None else state.double().sin().sum())


def truth(x: Mapping[str, Tensor], options: Recomputation, final_state: bool = True, **fixed: Any) -> dict[str, Tensor]:
    """Gradients of `loss` by autograd through the recurrence in float64."""
    leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in x.items()}
    o, state = recurrent_rule(**activated({**leaves, **fixed}, options))
    loss(o, state if final_state else None).backward()
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def recomputed(
    x: Mapping[str, Tensor], options: Recomputation, final_state: bool = True, dtype: torch.dtype = torch.float64, **fixed: Any
) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in x.items()}
    o, state = differentiable(launcher(options, dtype, final_state), {**leaves, **fixed}, options)
    loss(o, state).backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape, name
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def error(x: Tensor, expected: Tensor) -> float:
    """||x - expected|| / ||expected||, where less than 1e-30 in all counts as zero; infinite where x is not finite."""
    if x.shape != expected.shape or not x.isfinite().all():
        return float("inf")
    return float((x.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces and batches, of sizes that tests can afford."""
    monkeypatch.setattr(gradients, "CHUNK_SIZE", 8)
    monkeypatch.setattr(gradients, "SHORT_CHUNK_SIZE", 4)
    monkeypatch.setattr(gradients, "CHUNKS_PER_PIECE", 2)
    monkeypatch.setattr(gradients, "PIECE_ELEMENTS", 1000)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("final_state", [True, False])
@pytest.mark.parametrize("state_v_first", [True, False])
def test_dense(name: str, final_state: bool, state_v_first: bool, small_pieces: None) -> None:
    x = make(name, 2, 45, 2, 4, 8, 6)
    if state_v_first:
        x["initial_state"] = x["initial_state"].transpose(-1, -2)
    options = Recomputation(RULES[name], scale=0.7, state_v_first=state_v_first)
    expected, found = truth(x, options, final_state), recomputed(x, options, final_state)
    for key, gradient in expected.items():
        assert error(found[key], gradient) < 1e-11, key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cu_seqlens", [[0, 40, 40, 41, 44], [0, 0, 17, 17, 50], [0, 1, 2, 3, 4], [0, 8, 16, 32, 49]])
def test_packed(name: str, cu_seqlens: list[int], small_pieces: None) -> None:
    x = make(name, 1, 50, 1, 2, 8, 6, N=4)
    for key in ("q", "k", "v", "g", "beta"):
        if key in x:
            x[key][:, cu_seqlens[-1] :] = torch.nan
    options, pack = Recomputation(RULES[name]), torch.tensor(cu_seqlens, dtype=torch.int32)
    expected = truth(x, options, cu_seqlens=pack)
    for known in ({}, {"cu_seqlens_cpu": pack.clone()}):
        found = recomputed(x, options, cu_seqlens=pack, **known)
        for key, gradient in expected.items():
            assert error(found[key], gradient) < 1e-11, key
            if key not in ("bonus", "initial_state"):
                assert not found[key][:, cu_seqlens[-1] :].any(), key


@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_pieces_of_the_shipped_size(name: str) -> None:
    x = make(name, 1, 2200, 1, 2, 16, 16, N=3)
    options, pack = Recomputation(RULES[name]), torch.tensor([0, 1500, 1510, 2200])
    expected, found = truth(x, options, cu_seqlens=pack), recomputed(x, options, cu_seqlens=pack)
    for key, gradient in expected.items():
        assert error(found[key], gradient) < 1e-10, key


ACTIVATED = {
    "kda softplus": ("kda", {"A_log", "dt_bias"}, None),
    "kda bounded": ("kda", {"A_log", "dt_bias"}, -5.0),
    "kda bounded without A_log": ("kda", {"dt_bias"}, -5.0),
    "kda without bias": ("kda", {"A_log"}, None),
    "gdn": ("gdn", {"A_log", "dt_bias"}, None),
}


@pytest.mark.parametrize("case", ACTIVATED)
@pytest.mark.parametrize("flat_bias", [True, False])
def test_norm_gate_and_sigmoid(case: str, flat_bias: bool, small_pieces: None) -> None:
    name, parameters, lower_bound = ACTIVATED[case]
    x = make(name, 2, 30, 2, 4, 8, 6)
    x["q"], x["k"], x["g"], x["beta"] = 3.0 * x["q"], 0.2 * x["k"], 8.0 * x["g"] + 4.0, 4.0 * x["beta"] - 4.0
    if "A_log" in parameters:
        x["A_log"] = torch.linspace(-1.0, 1.0, 4, dtype=torch.float64)
    if "dt_bias" in parameters:
        x["dt_bias"] = torch.randn(4, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        x["dt_bias"] = x["dt_bias"][:, 0] if name == "gdn" else x["dt_bias"].flatten() if flat_bias else x["dt_bias"]
    options = Recomputation(
        RULES[name], lower_bound=lower_bound, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
    )  # fmt: skip
    expected, found = truth(x, options), recomputed(x, options)
    for key, gradient in expected.items():
        assert error(found[key], gradient) < 1e-11, key


@pytest.mark.parametrize("name", ["kda", "gdn", "rwkv6"])
def test_finite_differences(name: str, small_pieces: None) -> None:
    x = {key: tensor.requires_grad_() for key, tensor in make(name, 1, 20, 1, 2, 3, 2, N=3).items()}
    options, pack = Recomputation(RULES[name]), torch.tensor([0, 17, 17, 19])

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        return differentiable(launcher(options), {**dict(zip(x, tensors)), "cu_seqlens": pack}, options)

    assert torch.autograd.gradcheck(run, tuple(x.values()), fast_mode=True)


def test_states_that_are_not_used_get_no_gradient(small_pieces: None) -> None:
    x = make("kda", 3, 20, 1, 2, 4, 4)
    x["initial_state"][1] = torch.nan
    options, used = Recomputation(RULES["kda"]), torch.tensor([True, False, True])
    expected, found = truth(x, options, has_initial_state=used), recomputed(x, options, has_initial_state=used)
    assert not found["initial_state"][1].any() and found["initial_state"][0].any()
    for key, gradient in expected.items():
        assert error(found[key], gradient) < 1e-11, key


@pytest.mark.parametrize("wanted", [["q"], ["beta"], ["g", "v"], ["initial_state"]])
def test_only_what_is_asked_for(wanted: list[str], small_pieces: None) -> None:
    x = make("kda", 1, 40, 1, 2, 8, 6)
    options = Recomputation(RULES["kda"])
    leaves = {key: tensor.clone().requires_grad_(key in wanted) for key, tensor in x.items()}
    o, state = differentiable(launcher(options), leaves, options)
    loss(o, state).backward()
    expected = truth(x, options)
    for key, leaf in leaves.items():
        assert (leaf.grad is None) == (key not in wanted)
        assert leaf.grad is None or error(leaf.grad, expected[key]) < 1e-11


@pytest.mark.parametrize("only", [0, 1])
def test_one_of_the_two_outputs_alone(only: int, small_pieces: None) -> None:
    x = make("kda", 1, 40, 1, 2, 8, 6)
    options = Recomputation(RULES["kda"])
    found, expected = ({key: tensor.clone().requires_grad_() for key, tensor in x.items()} for _ in range(2))
    differentiable(launcher(options), found, options)[only].sin().sum().backward()  # type: ignore[union-attr]
    recurrent_rule(**activated(expected, options))[only].sin().sum().backward()
    for key, leaf in expected.items():
        gradient = found[key].grad
        assert gradient is not None and (leaf.grad is None or error(gradient, leaf.grad) < 1e-11)
        assert leaf.grad is not None or not gradient.any()  # q, which the final state does not depend on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_get_gradients_of_their_dtype(dtype: torch.dtype) -> None:
    x = make("kda", 1, 150, 1, 2, 16, 16, dtype=dtype)
    x["g"], x["initial_state"] = x["g"].float(), x["initial_state"].float()
    options = Recomputation(RULES["kda"], use_qk_l2norm_in_kernel=True)
    expected, found = truth(x, options), recomputed(x, options, dtype=torch.float32)
    for key, gradient in expected.items():
        # What the loss adds: its cosine is taken of an output that was rounded to `dtype`.
        limit = 1e-5 if dtype == torch.float32 else 2 * BF16_EPS
        assert error(found[key], gradient) < limit, key


@pytest.mark.parametrize("name", ["kda", "gdn", "gla", "rwkv6"])
@pytest.mark.parametrize("low", [-50.0, -200.0, -1000.0, -torch.inf])
def test_strong_decays_at_the_first_row_of_a_block(name: str, low: float) -> None:
    """An exclusive cumulative decay minus a reference row can be large and positive, backward only."""
    x = make(name, 1, 64, 1, 2, 64, 64, dtype=torch.float32)
    x["g"][:, [0, 16, 32, 48]] = low
    options = Recomputation(RULES[name])
    found, expected = recomputed(x, options, dtype=torch.float32), truth(x, options)
    for key, gradient in expected.items():
        assert error(found[key], gradient) < 1e-5, key


@pytest.mark.parametrize("g", [-5.0, -60.0, 0.0])
def test_gate_gradients_of_a_constant_gate(g: float) -> None:
    """The diagonal terms of dg cancel: computed twice with opposite signs, their residue outgrows the gradient."""
    x = make("kda", 1, 128, 2, 2, 128, 128, dtype=torch.float32)
    x["g"].fill_(g)
    options = Recomputation(RULES["kda"])
    found, expected = recomputed(x, options, dtype=torch.float32), truth(x, options)
    assert error(found["g"], expected["g"]) < 0.01 * BF16_EPS


@pytest.mark.parametrize("name", ["kda", "gdn", "gla", "rwkv6"])
def test_a_first_token_has_no_gate_gradient_at_all(name: str) -> None:
    x = make(name, 1, 37, 2, 2, 16, 16, dtype=torch.float32, N=37)
    del x["initial_state"]
    options, pack = Recomputation(RULES[name]), torch.arange(38)
    found = recomputed(x, options, dtype=torch.float32, cu_seqlens=pack)
    assert torch.equal(found["g"], torch.zeros_like(x["g"])) and found["v"].any()


@pytest.mark.parametrize("A_log", [100.0, 1.0])
def test_a_saturated_bounded_gate(A_log: float) -> None:
    x = make("kda", 1, 32, 1, 2, 8, 8, dtype=torch.float32)
    x["g"] = torch.where(torch.rand(1, 32, 2, 8, generator=torch.Generator().manual_seed(0)) < 0.5, -1.0, 1.0)
    x["A_log"], x["dt_bias"] = torch.full((2,), A_log), torch.zeros(16)
    options = Recomputation(RULES["kda"], lower_bound=-5.0, use_gate_in_kernel=True)
    found = recomputed(x, options, dtype=torch.float32)
    assert all(gradient.isfinite().all() for gradient in found.values())
    for key in ("g", "A_log", "dt_bias"):
        assert found[key].any() == (A_log == 1.0)


def test_a_decay_beyond_float32() -> None:
    x = make("kda", 1, 70, 1, 2, 8, 8, dtype=torch.float32)
    x["g"] = torch.where(torch.rand(1, 70, 2, 8, generator=torch.Generator().manual_seed(0)) < 0.5, -88.0, 30.0)
    x["A_log"], x["dt_bias"] = torch.full((2,), 88.0), torch.zeros(16)
    found = recomputed(x, Recomputation(RULES["kda"], use_gate_in_kernel=True), dtype=torch.float32)
    assert all(gradient.isfinite().all() for gradient in found.values()) and found["g"].any()


@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_no_gate_is_a_gate_of_zero(name: str) -> None:
    zero = make(name, 1, 128, 2, 2, 64, 64, dtype=torch.float32)
    zero["g"].zero_()
    none = {key: tensor for key, tensor in zero.items() if key != "g"}
    options = Recomputation(RULES[name])
    with_zero, without = (recomputed(x, options, dtype=torch.float32) for x in (zero, none))
    expected = truth(none, options)
    for key, gradient in expected.items():
        assert torch.equal(without[key], with_zero[key]) and error(without[key], gradient) < 1e-5, key


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(("B", "T", "pack", "N"), [(1, 0, [0, 0, 0], 2), (2, 0, None, 2), (0, 4, None, 0), (1, 4, [0], 0)])
def test_no_tokens(with_state: bool, B: int, T: int, pack: list[int] | None, N: int) -> None:
    x = make("kda", B, T, 1, 2, 4, 4, N=N)
    if not with_state:
        del x["initial_state"]
    fixed = {} if pack is None else {"cu_seqlens": torch.tensor(pack)}
    found = recomputed(x, Recomputation(RULES["kda"]), **fixed)
    for key, gradient in found.items():
        assert torch.equal(gradient, x[key].cos() if key == "initial_state" else torch.zeros_like(x[key])), key


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch fills fresh memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("bounds", [[0, 25, 38], [0, 16, 32]])
def test_fresh_gradient_memory_may_hold_anything(bounds: list[int], poisoned_memory: None, small_pieces: None) -> None:
    """The buffer is longer than the pack, its last length a multiple of the chunk or not; past it all gradients are zero."""
    x, options = make("kda", 1, 64, 1, 1, 4, 4, N=2), Recomputation(RULES["kda"])
    for key, gradient in recomputed(x, options, cu_seqlens=torch.tensor(bounds)).items():
        assert gradient.isfinite().all() and (key == "initial_state" or not gradient[:, bounds[-1] :].any())


@pytest.mark.parametrize("T", [17, 22, 33, 47])
def test_gradients_do_not_depend_on_the_future(T: int) -> None:
    x = make("kda", 1, T, 4, 4, 32, 32, dtype=torch.float32)
    x["g"], x["beta"] = 5.0 * x["g"], torch.ones_like(x["beta"])
    options, results = Recomputation(RULES["kda"]), []
    for last in (-0.1, -4.999):
        x["g"][:, -1] = last
        leaves = {key: tensor.clone().requires_grad_() for key, tensor in x.items()}
        o, _ = differentiable(launcher(options, torch.float32), leaves, options)
        o[:, : T - 1].sum().backward()
        results.append([leaves[key].grad[:, : T - 1] for key in ("q", "k", "v", "g", "beta")])  # type: ignore[index]
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_nan_stays_in_its_sequence_and_head(small_pieces: None) -> None:
    x, options = make("kda", 1, 60, 2, 2, 4, 4, N=3), Recomputation(RULES["kda"])
    pack = torch.tensor([0, 20, 40, 60])
    clean = recomputed(x, options, cu_seqlens=pack)
    x["v"][:, 25, 1] = torch.nan
    leaves = {key: tensor.clone().requires_grad_() for key, tensor in x.items()}
    o, state = differentiable(launcher(options), {**leaves, "cu_seqlens": pack}, options)
    loss(o, state).backward()
    other = torch.ones(60, 2, dtype=torch.bool)
    other[20:40, 1] = False
    for key in ("q", "k", "v", "g", "beta"):
        gradient = leaves[key].grad
        assert gradient is not None and torch.equal(gradient[0, other], clean[key][0, other]), key


def test_strided_inputs_and_expanded_gradients(small_pieces: None) -> None:
    x, options = make("kda", 2, 30, 2, 4, 8, 6), Recomputation(RULES["kda"])
    strided = {key: tensor.transpose(0, -1).contiguous().transpose(0, -1) for key, tensor in x.items()}
    found = []
    for inputs in (x, strided):
        leaves = {key: tensor.clone(memory_format=torch.preserve_format).requires_grad_() for key, tensor in inputs.items()}
        o, state = differentiable(launcher(options), leaves, options)
        assert state is not None
        (o.sum() + state.sum()).backward()
        found.append([leaf.grad for leaf in leaves.values()])
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*found))


def test_the_backward_of_a_step_under_autocast_stays_in_float32() -> None:
    x, options = make("kda", 1, 70, 1, 1, 16, 16, dtype=torch.float32), Recomputation(RULES["kda"])
    plain = recomputed(x, options, dtype=torch.float32)
    leaves = {key: tensor.clone().requires_grad_() for key, tensor in x.items()}
    o, state = differentiable(launcher(options, torch.float32), leaves, options)
    value = loss(o, state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value.backward()
    assert all(torch.equal(plain[key], leaf.grad) for key, leaf in leaves.items())  # type: ignore[arg-type]


def test_nothing_is_kept_but_the_inputs() -> None:
    x, options = make("kda", 1, 30, 1, 1, 4, 4), Recomputation(RULES["kda"])
    leaves = {key: tensor.requires_grad_() for key, tensor in x.items()}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        differentiable(launcher(options), leaves, options)
    assert {t.data_ptr() for t in saved} == {leaf.data_ptr() for leaf in leaves.values()}


def test_an_input_that_was_changed_since_is_an_error() -> None:
    x, options = make("kda", 1, 5, 1, 1, 4, 4), Recomputation(RULES["kda"])
    x["q"].requires_grad_()
    o, _ = differentiable(launcher(options), x, options)
    x["k"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("loss", [torch.sum, lambda o: o.sin().sum()], ids=["linear", "sine"])
def test_a_second_derivative_is_refused(name: str, loss: Callable[[Tensor], Tensor]) -> None:
    """Also where the gradient of o is a constant: that of the input depends on the input all the same."""
    x, options = make("kda", 1, 5, 1, 1, 4, 4), Recomputation(RULES["kda"])
    x[name].requires_grad_()
    o, _ = differentiable(launcher(options), x, options)
    (first,) = torch.autograd.grad(loss(o), x[name], create_graph=True)
    (plain,) = torch.autograd.grad(loss(differentiable(launcher(options), x, options)[0]), x[name])
    assert torch.equal(first, plain)
    with pytest.raises(NotImplementedError, match="no derivatives of their own"):
        (o.sum() + first.pow(2).sum()).backward()


def test_create_graph_alone_does_no_harm() -> None:
    """Under a checkpoint, which unpacks what is saved once; and a gradient may be changed in place."""
    x, options = make("kda", 1, 5, 1, 1, 4, 4), Recomputation(RULES["kda"])
    q = x["q"].requires_grad_()

    def forward(q: Tensor) -> Tensor:
        return differentiable(launcher(options), {**x, "q": q}, options)[0]

    (expected,) = torch.autograd.grad(forward(q).sum(), q)
    o = torch.utils.checkpoint.checkpoint(forward, q, use_reentrant=False)
    (found,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    assert torch.equal(found, expected)
    assert torch.equal(found.mul_(2), 2 * expected)
    with pytest.raises(NotImplementedError, match="no derivatives of their own"):
        found.sum().backward()


def test_a_functional_second_derivative_is_refused() -> None:
    x, options = make("kda", 1, 5, 1, 1, 4, 4), Recomputation(RULES["kda"])

    def first(k: Tensor) -> Tensor:
        return torch.func.grad(lambda k: differentiable(launcher(options), {**x, "k": k}, options)[0].sum())(k)

    assert first(x["k"]).any()
    with pytest.raises(NotImplementedError, match="no derivatives of their own"):
        torch.func.grad(lambda k: first(k).pow(2).sum())(x["k"])


def test_forward_mode_is_refused_by_name() -> None:
    x, options = make("kda", 1, 5, 1, 1, 4, 4), Recomputation(RULES["kda"])
    with torch.autograd.forward_ad.dual_level():
        x["beta"] = torch.autograd.forward_ad.make_dual(x["beta"], torch.ones_like(x["beta"]))
        with pytest.raises(NotImplementedError, match=r"^beta has a forward-mode tangent"):
            differentiable(launcher(options), x, options)


def test_unknown_names_are_refused() -> None:
    x, options = make("kda", 1, 5, 1, 1, 4, 4), Recomputation(RULES["kda"])
    with pytest.raises(ValueError, match="got 'w'"):
        differentiable(launcher(options), {**x, "w": x["g"]}, options)


def test_who_needs_a_gradient() -> None:
    x = make("kda", 1, 5, 1, 1, 4, 4)
    assert not needs_gradient(x)
    x["A_log"] = torch.zeros(1, requires_grad=True)
    assert needs_gradient({**x, "initial_state": None})
    with torch.no_grad():
        assert not needs_gradient(x)


def test_the_op_under_a_compiler_is_one_node() -> None:
    """What a compiled backward calls: as eager, with shapes and dtypes known before it runs."""
    x, options = make("kda", 1, 20, 1, 2, 4, 4, dtype=torch.float32), Recomputation(RULES["kda"])
    wanted = ["q", "g", "initial_state"]
    tensors = [x.get(name) for name in gradients.TENSORS]
    grad_o = torch.randn(1, 20, 2, 4, generator=torch.Generator().manual_seed(0))
    arguments = (*tensors, grad_o, None, wanted, "per_key", True, False, None, None, False, False, False, False, False)
    op = torch.ops.kda_tl.recompute_gradients.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    direct = recompute_gradients(x, options, grad_o, None, wanted)
    assert all(torch.equal(a, direct[name]) for name, a in zip(wanted, op(*arguments)))
    assert set(direct) == set(wanted) <= set(DIFFERENTIABLE)


def test_chunk_form_and_recurrence_stand_for_the_same_gradients() -> None:
    """The truth of this file, the recurrence, once more by the chunk form under plain autograd."""
    x, options = make("gdn", 1, 70, 1, 2, 8, 6), Recomputation(RULES["gdn"])
    leaves = {key: tensor.requires_grad_() for key, tensor in x.items()}
    loss(*chunk_rule(**activated(leaves, options))[:2]).backward()
    expected = truth(x, options)
    assert all(error(leaf.grad, expected[key]) < 1e-11 for key, leaf in leaves.items())  # type: ignore[arg-type]


def test_sequences_of_all_lengths_share_batches(small_pieces: None) -> None:
    lengths = [3, 40, 0, 1, 17, 16, 8, 33, 1]
    bounds = [0, *itertools.accumulate(lengths)]
    x = make("kda", 1, bounds[-1] + 3, 1, 2, 4, 4, N=len(lengths))
    options, pack = Recomputation(RULES["kda"]), torch.tensor(bounds)
    expected, found = truth(x, options, cu_seqlens=pack), recomputed(x, options, cu_seqlens=pack)
    for key, gradient in expected.items():
        assert error(found[key], gradient) < 1e-11, key


def test_behind_a_registered_op_eager_and_compiled(small_pieces: None) -> None:
    """`differentiable` as the implementation of an op's Autograd key, with the kernels below it."""
    x, options = make("kda", 1, 40, 1, 2, 8, 6, N=3, dtype=torch.float32), Recomputation(RULES["kda"])
    names, pack = (*x, "cu_seqlens"), torch.tensor([0, 20, 20, 37])

    def run(*values: Tensor) -> tuple[Tensor, Tensor | None]:
        return launcher(options, torch.float32)(**dict(zip(names, values)))

    def shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor) -> Any:
        return torch.empty_like(v), torch.empty_like(initial_state)

    def with_gradients(*values: Tensor) -> tuple[Tensor, Tensor | None]:
        def launch(**tensors: Tensor) -> tuple[Tensor, Tensor | None]:
            with torch._C._AutoDispatchBelowAutograd():
                return torch.ops.kda_tl_test.kda.default(*tensors.values())

        tensors = dict(zip(names, values))
        return differentiable(launch, tensors, options) if needs_gradient(tensors) else launch(**tensors)

    def step(*values: Tensor) -> Tensor:
        return loss(*torch.ops.kda_tl_test.kda(*values, pack))

    library = torch.library.Library("kda_tl_test", "FRAGMENT")
    arguments = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor initial_state, Tensor cu_seqlens"
    library.define(f"kda({arguments}) -> (Tensor, Tensor)")
    library.impl("kda", run, "CPU")
    library.impl("kda", with_gradients, "Autograd")
    torch.library.register_fake("kda_tl_test::kda", shapes, lib=library)
    expected = truth(x, options, cu_seqlens=pack)
    for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = {key: tensor.clone().requires_grad_() for key, tensor in x.items()}
        call(*leaves.values()).backward()
        for key, leaf in leaves.items():
            assert leaf.grad is not None and error(leaf.grad, expected[key]) < 1e-5, key
