"""Affine maps of segments and sequences: they compose, and split runs equal unsplit ones for any decay."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_tl.reference import (
    chunk_affine,
    chunk_rule,
    compose,
    merge_affine,
    recurrent_rule,
    segment_affine,
    segmented_rule,
    sequence_affine,
)
from kda_tl.specs.rules import RULES

GATES = ["none", "mild", "bounded", "strong", "constant -60", "half open", "masked"]
ORDINARY = sorted(name for name, rule in RULES.items() if not rule.read_first)


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("gate", GATES)
def test_map_of_every_sequence_of_a_pack(rule_inputs, relative_error, name: str, gate: str) -> None:
    x = rule_inputs(RULES[name], 1, 90, 1, 2, 8, 6, gate, N=4)
    cu_seqlens, rule = [0, 70, 70, 71, 88], RULES[name].as_dict()
    del rule["read_first"]
    tokens = {key: tensor for key, tensor in x.items() if key not in ("q", "initial_state")}
    M, B = sequence_affine(**tokens, cu_seqlens=cu_seqlens, chunk_size=16, **rule)
    assert M.shape == (4, 2, 8, 8) and B.shape == (4, 2, 8, 6)
    for factor in (1.0, 0.0, 100.0):
        x["initial_state"] = x["initial_state"] * factor
        _, state = recurrent_rule(**x, cu_seqlens=cu_seqlens, **rule)
        assert relative_error(M @ x["initial_state"] + B, state) < 1e-11
    assert torch.equal(M[1], torch.eye(8, dtype=torch.float64).expand(2, 8, 8)) and not B[1].any()


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("T", [0, 1, 16, 50])
def test_segment_map_is_the_composition_of_its_chunks(inputs, relative_error, delta: bool, T: int) -> None:
    x = inputs(1, T, 1, 2, 8, 6)
    k = x["k"].expand(-1, -1, 2, -1).transpose(1, 2)
    v, g, beta = x["v"].transpose(1, 2), x["g"].transpose(1, 2), x["beta"].transpose(1, 2)
    M, B = segment_affine(k, v, g, beta, delta, chunk_size=16)
    rule = {"decay": "per_key", "delta": delta}
    M_true, B_true = sequence_affine(x["k"], x["v"], x["g"], x["beta"] if delta else None, **rule)
    assert relative_error(M, M_true) < 1e-12 and (B - B_true).abs().max() < 1e-12
    if T == 50:
        parts = [chunk_affine(k[..., s, :], v[..., s, :], g[..., s, :], beta[..., s], delta)
                 for s in (slice(0, 20), slice(20, 50))]  # fmt: skip
        folded = compose(parts[1], parts[0])
        assert relative_error(folded[0], M) < 1e-12 and relative_error(folded[1], B) < 1e-12


def test_merge_is_the_fold_of_the_maps(inputs, relative_error) -> None:
    generator = torch.Generator().manual_seed(3)
    M, B = (torch.randn(3, 2, 4, n, generator=generator, dtype=torch.float64) for n in (4, 5))
    S = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    states = merge_affine(S, M, B)
    assert states.shape == (4, 2, 4, 5) and torch.equal(states[0], S)
    assert relative_error(states[3], M[2] @ (M[1] @ (M[0] @ S + B[0]) + B[1]) + B[2]) < 1e-14
    assert torch.equal(merge_affine(S, M[:0], B[:0]), S.unsqueeze(0))


@pytest.mark.parametrize("cuts", [[100], [50, 133], [1, 2, 3, 64, 128, 190]])
@pytest.mark.parametrize("g", [-5.0, -0.05, -1e-4, 0.0, "one open channel"])
def test_splits_are_exact_for_weak_decay_too(inputs, relative_error, cuts: list[int], g: float | str) -> None:
    """Chaining segments by their own end states alone is right only where the decay wipes out the incoming state."""
    x = inputs(1, 200, 1, 1, 16, 16)
    if g == "one open channel":
        x["g"].fill_(-5.0)
        x["g"][..., 3] = 0.0
    else:
        x["g"].fill_(g)
    rule = RULES["kda"].as_dict()
    o_true, state_true = recurrent_rule(**x, **rule)
    o, state = segmented_rule(**x, segment_size=[cuts], **rule)
    assert ((o - o_true).norm(dim=-1) <= 1e-10 * o_true.norm(dim=-1)).all()
    assert relative_error(state, state_true) < 1e-11


def test_a_decay_product_of_nothing_can_leave_a_transition_that_counts() -> None:
    """Two channels, each shut half of the time: both decay products are 2^-92, but a key in between joins them."""
    g = torch.tensor([[0.0, -64.0], [-64.0, 0.0]], dtype=torch.float64)
    k = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64) / 2**0.5
    M, _ = chunk_affine(k, torch.zeros(2, 1, dtype=torch.float64), g, torch.ones(2, dtype=torch.float64))
    assert g.sum(0).exp().max() < 2.0**-92 and abs(float(M[1, 0]) + 0.5) < 1e-12


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(RULES)),
    gate=st.sampled_from(GATES),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_any_cuts_of_a_pack_change_nothing(rule_inputs, relative_error, name, gate, lengths, seed, data) -> None:
    cuts = [sorted(data.draw(st.lists(st.integers(0, length), max_size=4))) for length in lengths]
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    x = rule_inputs(RULES[name], 1, cu_seqlens[-1] + 2, 1, 2, 6, 4, gate, seed, N=len(lengths))
    for key in ("q", "k", "v", "g", "beta"):
        if key in x:
            x[key][:, cu_seqlens[-1] :] = torch.nan
    rule = RULES[name].as_dict()
    o, state = segmented_rule(**x, cu_seqlens=cu_seqlens, segment_size=cuts, chunk_size=16, **rule)
    o_true, state_true = recurrent_rule(**x, cu_seqlens=cu_seqlens, **rule)
    assert relative_error(o, o_true) < 1e-11 and relative_error(state, state_true) < 1e-11


def test_a_state_handed_on_by_another_rank_is_the_state_of_the_whole(rule_inputs, relative_error) -> None:
    """Context parallelism: every rank maps its own tokens, folds the maps before it, and scans from there."""
    x = rule_inputs(RULES["gdn"], 2, 100, 1, 2, 8, 6)
    rule = RULES["gdn"].as_dict()
    o_true, state_true = recurrent_rule(**x, **rule)
    bounds, state = [0, 30, 31, 100], x["initial_state"]
    for start, end in itertools.pairwise(bounds):
        own = {key: tensor[:, start:end] for key, tensor in x.items() if key != "initial_state"}
        o, _, _ = chunk_rule(**own, initial_state=state, **rule)
        assert relative_error(o, o_true[:, start:end]) < 1e-12
        M, B = sequence_affine(own["k"], own["v"], own["g"], own["beta"], decay="scalar", delta=True)
        state = M @ state + B
    assert relative_error(state, state_true) < 1e-12


@pytest.mark.parametrize(
    ("segment_size", "message"),
    [(0, "positive"), ([[3]], "cuts of 2 sequences"), ([[3], [7]], "ascending"), ([[4, 3], []], "ascending")],
)
def test_wrong_cuts_are_refused(inputs, segment_size, message: str) -> None:
    x = inputs(2, 6, 1, 1, 4, 4)
    with pytest.raises(ValueError, match=f"^segment_size must .*{message}"):
        segmented_rule(**x, segment_size=segment_size, **RULES["kda"].as_dict())
