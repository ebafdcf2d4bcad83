from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kda_tl.reference import recurrent_kda


@pytest.mark.parametrize("gate", ["none", "mild", "bounded", "strong", "constant -60", "half open", "masked"])
@pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 2), (2, 6)])
def test_recurrence_against_a_token_loop(inputs, token_loop, relative_error, gate: str, H: int, HV: int) -> None:
    x = inputs(2, 21, H, HV, 8, 12, gate)
    o_true, state_true = token_loop(**x, scale=8**-0.5)
    o, state = recurrent_kda(**x)
    assert o.dtype == state.dtype == torch.float64
    assert relative_error(o, o_true) < 1e-13
    assert relative_error(state, state_true) < 1e-13


def test_defaults_scale_and_no_initial_state(inputs, token_loop, relative_error) -> None:
    x = inputs(1, 9, 1, 2, 8, 4)
    x["initial_state"].zero_()
    without = {name: tensor for name, tensor in x.items() if name != "initial_state"}
    for scale in (None, 1.0, 0.3):
        o_true, state_true = token_loop(**x, scale=8**-0.5 if scale is None else scale)
        o, state = recurrent_kda(**without, scale=scale)
        assert relative_error(o, o_true) < 1e-13 and relative_error(state, state_true) < 1e-13


def test_state_v_first_is_a_layout_only(inputs) -> None:
    x = inputs(2, 9, 1, 2, 8, 4)
    o, state = recurrent_kda(**x)
    x["initial_state"] = x["initial_state"].transpose(-1, -2)
    o_v, state_v = recurrent_kda(**x, state_v_first=True)
    assert torch.equal(o_v, o) and torch.equal(state_v, state.transpose(-1, -2))
    assert state_v.is_contiguous()


def test_kda_with_equal_decays_is_gdn(inputs, relative_error) -> None:
    x = inputs(1, 30, 1, 1, 8, 6)
    decay = x["g"][..., 0]
    S, o_true = x["initial_state"][0, 0].numpy(), []
    q, k, v, beta = (x[name][0, :, 0].numpy() for name in ("q", "k", "v", "beta"))
    for t in range(30):
        # Gated DeltaNet: S <- alpha (I - beta k k^T) S + beta k v^T, with a scalar alpha.
        alpha = np.exp(decay[0, t, 0].item())
        S = alpha * (np.eye(8) - beta[t] * np.outer(k[t], k[t])) @ S + beta[t] * np.outer(k[t], v[t])
        o_true.append(8**-0.5 * q[t] @ S)
    for g in (decay, decay.unsqueeze(-1).expand(-1, -1, -1, 8)):
        o, state = recurrent_kda(**{**x, "g": g})
        assert relative_error(o[0, :, 0], torch.tensor(np.array(o_true))) < 1e-13
        assert relative_error(state[0, 0], torch.tensor(S)) < 1e-13


@pytest.mark.parametrize("T", [7, 50, 64, 65, 256])
def test_gate_of_zero_is_the_ungated_delta_rule(inputs, relative_error, T: int) -> None:
    x = inputs(1, T, 1, 1, 8, 6, "none")
    S, o_true = x["initial_state"][0, 0].numpy(), []
    q, k, v, beta = (x[name][0, :, 0].numpy() for name in ("q", "k", "v", "beta"))
    for t in range(T):
        S = S + beta[t] * np.outer(k[t], v[t] - k[t] @ S)
        o_true.append(8**-0.5 * q[t] @ S)
    o, state = recurrent_kda(**x)
    assert relative_error(o[0, :, 0], torch.tensor(np.array(o_true))) < 1e-12
    assert relative_error(state[0, 0], torch.tensor(S)) < 1e-12


def test_minus_infinity_clears_the_state(inputs) -> None:
    x = inputs(1, 8, 1, 1, 4, 4)
    x["g"][:, 3] = -torch.inf
    o, state = recurrent_kda(**x)
    tail = {name: tensor[:, 3:] for name, tensor in x.items() if name != "initial_state"}
    o_tail, state_tail = recurrent_kda(**tail)
    assert torch.equal(o[:, 3:], o_tail) and torch.equal(state, state_tail)


