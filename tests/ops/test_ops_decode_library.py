"""The dense decode ops as torch sees them: compiled, traced with fake tensors, checked by torch.library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_cases import OPS, SERVING, DecodeCase, make_decode_inputs, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import kda_tl
from kda_tl.ops import decode
from kda_tl.ops.explain import DECODE_OPS

pytestmark = [pytest.mark.tilelang, pytest.mark.usefixtures("cpu_kernels")]
GATED = ("kda", "gdn")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def case_of(rule: str, **fields: Any) -> DecodeCase:
    gated = {"gate": "softplus", "beta": "sigmoid", "l2norm": True} if rule in GATED else {}
    return DecodeCase(rule, rule=rule, **{"dtype": torch.float32, **gated, **fields})


def compiled(op: Any) -> Any:
    return torch.compile(lambda x: op(**x), fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("rule", OPS)
def test_a_compiled_call_has_no_graph_break_and_the_same_bits(rule: str) -> None:
    x = make_decode_inputs(case_of(rule, T=2), "cpu", 0).args
    for found, expected in zip(compiled(OPS[rule])(x), OPS[rule](**x)):
        assert same_bits(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", OPS)
def test_a_compiled_call_writes_the_pool(rule: str, dtype: torch.dtype) -> None:
    x = make_decode_inputs(case_of(rule, slots=7, null=1, inplace=True, N=5, starts=True, state_dtype=dtype), "cpu", 1).args
    pool, other = x["initial_state"], x["initial_state"].clone()
    before = pool.clone()

    def step(x: dict[str, Any]) -> Any:
        o, state = OPS[rule](**x)
        return o.sin(), state.sum()  # reads what was written

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    expected = step({**x, "initial_state": other})
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert same_bits(pool, other) and not same_bits(pool, before)


def test_a_second_batch_under_dynamic_shapes() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(lambda x: kda_tl.recurrent_kda(**x), fullgraph=True, backend=backend, dynamic=True)
    for N in (5, 9, 11):  # no two sizes of the first call are alike, or the compiler holds them to it
        x = make_decode_inputs(replace(SERVING, dtype=torch.float32, N=N, slots=20), "cpu", N).args
        other = x["initial_state"].clone()
        assert same_bits(run(x)[0], kda_tl.recurrent_kda(**{**x, "initial_state": other})[0])
        assert same_bits(x["initial_state"], other)
    assert len(graphs) == 1


def registered(rule: str, **fields: Any) -> tuple[Any, tuple[Any, ...]]:
    """The registered op, and what it is called with."""
    function = DECODE_OPS[OPS[rule].__name__]
    a = function.arguments(**make_decode_inputs(case_of(rule, **fields), "cpu", 2).args)
    return getattr(torch.ops.kda_tl, function.op.name + "_in_place" * a.inplace).default, tuple(a[:-1])


@pytest.mark.parametrize("rule", OPS)
def test_torch_accepts_the_registration(rule: str) -> None:
    torch.library.opcheck(*registered(rule, T=2))
    torch.library.opcheck(*registered(rule, slots=4, inplace=True))
    torch.library.opcheck(*registered(rule, lengths=(2, 0, 1), initial=False))


def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_ones() -> None:
    for case in (
        case_of("kda", T=3),
        case_of("kda", slots=5, v_first=False),
        case_of("kda", initial=False, dtype=torch.float16),
    ):
        x = make_decode_inputs(case, "cpu", 3).args
        expected = kda_tl.recurrent_kda(**x)
        with FakeTensorMode() as mode:
            fake = {name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in x.items()}
            found = kda_tl.recurrent_kda(**fake)
            with pytest.raises(ValueError, match=r"^beta must have shape"):
                kda_tl.recurrent_kda(**{**fake, "beta": fake["beta"][:, 1:]})
        for a, b in zip(found, expected):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_a_gradient_is_refused_by_the_registered_ops_too() -> None:
    for fields in ({}, {"slots": 4, "inplace": True}):
        op, values = registered("kda", **fields)
        with pytest.raises(NotImplementedError, match=r"^q requires a gradient and recurrent_kda has no backward"):
            op(values[0].clone().requires_grad_(), *values[1:])
    with pytest.raises(NotImplementedError, match=r"^dt_bias requires a gradient"):
        x = make_decode_inputs(case_of("kda"), "cpu", 4).args
        kda_tl.recurrent_kda(**{**x, "dt_bias": torch.nn.Parameter(x["dt_bias"])})


def test_parameters_under_no_grad() -> None:
    x = make_decode_inputs(case_of("kda"), "cpu", 5).args
    expected = kda_tl.recurrent_kda(**x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = kda_tl.recurrent_kda(**{**x, "A_log": torch.nn.Parameter(x["A_log"])})
        assert all(same_bits(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("H", [1, 2, 4])
def test_the_bonus_is_one_per_head_as_in_prefill(H: int) -> None:
    """u [H, K] with HV = 4: a value head has the bonus of its head."""
    x = make_decode_inputs(case_of("rwkv6", H=H, T=3, v_first=False), "cpu", 6).args
    o, state = kda_tl.recurrent_rwkv6(**x)
    given = {name: x[name] for name in ("r", "k", "v", "w", "u", "initial_state", "output_final_state")}
    o_prefill, state_prefill = kda_tl.chunk_rwkv6(**given)
    torch.testing.assert_close(o, o_prefill, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, state_prefill, rtol=1e-5, atol=1e-5)
    if H < 4:
        with pytest.raises(ValueError, match=r"^u must have shape \[H, K\]"):
            kda_tl.recurrent_rwkv6(**{**x, "u": x["u"].repeat_interleave(4 // H, 0)})


def test_what_is_recognised_is_what_was_checked() -> None:
    """Calls that differ in anything that a check or the kernel looks at are not taken for one another."""
    x = make_decode_inputs(replace(SERVING, dtype=torch.float32), "cpu", 7).args
    op, arguments = kda_tl.recurrent_kda.op, kda_tl.recurrent_kda.arguments
    key = decode.key_of(op, arguments(**x))
    assert decode.key_of(op, arguments(**{**x, "q": x["q"].clone()})) == key
    changes: dict[str, Any] = {
        "q": x["q"].transpose(-1, -2).contiguous().transpose(-1, -2), "v": x["v"].bfloat16(), "g": torch._neg_view(x["g"]),
        "state_indices": x["state_indices"].long(), "initial_state": x["initial_state"].transpose(-1, -2), "scale": 2.0,
        "null_index": 3, "inplace": False, "output_final_state": False, "use_qk_l2norm_in_kernel": False, "beta": None,
        "lower_bound": -1.0, "dt_bias": None, "state_v_first": False,
    }  # fmt: skip
    for name, value in changes.items():
        assert decode.key_of(op, arguments(**{**x, name: value})) != key, name
    assert decode.key_of(op, arguments(**{**x, "scale": 1})) != decode.key_of(op, arguments(**{**x, "scale": True}))


def test_a_wrong_call_after_a_right_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_decode_inputs(replace(SERVING, dtype=torch.float32), "cpu", 8).args
    kda_tl.recurrent_kda(**x)
    with pytest.raises(TypeError, match="scale must be a number"):
        kda_tl.recurrent_kda(**{**x, "scale": True})
    twice = x["state_indices"].clone()
    twice[1:] = 2
    kda_tl.recurrent_kda(**{**x, "state_indices": torch.arange(5, dtype=torch.int32)})
    monkeypatch.setenv("KDA_TL_CHECK", "1")
    with pytest.raises(ValueError, match="state_indices must not name a slot twice"):
        kda_tl.recurrent_kda(**{**x, "state_indices": twice})
