"""Every rule of the family: recurrence, chunk form and segments against a loop over single vectors, and how rules relate."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kda_tl.reference as reference
from kda_tl.reference import chunk_rule, exclusive_decay_products, recurrent_rule, segmented_rule
from kda_tl.specs.rules import RULES

GATES = ["none", "mild", "bounded", "strong", "constant -60", "half open", "masked"]
NAMES = sorted(RULES)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """A rule, and the shapes of a dense batch or of a pack, often with empty and short sequences and tokens past its end."""
    H = draw(st.integers(1, 2))
    problem: dict[str, Any] = {
        "rule": RULES[draw(st.sampled_from(NAMES))],
        "sizes": {"H": H, "HV": H * draw(st.integers(1, 3)), "K": draw(st.sampled_from([1, 5, 8])), "V": 6},
        "gate": draw(st.sampled_from(GATES)),
        "seed": draw(st.integers(0, 2**31)),
        "chunk_size": draw(st.sampled_from([8, 16, 64])),
        "segment_size": draw(st.sampled_from([7, 16, 40])),
        "state_v_first": draw(st.booleans()),
        "with_state": draw(st.booleans()),
    }
    if draw(st.booleans()):
        lengths = draw(st.lists(st.one_of(st.integers(0, 2), st.integers(0, 40)), max_size=4))
        bounds = [0, *itertools.accumulate(lengths)]
        batch = {"B": 1, "T": bounds[-1] + draw(st.integers(0, 3)), "N": len(lengths)}
        return {**problem, "batch": batch, "cu_seqlens": bounds}
    return {**problem, "batch": {"B": draw(st.integers(1, 2)), "T": draw(st.integers(0, 70))}, "cu_seqlens": None}


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(problem=problems())
def test_all_forms_of_all_rules_equal_the_token_loop(rule_inputs, token_loop, relative_error, problem: dict[str, Any]) -> None:
    p = problem
    x = rule_inputs(p["rule"], **p["batch"], **p["sizes"], gate=p["gate"], seed=p["seed"])
    if not p["with_state"]:
        del x["initial_state"]
    scale = 0.3
    if p["cu_seqlens"] is None:
        o_true, state_true = token_loop(**x, scale=scale, rule=p["rule"])
    else:
        o_true, states = torch.zeros_like(x["v"]), []
        for n, (start, end) in enumerate(itertools.pairwise(p["cu_seqlens"])):
            own = {name: tensor if name == "bonus" else tensor[:, start:end] for name, tensor in x.items()}
            if p["with_state"]:
                own["initial_state"] = x["initial_state"][n : n + 1]
            o_true[:, start:end], state = token_loop(**own, scale=scale, rule=p["rule"])
            states.append(state)
        sizes = p["sizes"]
        state_true = torch.cat(states) if states else torch.zeros(0, sizes["HV"], sizes["K"], sizes["V"])

    if p["state_v_first"] and p["with_state"]:
        x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
    options = {"cu_seqlens": p["cu_seqlens"], "state_v_first": p["state_v_first"], "scale": scale, **p["rule"].as_dict()}
    forms = {
        "recurrence": recurrent_rule(**x, **options),
        "chunks": chunk_rule(**x, **options, chunk_size=p["chunk_size"])[:2],
        "segments": segmented_rule(**x, **options, segment_size=p["segment_size"], chunk_size=p["chunk_size"]),
    }
    for form, (o, state) in forms.items():
        assert relative_error(o, o_true) < 1e-11, form
        assert relative_error(state.transpose(-1, -2) if p["state_v_first"] else state, state_true) < 1e-11, form


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gate", GATES)
def test_float32_chunks_stay_accurate_for_any_gate(rule_inputs, token_loop, relative_error, name: str, gate: str) -> None:
    x = {key: tensor.float() for key, tensor in rule_inputs(RULES[name], 1, 130, 1, 2, 32, 16, gate).items()}
    if "beta" in x:
        x["beta"] *= 0.5
    o_true, state_true = token_loop(**x, scale=0.2, rule=RULES[name])
    o, state, _ = chunk_rule(**x, scale=0.2, dtype=torch.float32, **RULES[name].as_dict())
    assert relative_error(o, o_true) < 2e-6 and relative_error(state, state_true) < 2e-6


@pytest.mark.parametrize("name", NAMES)
def test_named_functions_are_the_rules(rule_inputs, name: str) -> None:
    x = rule_inputs(RULES[name], 2, 20, 1, 2, 8, 6)
    state = x.pop("initial_state")
    named = getattr(reference, f"recurrent_{name}")
    general = recurrent_rule(**x, scale=0.5, initial_state=state, **RULES[name].as_dict())
    positional = named(*x.values(), 0.5, state)
    assert all(torch.equal(a, b) for a, b in zip(positional, general))
    chunked = getattr(reference, f"chunk_{name}", None)
    if chunked is not None:
        general = chunk_rule(**x, scale=0.5, initial_state=state, **RULES[name].as_dict())
        assert all(torch.equal(a, b) for a, b in zip(chunked(*x.values(), 0.5, state)[:2], general[:2]))


@pytest.mark.parametrize("T", [7, 50, 64, 65, 256])
def test_gate_of_exactly_zero_is_the_rule_without_decay(rule_inputs, relative_error, T: int) -> None:
    x = rule_inputs(RULES["kda"], 1, T, 1, 2, 16, 8, "none")
    beta, zero = x.pop("beta"), x.pop("g")
    for delta in (True, False):
        extra = {"beta": beta} if delta else {}
        for form in (recurrent_rule, chunk_rule):
            o, state = form(**x, **extra, decay="none", delta=delta)[:2]
            for decay, g in (("per_key", zero), ("scalar", zero[..., 0]), ("per_key", None), ("scalar", None)):
                o_gated, state_gated = form(**x, **extra, g=g, decay=decay, delta=delta)[:2]
                assert torch.equal(o_gated, o) and torch.equal(state_gated, state)
    # Half of the tokens with a gate of 1: their neighbours' gates are honoured, theirs change nothing.
    x["g"] = zero.clone()
    x["g"][:, torch.randperm(T)[: T // 2]] = -0.5
    o, state, _ = chunk_rule(**x, beta=beta, **RULES["kda"].as_dict())
    o_true, state_true = recurrent_rule(**x, beta=beta, **RULES["kda"].as_dict())
    assert relative_error(o, o_true) < 1e-12 and relative_error(state, state_true) < 1e-12


def test_linear_attention_is_a_masked_matrix_product(rule_inputs, relative_error) -> None:
    x = rule_inputs(RULES["linear_attention"], 1, 40, 1, 1, 8, 6)
    del x["initial_state"]
    q, k, v = (x[name][0, :, 0] for name in ("q", "k", "v"))
    o, state = recurrent_rule(**x, scale=1.0, **RULES["linear_attention"].as_dict())
    assert relative_error(o[0, :, 0], (q @ k.T).tril() @ v) < 1e-13
    assert relative_error(state[0, 0], k.T @ v) < 1e-13


def test_retention_is_scalar_decay_constant_in_time(rule_inputs, relative_error) -> None:
    x = rule_inputs(RULES["simple_gla"], 1, 40, 1, 1, 8, 6)
    del x["initial_state"]
    x["g"].fill_(-0.03)
    q, k, v = (x[name][0, :, 0] for name in ("q", "k", "v"))
    t = torch.arange(40, dtype=torch.float64)
    gamma = torch.exp(-0.03 * (t[:, None] - t)).tril()
    o, _, _ = chunk_rule(**x, scale=1.0, chunk_size=16, **RULES["simple_gla"].as_dict())
    assert relative_error(o[0, :, 0], ((q @ k.T) * gamma) @ v) < 1e-13


def test_rwkv6_reads_before_its_own_decay_and_write(rule_inputs) -> None:
    x = rule_inputs(RULES["rwkv6"], 1, 1, 1, 1, 4, 3)
    q, k, v, bonus, S = x["q"][0, 0, 0], x["k"][0, 0, 0], x["v"][0, 0, 0], x["bonus"][0], x["initial_state"][0, 0]
    x["g"].fill_(-torch.inf)
    expected = S.T @ q + (q * bonus * k).sum() * v
    for form in (recurrent_rule, chunk_rule):
        o, state = form(**x, scale=1.0, **RULES["rwkv6"].as_dict())[:2]
        assert torch.allclose(o[0, 0, 0], expected, rtol=1e-13)
        assert torch.allclose(state[0, 0], torch.outer(k, v), rtol=1e-13)


def test_rwkv6_is_gla_shifted_by_one_token(rule_inputs, relative_error) -> None:
    """Without the bonus, what token t reads is what token t - 1 has left behind."""
    x = rule_inputs(RULES["rwkv6"], 1, 90, 2, 4, 8, 6)
    del x["bonus"]
    o, state, _ = chunk_rule(**x, chunk_size=16, **RULES["rwkv6"].as_dict())
    x["q"] = x["q"].roll(-1, 1)
    o_gla, state_gla = recurrent_rule(**x, **RULES["gla"].as_dict())
    assert relative_error(o[:, 1:], o_gla[:, :-1]) < 1e-13 and relative_error(state, state_gla) < 1e-13


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("C", [1, 2, 7, 64])
def test_exclusive_decay_products_against_their_definition(inputs, gate: str, C: int) -> None:
    x = inputs(1, C, 1, 1, 8, 1, gate)
    a, b, g = (x[name][0, :, 0] for name in ("q", "k", "g"))
    expected = torch.zeros(C, C, dtype=torch.float64)
    for i in range(C):
        for j in range(i):
            expected[i, j] = (a[i] * b[j] * g[j + 1 : i].sum(0).exp()).sum()
    X = exclusive_decay_products(a, b, g)
    assert (X - expected).abs().max() < 1e-14
    assert torch.equal(X.triu(), torch.zeros_like(X))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_do_not_depend_on_the_future_for_any_rule(rule_inputs, name: str) -> None:
    for dtype, T in itertools.product((torch.float32, torch.float64), (17, 22, 33, 47)):
        x = rule_inputs(RULES[name], 1, T, 2, 4, 16, 8, "bounded")
        o, _, _ = chunk_rule(**x, dtype=dtype, **RULES[name].as_dict())
        for key in ("q", "k", "v", "g", "beta"):
            if key in x:
                changed = {**x, key: x[key].clone()}
                changed[key][:, T - 1] = -4.999
                o_changed, _, _ = chunk_rule(**changed, dtype=dtype, **RULES[name].as_dict())
                assert torch.equal(o_changed[:, : T - 1], o[:, : T - 1]), key


@pytest.mark.parametrize("name", NAMES)
def test_intermediates_rebuild_the_outputs_of_any_rule(rule_inputs, relative_error, name: str) -> None:
    x = rule_inputs(RULES[name], 1, 50, 1, 2, 8, 6)
    o, _, c = chunk_rule(**x, scale=1.0, chunk_size=16, **RULES[name].as_dict())
    q = x["q"][0].repeat_interleave(2, 1).transpose(0, 1)  # [HV, T, K]
    for i, (start, length) in enumerate(zip(c.start.tolist(), c.length.tolist())):
        G = c.G[i, :, :length]
        if RULES[name].read_first:
            G = torch.cat([torch.zeros_like(G[:, :1]), G[:, :-1]], 1)
        u = (c.U[i] - c.W[i] @ c.states[i])[:, :length]
        own = (q[:, start : start + length] * G.exp()) @ c.states[i] + c.P[i, :, :length, :length] @ u
        assert relative_error(o[0, start : start + length], own.transpose(0, 1)) < 1e-12
    if not RULES[name].delta:
        eye = torch.eye(16, dtype=torch.float64)
        assert not c.A.any() and not c.W.any() and torch.equal(c.A_inv[0], eye.expand(2, 16, 16))
        assert torch.equal(c.A_inv[-1, 0], torch.diag((torch.arange(16) < 2).double()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_states_at_chunk_boundaries_are_those_of_shorter_runs(rule_inputs, relative_error, name, state_v_first) -> None:
    """The state at an inner boundary is what a run that ends there leaves, not the last state."""
    x = rule_inputs(RULES[name], 1, 195, 1, 2, 8, 6, N=3)
    if state_v_first:
        x["initial_state"] = x["initial_state"].transpose(-1, -2)
    cu_seqlens = [0, 130, 131, 195]
    rule, options = RULES[name].as_dict(), {"state_v_first": state_v_first}
    _, final, c = chunk_rule(**x, cu_seqlens=cu_seqlens, **options, **rule)
    assert c.sequence.tolist() == [0, 0, 0, 1, 2] and c.length.tolist() == [64, 64, 2, 1, 64]
    for n, start, length, state in zip(c.sequence.tolist(), c.start.tolist(), c.length.tolist(), c.states_after):
        begin, end = cu_seqlens[n], start + length
        own = {key: tensor if key == "bonus" else tensor[:, begin:end] for key, tensor in x.items()}
        own["initial_state"] = x["initial_state"][n : n + 1]
        _, state_true = recurrent_rule(**own, **options, **rule)
        assert relative_error(state, state_true[0].transpose(-1, -2) if state_v_first else state_true[0]) < 1e-12
    assert torch.equal(c.states[1:3], c.states_after[:2])
    last = c.states_after[[2, 3, 4]]
    assert torch.equal(last.transpose(-1, -2) if state_v_first else last, final)


@pytest.mark.parametrize("T", [64, 65, 128, 10])
def test_the_state_layout_reaches_every_token(rule_inputs, relative_error, T: int) -> None:
    """With K = V a state in the wrong layout goes unnoticed but for the numbers."""
    for name in NAMES:
        x = rule_inputs(RULES[name], 1, T, 1, 1, 16, 16)
        o_true, state_true = recurrent_rule(**x, **RULES[name].as_dict())
        x["initial_state"] = x["initial_state"].transpose(-1, -2)
        for form in (recurrent_rule, chunk_rule, segmented_rule):
            o, state = form(**x, state_v_first=True, **RULES[name].as_dict())[:2]
            assert ((o - o_true).norm(dim=-1) < 1e-12 * o_true.norm(dim=-1)).all()
            assert relative_error(state.transpose(-1, -2), state_true) < 1e-12


REFUSED = [
    ("g must be", "gdn", lambda x: {"g": x["g"].unsqueeze(-1).expand(-1, -1, -1, 4)}),
    ("g needs a rule with decay", "delta_rule", lambda x: {"g": x["beta"]}),
    ("beta needs a rule with the delta correction", "gla", lambda x: {"beta": x["g"][..., 0]}),
    ("bonus needs a rule that reads first", "kda", lambda x: {"bonus": torch.zeros(2, 4)}),
    (r"bonus must be \[H, K\]", "rwkv6", lambda x: {"bonus": torch.zeros(4, 4)}),
    ("decay must be one of", "kda", lambda x: {"decay": "vector"}),
    ("read_first=True needs delta=False", "kda", lambda x: {"read_first": True}),
]


@pytest.mark.parametrize(("message", "name", "change"), REFUSED)
@pytest.mark.parametrize("form", [recurrent_rule, chunk_rule, segmented_rule])
def test_what_a_rule_has_not_is_refused(rule_inputs, form, message: str, name: str, change) -> None:
    x = rule_inputs(RULES[name], 1, 6, 2, 4, 4, 8)
    with pytest.raises(ValueError, match=message):
        form(**{**x, **RULES[name].as_dict(), **change(x)})


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_every_rule_equal_those_of_the_recurrence(rule_inputs, relative_error, name: str) -> None:
    x = rule_inputs(RULES[name], 1, 45, 2, 4, 8, 6, "masked", N=3)
    gradients = []
    for form in (recurrent_rule, chunk_rule, segmented_rule):
        leaves = {key: tensor.clone().requires_grad_() for key, tensor in x.items()}
        o, state = form(**leaves, cu_seqlens=[0, 40, 40, 43], **RULES[name].as_dict())[:2]
        (o.sin().sum() + state.sin().sum()).backward()
        gradients.append({key: leaf.grad for key, leaf in leaves.items()})
    for other in gradients[1:]:
        for key, truth in gradients[0].items():
            assert relative_error(other[key], truth) < 1e-10, key
