"""The prefill ops as torch sees them: compiled, traced with fake tensors, checked by torch.library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chunk_kda_cases import relative_error
from rule_inputs import OPS, call, inputs, truth
from torch._subclasses.fake_tensor import FakeTensorMode

import kda_tl
from kda_tl.ops import decode, prefill_library
from kda_tl.ops.arguments import Arguments
from kda_tl.ops.explain import PREFILL_OPS

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("rule", OPS)
def test_compiled_equals_eager(rule: str) -> None:
    """fla#52: no graph break, the right numbers."""
    x = inputs(rule, 70, HV=1)
    compiled = torch.compile(lambda x: call(rule, x, output_final_state=True), fullgraph=True, backend="aot_eager")
    same(compiled(x), call(rule, x, output_final_state=True))


@pytest.mark.parametrize("K", [64, 80, 128])
def test_a_second_length_under_dynamic_shapes(K: int) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def run(x: dict[str, torch.Tensor], cu_seqlens: torch.Tensor) -> Any:
        o, state = call("kda", x, cu_seqlens=cu_seqlens, output_final_state=True)
        return o * 2.0, state

    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    for T, lengths in ((70, [0, 30, 64]), (75, [0, 10, 75]), (90, [0, 64, 90])):
        x, cu_seqlens = inputs("kda", T, H=2, HV=4, K=K, N=2), torch.tensor(lengths)
        same(compiled(x, cu_seqlens), run(x, cu_seqlens))
    assert len(graphs) == 1


def test_every_option_compiles() -> None:
    x = inputs("kda", 70, H=1, HV=2)
    x["beta"].neg_()
    x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
    options: dict[str, Any] = {
        "scale": 0.5, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True,
        "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "state_v_first": True, "output_final_state": True,
        "return_intermediate_states": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(128), "chunk_size": 64,
    }  # fmt: skip
    compiled = torch.compile(lambda x: call("kda", x, **options), fullgraph=True, backend="aot_eager")
    same(compiled(x), call("kda", x, **options))


def test_a_pool_is_written_by_a_compiled_call() -> None:
    x = inputs("kda", 10, B=2)
    indices, pool = torch.tensor([3, -1]), torch.randn(5, 1, 64, 64)
    other = pool.clone()

    def run(x: dict[str, torch.Tensor], pool: torch.Tensor) -> Any:
        o, state = call("kda", {**x, "initial_state": pool}, state_indices=indices, null_index=-1, output_final_state=True)
        return o, state, state[3].sum()

    same(torch.compile(run, fullgraph=True, backend="aot_eager")(x, pool), run(x, other))
    assert torch.equal(pool, other)


def registered(rule: str, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The registered op, and what it is called with."""
    x = inputs(rule, 10)
    a = Arguments(**x, output_final_state=True)._replace(**options)
    in_place = a.state_indices is not None
    name = PREFILL_OPS[f"chunk_{rule}"].op.name
    op = getattr(torch.ops.kda_tl, name + "_in_place" * in_place).default
    return op, tuple(a) if in_place else tuple(a[:-2])


@pytest.mark.parametrize("rule", OPS)
def test_torch_accepts_the_registration(rule: str) -> None:
    torch.library.opcheck(*registered(rule, return_intermediate_states=True))


def test_torch_accepts_the_registration_of_writes_in_place() -> None:
    pool = torch.randn(3, 1, 64, 64)
    torch.library.opcheck(*registered("gdn", initial_state=pool, state_indices=torch.tensor([2]), null_index=0))


def gradients(rule: str, x: dict[str, torch.Tensor], run: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Of a loss over o and the final state, by every input."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in x.items()}
    o, state = run(rule, leaves, **options)[:2]
    generator = torch.Generator().manual_seed(7)
    weight = (torch.randn(part.shape, generator=generator) for part in (o, state))
    sum((part.double() * w).sum() for part, w in zip((o, state), weight)).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def compiled_call(rule: str, x: dict[str, torch.Tensor], **options: Any) -> Any:
    return torch.compile(lambda x: call(rule, x, **options), fullgraph=True, backend="aot_eager")(x)


@pytest.mark.parametrize("rule", ["kda", "linear_attention"])
def test_compiled_gradients_equal_eager_ones(rule: str) -> None:
    """fla#52."""
    x, options = inputs(rule, 70, N=2), {"output_final_state": True, "cu_seqlens": torch.tensor([0, 30, 66])}
    found, expected = gradients(rule, x, compiled_call, **options), gradients(rule, x, call, **options)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
        assert name in ("initial_state", "bonus") or not gradient[:, 66:].any()


def test_gradients_pass_norm_gate_sigmoid_and_padding() -> None:
    x = inputs("kda", 20, K=40, V=72)
    raw = {"A_log": torch.tensor([0.3]), "dt_bias": torch.linspace(-1, 1, 40)}

    def by_op(rule: str, leaves: dict[str, torch.Tensor]) -> Any:
        return call(rule, leaves, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                    use_beta_sigmoid_in_kernel=True)  # fmt: skip

    def by_definition(rule: str, leaves: dict[str, torch.Tensor]) -> Any:
        rate, bias = leaves.pop("A_log"), leaves.pop("dt_bias")
        for name in ("q", "k"):
            leaves[name] = leaves[name] / (leaves[name].square().sum(-1, keepdim=True) + 1e-6).sqrt()
        g = -rate.exp() * torch.nn.functional.softplus(leaves.pop("g") + bias)
        return truth(rule, {**leaves, "g": g, "beta": leaves["beta"].sigmoid()})

    found = gradients("kda", {**x, **raw}, by_op)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in {**x, **raw}.items()}
    o, state = by_definition("kda", dict(leaves))
    generator = torch.Generator().manual_seed(7)
    sum((part * torch.randn(part.shape, generator=generator)).sum() for part in (o, state)).backward()
    for name, gradient in found.items():
        assert relative_error(gradient, leaves[name].grad) < 1e-4, name


