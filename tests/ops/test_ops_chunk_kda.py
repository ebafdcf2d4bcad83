"""chunk_kda on cpu tensors, kernel to dispatcher, against the float64 token recurrence."""

from __future__ import annotations

import inspect
import itertools
import threading
from typing import Any

import pytest
import torch
from chunk_kda_cases import nan_filled_memory, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from op_inputs import GATES, make, offsets, poisoned, sequences
from torch import Tensor

import kda_tl
from kda_tl.reference import recurrent_kda
from kda_tl.runtime import dispatcher

pytestmark = pytest.mark.usefixtures("cpu_kernels")

LIMIT = 1e-5
PACK = [0, 1, 63, 0, 64, 65, 1, 1, 130, 0]


def run(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """chunk_kda where every torch.empty is full of NaN; the inputs must come out as they went in."""
    before = {name: tensor.clone() for name, tensor in x.items()}
    with nan_filled_memory():
        o, state = kda_tl.chunk_kda(**x, output_final_state=True, **options)
    assert state is not None
    for name, tensor in x.items():
        assert torch.equal(tensor.nan_to_num(9.0), before[name].nan_to_num(9.0)), f"{name} was written to"
    return o, state


def check(
    x: dict[str, Tensor], cu_seqlens: list[int] | None = None, index_dtype: torch.dtype = torch.int32, **options: Any
) -> None:
    """Every sequence on its own, so that a large one hides nothing."""
    given_offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=index_dtype)
    o, state = run(x, cu_seqlens=given_offsets, **options)
    o_true, state_true = recurrent_kda(**x, cu_seqlens=cu_seqlens, **options)
    assert o.shape == o_true.shape and o.dtype == x["v"].dtype
    assert state.shape == state_true.shape and state.dtype == torch.float32 and state.is_contiguous()
    for n, (b, tokens) in enumerate(sequences(x, cu_seqlens)):
        assert relative_error(o[b, tokens], o_true[b, tokens]) < LIMIT, f"o of sequence {n}"
        assert relative_error(state[n], state_true[n]) < LIMIT, f"state of sequence {n}"
    if cu_seqlens is not None:
        assert not o[:, cu_seqlens[-1] :].any()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_one_sequence(T: int, gate: str) -> None:
    check(make(T, H=1, HV=2, gate=gate))


@pytest.mark.parametrize("gate", GATES)
def test_a_pack_with_empty_and_one_token_sequences_and_a_tail(gate: str) -> None:
    x = make(sum(PACK) + 70, HV=2, gate=gate, N=len(PACK))
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, sum(PACK) :] = torch.nan
    check(x, offsets(PACK))


@pytest.mark.parametrize("lengths", [[63, 1], [64, 1], [1, 1], [100, 50], [64, 64], [1] * 70, [99, 65, 32, 16, 8, 5, 1]])
@pytest.mark.parametrize("tail", [0, 106])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packs(lengths: list[int], tail: int, index_dtype: torch.dtype) -> None:
    check(make(sum(lengths) + tail, N=len(lengths), gate="half open"), offsets(lengths), index_dtype)


@pytest.mark.parametrize(("B", "T"), [(2, 63), (2, 65), (3, 130), (5, 1)])
def test_dense_batches(B: int, T: int) -> None:
    check(make(T, B=B, HV=2, gate="strong"))


@pytest.mark.parametrize(("H", "HV"), [(1, 3), (2, 2), (2, 8), (3, 3), (3, 12), (5, 5)])
def test_head_counts(H: int, HV: int) -> None:
    check(make(70, H=H, HV=HV, gate="half open"))


@pytest.mark.parametrize("lengths", [None, PACK])
@pytest.mark.parametrize("T", [10, 64, 65, 128])
def test_both_state_layouts(T: int, lengths: list[int] | None) -> None:
    x = make(T if lengths is None else sum(lengths), HV=2, N=1 if lengths is None else len(lengths))
    o, state = run(x, cu_seqlens=None if lengths is None else torch.tensor(offsets(lengths)))
    x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
    check(x, None if lengths is None else offsets(lengths), state_v_first=True)
    o_v_first, state_v_first = run(
        x, cu_seqlens=None if lengths is None else torch.tensor(offsets(lengths)), state_v_first=True
    )
    assert torch.equal(o_v_first, o) and torch.equal(state_v_first, state.transpose(-1, -2))