@pytest.mark.parametrize("cu_seqlens", [[0, 5, 5, 6, 17], [0, 0, 17], [0, 17], [0, 1, 2], [0, 9, 17, 17], [0, 3, 12]])
def test_each_sequence_of_a_pack_equals_its_own_run(inputs, relative_error, cu_seqlens: list[int]) -> None:
    T, N = 17, len(cu_seqlens) - 1
    x = inputs(1, T, 1, 2, 8, 4, N=N)
    o, state = recurrent_kda(**x, cu_seqlens=cu_seqlens)
    assert o.shape == (1, T, 2, 4) and state.shape == (N, 2, 8, 4)
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        own = {name: tensor[:, start:end] for name, tensor in x.items()}
        own["initial_state"] = x["initial_state"][n : n + 1]
        o_own, state_own = recurrent_kda(**own)
        assert relative_error(o[:, start:end], o_own) < 1e-14
        assert relative_error(state[n : n + 1], state_own) < 1e-14
    assert torch.equal(o[:, cu_seqlens[-1] :], torch.zeros_like(o[:, cu_seqlens[-1] :]))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, tuple, np.array])
def test_cu_seqlens_kinds(inputs, kind) -> None:
    x = inputs(1, 9, 1, 1, 4, 4, N=2)
    packed = torch.tensor([0, 4, 9], dtype=kind) if isinstance(kind, torch.dtype) else kind([0, 4, 9])
    o, state = recurrent_kda(**x, cu_seqlens=packed)
    o_list, state_list = recurrent_kda(**x, cu_seqlens=[0, 4, 9])
    assert torch.equal(o, o_list) and torch.equal(state, state_list)


@pytest.mark.parametrize(
    ("B", "T", "cu_seqlens", "N"), [(2, 0, None, 2), (0, 3, None, 0), (1, 0, [0, 0, 0], 2), (1, 4, [0], 0)]
)
def test_no_tokens_or_no_sequences(inputs, B: int, T: int, cu_seqlens: list[int] | None, N: int) -> None:
    x = inputs(B, T, 1, 2, 8, 4, N=N)
    o, state = recurrent_kda(**x, cu_seqlens=cu_seqlens)
    assert torch.equal(o, torch.zeros(B, T, 2, 4, dtype=torch.float64))
    assert torch.equal(state, x["initial_state"])
    assert N == 0 or state.data_ptr() != x["initial_state"].data_ptr()
    del x["initial_state"]
    assert torch.equal(recurrent_kda(**x, cu_seqlens=cu_seqlens)[1], torch.zeros(N, 2, 8, 4, dtype=torch.float64))


def test_outputs_do_not_depend_on_the_future(inputs) -> None:
    x = inputs(1, 22, 2, 2, 8, 8, "bounded")
    o, _ = recurrent_kda(**x)
    for name in ("q", "k", "v", "g", "beta"):
        changed = {**x, name: x[name].clone()}
        changed[name][:, 15:] = torch.nan
        assert torch.equal(recurrent_kda(**changed)[0][:, :15], o[:, :15])


def test_nan_stays_in_its_sequence_and_head(inputs) -> None:
    x = inputs(1, 12, 2, 2, 4, 4, N=3)
    o, state = recurrent_kda(**x, cu_seqlens=[0, 4, 8, 10])
    x["g"][:, 5, 1] = torch.nan
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 10:] = torch.nan
    o_nan, state_nan = recurrent_kda(**x, cu_seqlens=[0, 4, 8, 10])
    clean = torch.ones(12, 2, dtype=torch.bool)
    clean[5:8, 1] = False
    assert torch.equal(o_nan[0, clean], o[0, clean]) and o_nan[0, ~clean].isnan().all()
    assert torch.equal(state_nan[:, 0], state[:, 0]) and torch.equal(state_nan[::2], state[::2])