def test_gradients_of_nothing() -> None:
    """MoonshotAI/FlashKDA#32."""
    x = inputs("kda", 0, N=2)
    found = gradients("kda", x, call, cu_seqlens=torch.tensor([0, 0, 0]), output_final_state=True)
    assert all(gradient.shape == x[name].shape for name, gradient in found.items())


def test_a_call_of_the_registered_op_is_differentiated_too() -> None:
    op, values = registered("kda")
    q = values[0].clone().requires_grad_()
    o, _, _ = op(q, *values[1:])
    assert o.requires_grad and torch.autograd.grad(o.sum(), q)[0].any()
    op, values = registered("kda", initial_state=torch.zeros(1, 1, 64, 64), state_indices=torch.tensor([0]))
    with pytest.raises(NotImplementedError, match=r"^q requires a gradient"):
        op(q, *values[1:])


def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_ones() -> None:
    cu_seqlens = torch.tensor([0, 30, 64], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        for options in (
            {"output_final_state": True},
            {"cu_seqlens": cu_seqlens, "return_intermediate_states": True, "state_v_first": True},
            {"cu_seqlens": cu_seqlens},
        ):
            x = inputs("kda", 70, H=2, HV=4, V=128, N=2 if "cu_seqlens" in options else 1)
            if "state_v_first" in options:
                x["initial_state"] = x["initial_state"].transpose(-1, -2)
            x |= {name: x[name].to(dtype) for name in ("q", "k", "v")}
            expected = call("kda", x, **options)
            with FakeTensorMode() as mode:
                fake = {
                    name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                    for name, value in options.items()
                }
                found = call("kda", {name: mode.from_tensor(tensor) for name, tensor in x.items()}, **fake)
            for a, b in zip(found[:2], expected[:2]):
                assert (a is None) == (b is None)
                assert a is None or (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
            if "return_intermediate_states" in options:
                spare = 70 // 64 + 2 - expected[2].shape[1]  # without values nobody knows how many chunks there are
                assert found[2].shape[1] == expected[2].shape[1] + spare and found[2].shape[2:] == expected[2].shape[2:]


def test_fake_tensors_are_checked() -> None:
    x = inputs("kda", 10)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in x.items()}
        with pytest.raises(ValueError, match=r"^beta must have shape"):
            kda_tl.chunk_kda(**{**fake, "beta": fake["beta"][:, 1:]})


def test_what_the_compiler_refuses_is_named() -> None:
    x = inputs("kda", 10)
    with pytest.raises(Exception, match="g must have shape"):
        torch.compile(lambda x: call("kda", x), fullgraph=True, backend="eager")({**x, "g": x["g"][:, 1:]})


def test_parameters_may_be_nn_parameters() -> None:
    x = inputs("kda", 10)
    given = {
        "use_gate_in_kernel": True,
        "A_log": torch.nn.Parameter(torch.zeros(1)),
        "dt_bias": torch.nn.Parameter(torch.zeros(64)),
    }
    expected = call("kda", x, **{name: getattr(value, "data", value) for name, value in given.items()})
    with torch.no_grad():
        same(call("kda", x, **given), expected)
    with torch.inference_mode():
        same(call("kda", x, **given), expected)


@pytest.mark.parametrize("rule", OPS)
def test_a_traced_module_holds_the_op(rule: str) -> None:
    """torch.jit.trace on other values, after calls that were recognised: the trace must not keep what those returned."""
    x, y = inputs(rule, 70, HV=1), inputs(rule, 70, HV=1, seed=1)
    for _ in range(3):
        call(rule, x)
    traced = torch.jit.trace(lambda *values: call(rule, dict(zip(x, values)))[0], tuple(x.values()), check_trace=False)
    assert torch.equal(traced(*y.values()), call(rule, y)[0])


def test_a_transform_that_differentiates_is_refused() -> None:
    x = inputs("kda", 5, HV=1)
    with pytest.raises(NotImplementedError, match=r"^chunk_kda has no derivatives in transforms of torch\.func"):
        torch.func.grad(lambda v: call("kda", {**x, "v": v})[0].sum())(x["v"])


@pytest.mark.parametrize(("module", "name"), [(prefill_library, "decided"), (decode, "_decided")])
def test_compiled_code_plans_a_call_once(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: planned.append(given) or plan(*given))
    T = 71 if module is prefill_library else 1  # lengths that no other test uses together with three heads
    x = inputs("kda", T, B=3, HV=3)
    op = kda_tl.chunk_kda if module is prefill_library else kda_tl.recurrent_kda
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        same(compiled(**x, output_final_state=True), op(**x, output_final_state=True))
    assert len(planned) == 1


def test_options_of_the_registered_op_are_checked() -> None:
    a = kda_tl.chunk_kda.arguments(**inputs("kda", 5, HV=1))._replace(allow_neg_eigval=True)
    with pytest.raises(ValueError, match="allow_neg_eigval=True needs"):
        torch.ops.kda_tl.chunk_kda(*a[:-2])
