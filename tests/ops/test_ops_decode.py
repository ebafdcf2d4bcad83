"""Recurrent decode on the cpu, against the token recurrence in float64."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from decode_cases import CASES, OPS, SERVING, DecodeCase, decode_truth, make_decode_inputs, relative, run_decode_case, same_bits

import kda_tl

pytestmark = [pytest.mark.tilelang, pytest.mark.usefixtures("cpu_kernels")]

TOLERANCE = 2e-6
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_the_recurrence(case: DecodeCase) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    errors = run_decode_case(replace(case, dtype=torch.float32), "cpu", seed)
    assert max(errors.values()) < TOLERANCE, (errors, seed)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "case", [SERVING, *(case for case in CASES if case.name in ("kda", "pack", "serving-strided", "serving-starts"))],
    ids=lambda case: case.name,
)  # fmt: skip
def test_narrow_states_move_where_they_lie(case: DecodeCase, dtype: torch.dtype) -> None:
    """The pool itself is updated, rounded once, and nothing beside the slots that are named."""
    errors = run_decode_case(replace(case, dtype=torch.float32, state_dtype=dtype), "cpu", 1)
    assert errors["o"] < TOLERANCE and errors["state"] < ROUNDING[dtype], errors


@pytest.mark.parametrize("dtype", ROUNDING)
def test_narrow_activations_are_computed_in_float32(dtype: torch.dtype) -> None:
    for T in (1, 2):
        errors = run_decode_case(replace(SERVING, T=T, dtype=dtype, gate_dtype=dtype), "cpu", 2)
        assert errors["o"] < ROUNDING[dtype] and errors["state"] < TOLERANCE, errors


def test_the_sigmoid_is_not_rounded_to_the_input_type() -> None:
    """sglang#38975: sigmoid(0.5) as 0.62109375 stays in the state for good."""
    e0 = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16)
    e0[..., 0] = 1.0
    ones, logit = torch.ones_like(e0), torch.full((1, 1, 1), 0.5, dtype=torch.bfloat16)
    for op, g in ((kda_tl.recurrent_kda, torch.zeros_like(e0)), (kda_tl.recurrent_gdn, torch.zeros(1, 1, 1))):
        _, state = op(e0, e0, ones, g, logit, output_final_state=True, use_beta_sigmoid_in_kernel=True)
        torch.testing.assert_close(state[0, 0, 0], torch.full((128,), 0.62245935), rtol=1e-7, atol=0)
        assert not state[0, 0, 1:].any()


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_the_error_of_the_state_does_not_grow(rule: str) -> None:
    """4096 tokens in bfloat16 inputs, weak gates: 3584 in one launch, 512 in launches of their own, in place."""
    case = DecodeCase(
        "long", rule=rule, N=1, T=4096, H=1, HV=1, gate="bounded", l2norm=True, beta="sigmoid", gate_dtype=torch.bfloat16
    )
    x = make_decode_inputs(case, "cpu", 3)
    x.args["dt_bias"] = torch.full_like(x.args["dt_bias"], -8.0)
    truth_o, (truth_state,) = decode_truth(case, x)
    pool = x.args.pop("initial_state").clone()
    tokens = {name: x.args.pop(name) for name in ("q", "k", "v", "g", "beta")}
    outputs = []
    for first, last in [(0, 3584), *((t, t + 1) for t in range(3584, 4096))]:
        part = {name: tensor[:, first:last] for name, tensor in tokens.items()}
        o, _ = OPS[rule](**part, **{**x.args, "inplace": True}, initial_state=pool)
        outputs.append(o)
    assert relative(pool[0].transpose(-1, -2), truth_state) < 1e-5
    assert relative(torch.cat(outputs, 1), truth_o) < ROUNDING[torch.bfloat16]