def test_gradients(inputs) -> None:
    x = {name: tensor.requires_grad_() for name, tensor in inputs(1, 5, 1, 2, 3, 2, N=3).items()}

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return recurrent_kda(**dict(zip(x, tensors)), cu_seqlens=[0, 3, 3, 4])

    assert torch.autograd.gradcheck(run, tuple(x.values()))


def test_gradients_past_the_pack_are_zero_whatever_lies_there(inputs) -> None:
    x = inputs(1, 9, 1, 1, 4, 4, N=1)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 6:] = torch.nan
        x[name].requires_grad_()
    o, state = recurrent_kda(**x, cu_seqlens=[0, 6])
    (o.sum() + state.sum()).backward()
    for name in ("q", "k", "v", "g", "beta"):
        assert x[name].grad.isfinite().all() and not x[name].grad[:, 6:].any()


def test_float32_and_half_precision_inputs(inputs, token_loop, relative_error) -> None:
    x = {name: tensor.bfloat16() for name, tensor in inputs(1, 40, 1, 2, 16, 16).items()}
    o_true, state_true = token_loop(**{name: tensor.float() for name, tensor in x.items()}, scale=0.25)
    for dtype, limit in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        o, state = recurrent_kda(**x, dtype=dtype)
        assert o.dtype == state.dtype == dtype
        assert relative_error(o, o_true) < limit and relative_error(state, state_true) < limit


def test_strided_inputs(inputs) -> None:
    x = inputs(2, 11, 2, 2, 4, 4)
    strided = {name: tensor.transpose(0, -1).contiguous().transpose(0, -1) for name, tensor in x.items()}
    assert all(torch.equal(a, b) for a, b in zip(recurrent_kda(**x), recurrent_kda(**strided)))


WRONG = [
    ("q", lambda x: {"q": x["q"][0]}),
    ("k", lambda x: {"k": x["k"][..., :3]}),
    ("v", lambda x: {"v": x["v"][:, :-1]}),
    ("HV", lambda x: {"v": x["v"][:, :, :3]}),
    ("g", lambda x: {"g": x["g"][..., :3]}),
    ("beta", lambda x: {"beta": x["beta"].unsqueeze(-1)}),
    ("initial_state", lambda x: {"initial_state": x["initial_state"].transpose(-1, -2)}),
    ("initial_state", lambda x: {"state_v_first": True}),
    ("initial_state", lambda x: {"cu_seqlens": [0, 3, 6]}),
    ("cu_seqlens", lambda x: {"cu_seqlens": [1, 6]}),
    ("cu_seqlens", lambda x: {"cu_seqlens": [0, 4, 3]}),
    ("cu_seqlens", lambda x: {"cu_seqlens": [0, 7]}),
    ("cu_seqlens", lambda x: {"cu_seqlens": []}),
    ("cu_seqlens", lambda x: {"cu_seqlens": [0, 2.5]}),
    ("cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([0.0, 6.0])}),
    ("cu_seqlens", lambda x: {"cu_seqlens": torch.tensor([[0, 6]])}),
    ("cu_seqlens", lambda x: {**{name: torch.cat([t, t]) for name, t in x.items()}, "cu_seqlens": [0, 6]}),
    ("dtype", lambda x: {"dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(("name", "change"), WRONG)
def test_wrong_arguments_are_named(inputs, name: str, change) -> None:
    x = inputs(1, 6, 2, 4, 4, 8)
    with pytest.raises(ValueError, match=name):
        recurrent_kda(**{**x, **change(x)})


def test_arguments_that_are_not_floating_point_tensors_are_named(inputs) -> None:
    x = inputs(1, 6, 2, 4, 4, 8)
    for name in x:
        for wrong in (x[name].long(), x[name].numpy()):
            with pytest.raises(TypeError, match=f"^{name} must"):
                recurrent_kda(**{**x, name: wrong})
