"""Every prefill op against the float64 token recurrence of its rule."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from chunk_kda_cases import nan_filled_memory, relative_error
from op_inputs import offsets, sequences
from rule_inputs import OPS, call, inputs, truth

import kda_tl
from kda_tl.ops.explain import PREFILL_OPS

pytestmark = pytest.mark.usefixtures("cpu_kernels")
LIMIT = 1e-5
PACK = [0, 1, 63, 65, 0, 30]


def check(rule: str, x: dict[str, Any], cu_seqlens: list[int] | None = None, **options: Any) -> None:
    given = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    with nan_filled_memory():
        o, state = call(rule, x, cu_seqlens=given, output_final_state=True, **options)
    o_true, state_true = truth(rule, x, cu_seqlens=cu_seqlens, **options)
    assert o.shape == o_true.shape and o.dtype == x["v"].dtype and o.is_contiguous()
    assert state.shape == state_true.shape and state.dtype == torch.float32 and state.is_contiguous()
    for n, (b, tokens) in enumerate(sequences(x, cu_seqlens)):
        assert relative_error(o[b, tokens], o_true[b, tokens]) < LIMIT, f"o of sequence {n}"
        assert relative_error(state[n], state_true[n]) < LIMIT, f"state of sequence {n}"
    if cu_seqlens is not None:
        assert not o[:, cu_seqlens[-1] :].any()


@pytest.mark.parametrize("rule", OPS)
def test_dense_batch(rule: str) -> None:
    x = inputs(rule, 130, B=2, H=2, HV=2 if rule == "rwkv6" else 4)
    check(rule, x)
    check(rule, x, scale=0.7)
    del x["initial_state"]
    check(rule, x)


@pytest.mark.parametrize("rule", OPS)
def test_pack_and_its_tail(rule: str) -> None:
    x = inputs(rule, sum(PACK) + 40, N=len(PACK))
    for name in x.keys() - {"initial_state", "bonus"}:
        x[name][:, sum(PACK) :] = torch.nan
    check(rule, x, offsets(PACK))


@pytest.mark.parametrize("rule", OPS)
def test_state_with_v_first(rule: str) -> None:
    x = inputs(rule, 70, B=2, V=128)
    x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
    check(rule, x, state_v_first=True)


@pytest.mark.parametrize("rule", OPS)
def test_no_tokens_and_no_sequences(rule: str) -> None:
    for x, cu_seqlens in (
        (inputs(rule, 0, B=2), None),
        (inputs(rule, 7, B=0), None),
        (inputs(rule, 0, N=2), [0, 0, 0]),
        (inputs(rule, 7, N=0), [0]),
    ):
        given = None if cu_seqlens is None else torch.tensor(cu_seqlens)
        o, state = call(rule, x, cu_seqlens=given, output_final_state=True)
        assert o.shape == x["v"].shape and not o.any() and torch.equal(state, x["initial_state"])


@pytest.mark.parametrize("rule", OPS)
def test_narrow_inputs(rule: str) -> None:
    x = inputs(rule, 70, HV=1)
    x = {name: tensor.bfloat16() for name, tensor in x.items()}
    o, state = call(rule, x, output_final_state=True)
    o_true, state_true = truth(rule, x)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert relative_error(o, o_true) < 0.004 and relative_error(state, state_true) < LIMIT


@pytest.mark.parametrize("rule", OPS)
def test_a_token_changes_nothing_before_it(rule: str) -> None:
    x = inputs(rule, 70)
    o, _ = call(rule, x)
    for name in x.keys() - {"initial_state", "bonus"}:
        changed = x[name].clone()
        changed[:, -1] *= 3.0
        o_changed, _ = call(rule, {**x, name: changed})
        assert torch.equal(o_changed[:, :-1], o[:, :-1]), name


def test_gdn_is_kda_with_one_decay_for_all_channels() -> None:
    x = inputs("gdn", 130, H=1, HV=2)
    o, state = call("gdn", x, output_final_state=True)
    wide = {**x, "g": x["g"].unsqueeze(-1).expand(*x["g"].shape, 64)}
    o_kda, state_kda = call("kda", wide, output_final_state=True)
    assert relative_error(o, o_kda.double()) < LIMIT and relative_error(state, state_kda.double()) < LIMIT


@pytest.mark.parametrize("gate", ["open", "half open"])
@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_an_open_gate_is_the_delta_rule(rule: str, gate: str) -> None:
    """fla#104."""
    for T in (7, 65, 200):
        x = inputs(rule, T)
        x["g"].zero_()
        if gate == "half open":
            x["g"][:, torch.rand(T, generator=torch.Generator().manual_seed(T)) < 0.5] = -0.3
            check(rule, x)
            continue
        o, state = call(rule, x, output_final_state=True)
        ungated = {name: tensor for name, tensor in x.items() if name != "g"}
        o_true, state_true = truth("delta_rule", ungated)
        assert relative_error(o, o_true) < LIMIT and relative_error(state, state_true) < LIMIT


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_strong_gates(rule: str) -> None:
    """meta-pytorch/attention-gym#394: the softplus gate has no bound."""
    for gate in (-6.0, -20.0, -80.0):
        x = inputs(rule, 64)
        x["g"].fill_(gate)
        check(rule, x)
        x["g"][:, ::2] = 0.0
        check(rule, x)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_gdn_applies_norm_gate_and_sigmoid(with_bias: bool, allow_neg_eigval: bool) -> None:
    x = inputs("gdn", 130, H=2, HV=4)
    generator = torch.Generator().manual_seed(1)
    x["q"] *= 3.0
    x["k"] *= 7.0
    x["g"] = torch.randn(x["g"].shape, generator=generator)
    x["beta"] = torch.randn(x["beta"].shape, generator=generator)
    A_log, dt_bias = torch.rand(4, generator=generator), torch.randn(4, generator=generator)
    o, state = call(
        "gdn", x, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=A_log,
        dt_bias=dt_bias if with_bias else None, allow_neg_eigval=allow_neg_eigval, output_final_state=True,
    )  # fmt: skip
    bias = dt_bias.double() if with_bias else 0.0
    true = {name: tensor.double() for name, tensor in x.items()}
    for name in ("q", "k"):
        true[name] = true[name] / (true[name].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    true["g"] = -A_log.double().exp() * (1 + (true["g"] + bias).exp()).log()
    true["beta"] = (2 if allow_neg_eigval else 1) / (1 + (-true["beta"]).exp())
    o_true, state_true = truth("gdn", true)
    assert relative_error(o, o_true) < LIMIT and relative_error(state, state_true) < LIMIT


@pytest.mark.parametrize("decay", ["g_gamma", "none"])
def test_a_decay_per_head_or_none(decay: str) -> None:
    x = inputs("simple_gla", 70, B=2, HV=2)
    g_gamma = torch.tensor([-0.1, -1.0])
    x["g"] = g_gamma.expand(2, 70, 2) if decay == "g_gamma" else torch.zeros(2, 70, 2)
    o_true, state_true = truth("simple_gla", x)
    del x["g"]
    o, state = call("simple_gla", x, g_gamma=g_gamma if decay == "g_gamma" else None, output_final_state=True)
    assert relative_error(o, o_true) < LIMIT and relative_error(state, state_true) < LIMIT


@pytest.mark.parametrize("with_state", ["both", "state", "z", "none"])
@pytest.mark.parametrize("lengths", [None, [0, 30, 40]])
def test_the_normalizer_of_linear_attention(lengths: list[int] | None, with_state: str) -> None:
    """o / (scale q . z), with z the sum of all keys so far; positive keys and queries, as a feature map gives them."""
    T, B = (70, 2) if lengths is None else (70, 1)
    cu_seqlens = None if lengths is None else offsets(lengths)
    x = inputs("linear_attention", T, B=B, HV=1, V=128, N=B if lengths is None else len(lengths))
    x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    state = x.pop("initial_state")
    z = torch.rand((state.shape[0], 1, 1, 64), generator=torch.Generator().manual_seed(2))
    given = {"both": (state, z), "state": (state, None), "z": (None, z), "none": None}[with_state]
    o, (final, final_z) = kda_tl.chunk_linear_attention(
        **x, initial_state=given, output_final_state=True, cu_seqlens=None if lengths is None else torch.tensor(cu_seqlens)
    )
    for n, (b, tokens) in enumerate(sequences(x, cu_seqlens)):
        q, k, v = (x[name][b, tokens, 0].double() for name in ("q", "k", "v"))
        S = state[n, 0].double() if with_state in ("both", "state") else torch.zeros(64, 128).double()
        Z = z[n, 0, 0].double() if with_state in ("both", "z") else torch.zeros(64).double()
        for t in range(len(q)):
            S, Z = S + torch.outer(k[t], v[t]), Z + k[t]
            assert torch.allclose(o[b, tokens, 0][t].double(), (q[t] @ S) / (q[t] @ Z), rtol=1e-4, atol=1e-5)
        assert torch.allclose(final[n, 0].double(), S, atol=1e-4) and torch.allclose(final_z[n, 0, 0].double(), Z, atol=1e-4)
    assert kda_tl.chunk_linear_attention(**x)[1] is None


FLA = {
    "chunk_kda": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
    "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states "
    "state_v_first cu_seqlens cu_seqlens_cpu cp_context",
    "chunk_gdn": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
    "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context",
    "chunk_delta_rule": "q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens cu_seqlens_cpu",
    "chunk_gla": "q k v g scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu",
    "chunk_simple_gla": "q k v g g_gamma scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu",
    "chunk_linear_attention": "q k v scale initial_state output_final_state normalize cu_seqlens",
    "chunk_rwkv6": "r k v w u scale initial_state output_final_state cu_seqlens cu_seqlens_cpu",
}


@pytest.mark.parametrize("name", FLA)
def test_the_order_of_arguments_is_that_of_flash_linear_attention(name: str) -> None:
    expected = FLA[name].split()
    assert list(inspect.signature(PREFILL_OPS[name]).parameters)[: len(expected)] == expected
    assert PREFILL_OPS[name].__doc__ and getattr(kda_tl, name) is PREFILL_OPS[name]


def test_what_flash_linear_attention_accepts_for_gdn_changes_nothing() -> None:
    x = inputs("gdn", 10)
    expected, _ = call("gdn", x)
    assert torch.equal(call("gdn", x, chunk_indices=torch.zeros(1, 2))[0], expected)
    assert kda_tl.chunk_gated_delta_rule is kda_tl.chunk_gdn
    assert PREFILL_OPS["chunk_linear_attn"] is kda_tl.chunk_linear_attention