@pytest.mark.parametrize("scale", [None, 1.0, 0.25, -3.0, 0.0])
def test_scale(scale: float | None) -> None:
    check(make(100), scale=scale)


def test_without_an_initial_state_it_is_zero() -> None:
    x = make(100, HV=2)
    del x["initial_state"]
    check(x)
    lengths = [0, 30, 70]
    check(x, offsets(lengths))
    _, state = run(x, cu_seqlens=torch.tensor(offsets(lengths)))
    assert not state[0].any()


def test_no_final_state_where_none_is_asked_for() -> None:
    x = make(100)
    o, state = kda_tl.chunk_kda(**x)
    assert state is None
    assert torch.equal(o, run(x)[0])


def test_the_order_of_arguments_is_that_of_flash_linear_attention() -> None:
    names = [
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound",
        "disable_recompute", "return_intermediate_states", "state_v_first", "cu_seqlens", "cu_seqlens_cpu", "cp_context",
    ]  # fmt: skip
    assert list(inspect.signature(kda_tl.chunk_kda).parameters)[: len(names)] == names
    x = make(10)
    by_position = kda_tl.chunk_kda(x["q"], x["k"], x["v"], x["g"], x["beta"], 0.5, x["initial_state"], True)
    by_name = run(x, scale=0.5)
    assert all(torch.equal(a, b) for a, b in zip(by_position, by_name))


# -- what is applied to raw inputs: formulas written out here, in float64 -------------------------------------------------


def raw_inputs(T: int = 130) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Raw q, k, gate input and beta logits, A_log [HV] and dt_bias [HV * K]; H = 2, HV = 4."""
    x = make(T, H=2, HV=4)
    generator = torch.Generator().manual_seed(1)
    x["q"] *= 3.0
    x["k"] *= 7.0
    x["g"] = torch.randn(x["g"].shape, generator=generator)
    x["beta"] = torch.randn(x["beta"].shape, generator=generator)
    A_log = torch.empty(4).uniform_(1, 16, generator=generator).log()
    return x, A_log, torch.randn(4 * 128, generator=generator)


def l2norm_truth(x: Tensor) -> Tensor:
    return x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("bias_shape", [(512,), (4, 128), None])
def test_gate_norm_and_sigmoid_in_the_op(allow_neg_eigval: bool, bias_shape: tuple[int, ...] | None) -> None:
    x, A_log, dt_bias = raw_inputs()
    bias = 0.0 if bias_shape is None else dt_bias.double().reshape(4, 128)
    o, state = run(
        x, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=allow_neg_eigval, A_log=A_log, dt_bias=None if bias_shape is None else dt_bias.reshape(bias_shape),
    )  # fmt: skip
    true = {
        "q": l2norm_truth(x["q"]),
        "k": l2norm_truth(x["k"]),
        "v": x["v"],
        "g": -A_log.double().exp()[:, None] * (1 + (x["g"].double() + bias).exp()).log(),
        "beta": (2 if allow_neg_eigval else 1) / (1 + (-x["beta"].double()).exp()),
        "initial_state": x["initial_state"],
    }
    o_true, state_true = recurrent_kda(**true)
    assert relative_error(o, o_true) < LIMIT and relative_error(state, state_true) < LIMIT


def test_norm_of_narrow_inputs_is_not_rounded() -> None:
    x, _, _ = raw_inputs()
    x |= {"g": GATES["weak"](x["g"].sigmoid()), "beta": x["beta"].sigmoid()}
    x |= {name: x[name].bfloat16() for name in ("q", "k", "v")}
    _, state = run(x, use_qk_l2norm_in_kernel=True)
    _, state_true = recurrent_kda(**{**x, "q": l2norm_truth(x["q"]), "k": l2norm_truth(x["k"])})
    assert relative_error(state, state_true) < LIMIT


@pytest.mark.parametrize("with_A_log", [False, True])
def test_bounded_gate(with_A_log: bool) -> None:
    x, A_log, dt_bias = raw_inputs()
    x["q"], x["k"], x["beta"] = l2norm_truth(x["q"]).float(), l2norm_truth(x["k"]).float(), x["beta"].sigmoid()
    rate = A_log.double().exp()[:, None] if with_A_log else 1.0
    o, state = run(x, use_gate_in_kernel=True, lower_bound=-5.0, A_log=A_log if with_A_log else None, dt_bias=dt_bias)
    g = -5.0 / (1 + (-rate * (x["g"].double() + dt_bias.double().reshape(4, 128))).exp())
    o_true, state_true = recurrent_kda(**{**x, "g": g})
    assert relative_error(o, o_true) < LIMIT and relative_error(state, state_true) < LIMIT


def test_the_bounded_gate_is_no_clamped_softplus() -> None:
    """lightseekorg/tokenspeed#847: a = 0, A_log = 0, lower bound -5 is a decay of -2.5, not of -0.693."""
    x = make(1)
    x["g"], x["beta"] = torch.zeros(1, 1, 1, 128), torch.zeros(1, 1, 1)
    _, state = run(x, use_gate_in_kernel=True, lower_bound=-5.0, A_log=torch.zeros(1), dt_bias=torch.zeros(128))
    assert torch.allclose(state, 0.0820849986 * x["initial_state"], rtol=1e-6, atol=0)