@pytest.mark.parametrize(
    ("indices", "null_index", "moved"),
    [
        ([2, -1, -1], -1, {2}),
        ([2, -1, -1], None, {2}),
        ([2, 0, 0], 0, {2}),
        ([0, 0, 0], 0, set()),
        ([4, -7, 2**31 - 1], None, set()),
    ],
)
def test_padding_touches_no_slot(indices: list[int], null_index: int | None, moved: set[int]) -> None:
    """tokenspeed#700, vllm#50021: the pattern in every other slot is bit-identical after 100 steps."""
    case = replace(SERVING, N=3, null=0, dtype=torch.float32, slots=4)
    x = make_decode_inputs(case, "cpu", 4)
    pool = x.args["initial_state"]
    x.args |= {"state_indices": torch.tensor(indices, dtype=torch.int32), "null_index": null_index}
    before = pool.clone()
    for row, slot in enumerate(indices):
        if slot not in moved:
            x.args["v"][row] = torch.nan
    for _ in range(100):
        o, final = kda_tl.recurrent_kda(**x.args)
    assert final is pool
    for row, slot in enumerate(indices):
        assert bool(o[row].any()) == (slot in moved) and o[row].isfinite().all()
    for slot in range(4):
        assert same_bits(pool[slot], before[slot]) == (slot not in moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_that_is_no_contiguous_tensor(dtype: torch.dtype) -> None:
    """flashinfer#3118: the caller's memory moves on, the other half of the storage does not."""
    case = replace(SERVING, N=2, null=0, dtype=torch.float32, state_dtype=dtype, slots=8)
    x = make_decode_inputs(case, "cpu", 5)
    storage = torch.randn(8, 2, case.HV, case.V, case.K).to(dtype)
    before = storage.clone()
    x.args |= {"initial_state": storage[:, 1], "state_indices": torch.tensor([6, 3])}
    _, final = kda_tl.recurrent_kda(**x.args)
    assert final.data_ptr() == storage[:, 1].data_ptr() and final.stride() == storage[:, 1].stride()
    assert same_bits(storage[:, 0], before[:, 0])
    changed = [not same_bits(storage[s, 1], before[s, 1]) for s in range(8)]
    assert changed == [s in (3, 6) for s in range(8)]


def test_a_layout_is_what_lies_in_memory() -> None:
    """A [K, V] view of a [V, K] pool gives the same bits as the pool itself."""
    x = make_decode_inputs(replace(SERVING, dtype=torch.float32), "cpu", 6).args
    other = x["initial_state"].clone()
    o, state = kda_tl.recurrent_kda(**x)
    o_view, view = kda_tl.recurrent_kda(**{**x, "initial_state": other.transpose(-1, -2), "state_v_first": False})
    assert same_bits(o, o_view) and same_bits(state, other) and view.stride() == other.transpose(-1, -2).stride()


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_nan_stays_in_its_request(name: str) -> None:
    x = make_decode_inputs(DecodeCase("nan", dtype=torch.float32, H=4), "cpu", 7).args
    o, state = kda_tl.recurrent_kda(**x)
    x[name] = x[name].clone()
    x[name].view(3, -1)[1] = torch.nan
    o_bad, state_bad = kda_tl.recurrent_kda(**x)
    assert same_bits(o[[0, 2]], o_bad[[0, 2]]) and same_bits(state[[0, 2]], state_bad[[0, 2]])
    assert o_bad[1].isnan().any()


def test_a_decay_of_minus_infinity_clears_a_channel() -> None:
    x = make_decode_inputs(DecodeCase("cleared", dtype=torch.float32, beta="absent"), "cpu", 8).args
    x["g"][..., 5] = -torch.inf
    x["k"][..., 5] = 0.0
    o, state = kda_tl.recurrent_kda(**x)
    assert o.isfinite().all() and state.isfinite().all() and not state[..., 5].any()


@pytest.mark.parametrize("indexed", [False, True])
def test_no_tokens_and_no_requests(indexed: bool) -> None:
    x = make_decode_inputs(DecodeCase("empty", N=2, slots=4 if indexed else 0, dtype=torch.float32), "cpu", 9).args
    none = {name: x[name][:, :0] for name in ("q", "k", "v", "g", "beta")}
    o, state = kda_tl.recurrent_kda(**{**x, **none})
    named = x["state_indices"].long() if indexed else torch.arange(2)
    assert o.shape == (2, 0, 4, 128) and same_bits(state, x["initial_state"][named])
    none = {name: x[name][:0] for name in ("q", "k", "v", "g", "beta")}
    rest = {"state_indices": x["state_indices"][:0]} if indexed else {"initial_state": x["initial_state"][:0]}
    o, state = kda_tl.recurrent_kda(**{**x, **none, **rest})
    assert o.shape == (0, 1, 4, 128) and state.shape == (0, 4, 128, 128)


def test_explain_names_the_kernel() -> None:
    x = make_decode_inputs(replace(SERVING, dtype=torch.float32), "cpu", 10).args
    text = str(kda_tl.explain(kda_tl.recurrent_kda, **x))
    assert "recurrent_decode[" in text and "gate softplus" in text and "MISSING" not in text
    x = make_decode_inputs(DecodeCase("gdn", rule="gdn", dtype=torch.float32), "cpu", 10).args
    assert "recurrent_gdn on cpu" in str(kda_tl.explain("recurrent_gdn", **x))