def test_sigmoid_of_beta_is_not_rounded_to_the_input_type() -> None:
    """sgl-project/sglang#38975: the logit 0.5 in bfloat16 writes 0.62245935, not 0.62109375."""
    k = torch.nn.functional.one_hot(torch.zeros(1, 1, 1, dtype=torch.int64), 128).bfloat16()
    v, g, beta = torch.ones_like(k), torch.zeros(1, 1, 1, 128), torch.full((1, 1, 1), 0.5).bfloat16()
    _, state = kda_tl.chunk_kda(k, k, v, g, beta, output_final_state=True, use_beta_sigmoid_in_kernel=True)
    assert torch.allclose(state[0, 0, 0], torch.full((128,), 0.62245935), rtol=1e-7, atol=0)
    assert not state[0, 0, 1:].any()


# -- gates ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [-5.9, -6.0, -10.0, -20.0, -80.0, "alternating"])
def test_strong_constant_gates(gate: float | str) -> None:
    x = make(64)
    x["g"].zero_()
    if gate == "alternating":
        x["g"][:, 1::2] = -20.0
    else:
        x["g"] += gate
    check(x)


@pytest.mark.parametrize("row", [0, 16, 32, 48, 63, 64])
@pytest.mark.parametrize("value", [-50.0, -200.0, -1000.0])
def test_a_strong_gate_on_one_row(row: int, value: float) -> None:
    x = make(100)
    x["g"][:, row] = value
    check(x)


@pytest.mark.parametrize("T", [7, 64, 65, 256])
def test_an_open_gate_is_the_delta_rule(T: int) -> None:
    """fla#104. The recurrence without a decay, written out."""
    x = make(T, gate="zero")
    o, state = run(x, scale=1.0)
    S = x["initial_state"][0, 0].double()
    for t in range(T):
        q, k, v, beta = (x[name][0, t, 0].double() for name in ("q", "k", "v", "beta"))
        S = S + torch.outer(k, beta * (v - k @ S))
        assert torch.allclose(o[0, t, 0].double(), q @ S, atol=1e-5, rtol=0)
    assert relative_error(state[0, 0], S) < LIMIT


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_values_and_states_of_any_magnitude(factor: float) -> None:
    x = make(200, HV=2, gate="half open")
    for name in ("v", "initial_state"):
        x[name] *= factor
    check(x)


def test_values_and_states_of_unlike_magnitude() -> None:
    for values, states in ((1e-6, 1e6), (1e6, 1e-6)):
        x = make(100, gate="strong")
        x["v"] *= values
        x["initial_state"] *= states
        check(x)


# -- memory --------------------------------------------------------------------------------------------------------------


def spread(x: Tensor) -> Tensor:
    """The same values, two elements apart."""
    return x.repeat_interleave(2, -1)[..., ::2]


def misaligned(x: Tensor) -> Tensor:
    """The same values, 4 bytes past an aligned start."""
    flat = torch.full((x.numel() + 1,), torch.nan)[1:]
    assert flat.data_ptr() % 16 == 4
    return flat.copy_(x.flatten()).view(x.shape)


STRIDED = {
    "heads apart": lambda x: poisoned(x, strided=True),
    "elements apart": spread,
    "misaligned": misaligned,
    "tokens last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "odd rows": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "negated view": lambda x: torch._neg_view(-x),
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("how", STRIDED)
@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("g",), ("beta",), ("q", "k", "v", "g", "beta")])
def test_strided_and_misaligned_inputs(how: str, names: tuple[str, ...]) -> None:
    x = make(70, B=2, H=2, HV=4)
    o, state = run(x)
    for name in names:
        x[name] = STRIDED[how](x[name])
    o_strided, state_strided = run(x)
    assert torch.equal(o_strided, o) and torch.equal(state_strided, state)


@pytest.mark.parametrize("how", STRIDED)
def test_what_reaches_the_kernels_is_aligned(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows start at multiples of 16 bytes, as a GPU loads them; where they do already, nothing is copied."""
    load = dispatcher.kernel
    seen: list[Tensor] = []

    def spy(*key: Any) -> Any:
        kernel = load(*key)

        def call(*arguments: Any) -> None:
            seen.extend(x for x in arguments if isinstance(x, Tensor) and x.dim() == 4 and x.shape[:2] == (2, 70))
            kernel(*arguments)

        return call

    monkeypatch.setattr(dispatcher, "kernel", spy)
    x = make(70, B=2, H=2, HV=4)
    x = {name: STRIDED[how](tensor) if name != "initial_state" else tensor for name, tensor in x.items()}
    run(x)
    for tensor in seen:
        assert tensor.data_ptr() % 16 == 0 and tensor.stride(-1) == 1
        assert all(stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1])
    if how in ("heads apart", "heads first"):
        assert {tensor.data_ptr() for tensor in seen} >= {x[name].data_ptr() for name in ("q", "k", "v", "g")}


def test_expanded_inputs() -> None:
    x = make(70, H=2, HV=2)
    for name in ("q", "k", "v", "g", "beta"):
        x[name] = x[name][:, :1].expand_as(x[name])
    check(x)


@pytest.mark.parametrize(
    "how",
    [spread, misaligned, STRIDED["negated view"], lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)],
    ids=["elements apart", "misaligned", "negated view", "transposed"],
)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_strided_and_misaligned_states(how, state_v_first: bool) -> None:
    x = make(70, B=2, HV=2)
    o, state = run(x, state_v_first=state_v_first)
    x["initial_state"] = how(x["initial_state"])
    o_strided, state_strided = run(x, state_v_first=state_v_first)
    assert torch.equal(o_strided, o) and torch.equal(state_strided, state)


def test_slices_of_a_pool_as_initial_state() -> None:
    x = make(40, B=3, HV=2)
    pool = torch.full((9, 2, 128, 128), torch.nan)
    pool[1:7:2] = x["initial_state"]
    x["initial_state"] = pool[1:7:2]
    check(x)


def test_offsets_that_are_a_slice() -> None:
    """vllm-project/vllm#52413: index tensors are slices of buffers that are reused."""
    x = make(100, N=2)
    buffer = torch.tensor([77, 0, 30, 100, 88], dtype=torch.int32)
    o, state = run(x, cu_seqlens=torch.tensor([0, 30, 100]))
    for sliced in (buffer[1:4], torch.stack([buffer, buffer], 1)[1:4, 0]):
        assert all(torch.equal(a, b) for a, b in zip(run(x, cu_seqlens=sliced), (o, state)))


def test_offsets_that_change_in_place() -> None:
    """QwenLM/FlashQLA#23: nothing may be remembered by the identity or the address of the offsets."""
    x = make(100, N=2)
    cu_seqlens = torch.tensor([0, 30, 100])
    for middle in (30, 64, 0, 99):
        cu_seqlens[1] = middle
        o, state = run(x, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens.clone())
        o_true, state_true = recurrent_kda(**x, cu_seqlens=cu_seqlens)
        assert relative_error(o, o_true) < LIMIT and relative_error(state, state_true) < LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    x = make(130, HV=2, gate="half open")
    narrow = {name: tensor.to(dtype) if name in ("q", "k", "v") else tensor for name, tensor in x.items()}
    wide = {name: tensor.float() for name, tensor in narrow.items()}
    o, state = run(narrow)
    o_wide, state_wide = run(wide)
    assert o.dtype == dtype and state.dtype == torch.float32
    assert torch.equal(o, o_wide.to(dtype)) and torch.equal(state, state_wide)
    check(wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gates_and_betas(dtype: torch.dtype) -> None:
    x = make(130, HV=3, gate="half open")
    x["g"], x["beta"] = x["g"].to(dtype), x["beta"].to(dtype)
    check(x)


# -- nothing and almost nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "cu_seqlens"),
    [(2, 0, None), (0, 5, None), (0, 0, None), (1, 0, [0, 0, 0]), (1, 0, [0]), (1, 7, [0]), (1, 7, [0, 0, 0])],
)
def test_no_tokens_or_no_sequences(B: int, T: int, cu_seqlens: list[int] | None, with_state: bool, state_v_first: bool) -> None:
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    x = make(T, B=B, H=2, HV=4, N=N)
    if cu_seqlens is not None:
        for name in ("q", "k", "v", "g", "beta"):
            x[name].fill_(torch.nan)
    initial_state = x["initial_state"] if with_state else torch.zeros_like(x["initial_state"])
    if not with_state:
        del x["initial_state"]
    offsets_tensor = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    for dtype in (torch.float32, torch.bfloat16):
        typed = {name: tensor.to(dtype) if name in ("q", "k", "v") else tensor for name, tensor in x.items()}
        o, state = run(typed, cu_seqlens=offsets_tensor, state_v_first=state_v_first)
        assert o.shape == (B, T, 4, 128) and o.dtype == dtype and not o.any()
        assert torch.equal(state, initial_state)
        assert state.dtype == torch.float32 and (state.numel() == 0 or state.data_ptr() != initial_state.data_ptr())


# -- independence --------------------------------------------------------------------------------------------------------


def test_each_sequence_and_head_equals_its_own_run() -> None:
    x = make(sum(PACK), H=2, HV=4, gate="strong", N=len(PACK))
    o, state = run(x, cu_seqlens=torch.tensor(offsets(PACK)))
    for n, (start, end) in enumerate(itertools.pairwise(offsets(PACK))):
        for head in (0, 3):
            own = {name: x[name][:, start:end, head // 2 : head // 2 + 1] for name in ("q", "k")}
            own |= {name: x[name][:, start:end, head : head + 1] for name in ("v", "g", "beta")}
            own["initial_state"] = x["initial_state"][n : n + 1, head : head + 1]
            o_own, state_own = run(own)
            assert torch.equal(o[:, start:end, head : head + 1], o_own)
            assert torch.equal(state[n : n + 1, head : head + 1], state_own)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_nan_and_inf_stay_in_their_sequence_and_head(name: str, value: float) -> None:
    x = make(sum(PACK) + 30, H=2, HV=4, N=len(PACK))
    cu_seqlens = torch.tensor(offsets(PACK))
    o, state = run(x, cu_seqlens=cu_seqlens)
    sequence, start = 5, offsets(PACK)[5]  # 65 tokens
    if name == "initial_state":
        x[name][sequence, 2, 3, 4] = value
    else:
        x[name][0, start + 63, 1 if name in ("q", "k") else 2] = value
    o_bad, state_bad = run(x, cu_seqlens=cu_seqlens)
    heads = [2, 3] if name in ("q", "k") else [2]
    spoilt = torch.zeros(o.shape[1:3], dtype=torch.bool)
    spoilt[start : start + PACK[sequence], heads] = True
    assert torch.equal(o_bad[0, ~spoilt], o[0, ~spoilt])
    assert not o_bad[0, spoilt].isfinite().all()
    spoilt_states = torch.zeros(state.shape[:2], dtype=torch.bool)
    spoilt_states[sequence, heads] = True
    assert torch.equal(state_bad[~spoilt_states], state[~spoilt_states])
    assert name == "q" or not state_bad[spoilt_states].isfinite().all()


def test_nan_stays_in_its_batch_row() -> None:
    x = make(70, B=3, HV=2)
    o, state = run(x)
    x["k"][1, 69] = torch.nan
    o_bad, state_bad = run(x)
    assert torch.equal(o_bad[::2], o[::2]) and torch.equal(state_bad[::2], state[::2])
    assert o_bad[1].isnan().any() and state_bad[1].isnan().any()


@pytest.mark.parametrize("T", [17, 22, 33, 47, 64, 65, 130])
def test_outputs_do_not_depend_on_the_future(T: int) -> None:
    """fla#1240: bit-identical outputs before a token whose gate, or anything else, changes."""
    x = make(T + 1, H=2, HV=2)
    x["g"] = -5.0 * torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(5))
    x["beta"].fill_(1.0)
    now = {name: tensor[:, :T] if name != "initial_state" else tensor for name, tensor in x.items()}
    o, _ = run(now)
    for name in ("q", "k", "v", "g", "beta"):
        changed = now[name].clone()
        changed[:, -1] = -4.999 if name == "g" else 1e3 * changed[:, -1]
        o_changed, _ = run({**now, name: changed})
        assert torch.equal(o_changed[:, : T - 1], o[:, : T - 1])
        assert not torch.equal(o_changed[:, -1], o[:, -1])
    o_longer, _ = run(x)
    assert torch.equal(o_longer[:, :T], o)


def test_a_state_carries_a_sequence_on() -> None:
    x = make(200, HV=2, gate="half open")
    _, state_true = run(x)
    for cut in (1, 64, 100, 199):
        first = {name: tensor[:, :cut] if name != "initial_state" else tensor for name, tensor in x.items()}
        second = {name: tensor[:, cut:] for name, tensor in x.items() if name != "initial_state"}
        _, middle = run(first)
        _, state = run({**second, "initial_state": middle})
        assert relative_error(state, state_true.double()) < LIMIT


def test_threads_at_the_same_time() -> None:
    problems = [make(130, HV=2, seed=seed) for seed in range(4)]
    expected = [kda_tl.chunk_kda(**x, output_final_state=True) for x in problems]
    found: dict[tuple[int, int], Any] = {}

    def work(index: int) -> None:
        for repeat in range(5):
            found[index, repeat] = kda_tl.chunk_kda(**problems[index], output_final_state=True)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    for (index, _), results in found.items():
        assert all(torch.equal(a, b) for a, b in zip(results, expected[index]))


# -- anything ------------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    H = draw(st.integers(1, 2))
    problem: dict[str, Any] = {
        "H": H,
        "HV": H * draw(st.integers(1, 2)),
        "gate": draw(st.sampled_from(sorted(GATES))),
        "seed": draw(st.integers(0, 2**31)),
        "strided": draw(st.booleans()),
    }
    options = {
        "state_v_first": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 1.0, 0.3])),
        "index_dtype": draw(st.sampled_from([torch.int32, torch.int64])),
        "with_state": draw(st.booleans()),
    }
    if draw(st.booleans()):
        lengths = draw(st.lists(st.one_of(st.integers(0, 2), st.integers(0, 70)), max_size=4))
        problem |= {"T": sum(lengths) + draw(st.integers(0, 70)), "N": len(lengths)}
        return {"problem": problem, **options, "cu_seqlens": offsets(lengths)}
    problem |= {"B": draw(st.integers(1, 2)), "T": draw(st.integers(0, 140))}
    return {"problem": problem, **options, "cu_seqlens": None}


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(case=problems())
def test_any_problem(case: dict[str, Any]) -> None:
    x = make(**case.pop("problem"))
    if not case.pop("with_state"):
        del x["initial_state"]
    check(x, **case)
