"""chunk_kda on input that is not as documented: the message names the argument. No kernel is needed to be refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_inputs import make

import kda_tl

Inputs = dict[str, Any]


@pytest.fixture
def x() -> Inputs:
    return make(10, H=2, HV=4)


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def gate(**changes: Any) -> Inputs:
    return {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(512), **changes}


EACH = ("q", "k", "v", "g", "beta")

CASES: list[tuple[str, type[Exception], str, Callable[[Inputs], Inputs]]] = [
    # what it is called, the error, how its message starts, what is changed
    *((f"{n} is no tensor", TypeError, f"{n} must be a torch.Tensor, got list", lambda x, n=n: {n: [1.0]}) for n in EACH),
    *((f"{n} is None", TypeError, f"{n} must be a torch.Tensor, got NoneType", lambda x, n=n: {n: None}) for n in EACH),
    *((f"{n} is float64", TypeError, f"{n} must have dtype ", lambda x, n=n: {n: x[n].double()}) for n in EACH),
    *((f"{n} is int32", TypeError, f"{n} must have dtype ", lambda x, n=n: {n: x[n].int()}) for n in EACH),
    *(
        (
            f"{n} is of another dtype than q",
            TypeError,
            f"{n} must have dtype float32, got bfloat16",
            lambda x, n=n: {n: x[n].bfloat16()},
        )
        for n in ("k", "v")
    ),
    *(
        (f"{n} is elsewhere", ValueError, "all tensors must be on one device, got ", lambda x, n=n: {n: x[n].to("meta")})
        for n in EACH
    ),
    *((f"{n} lacks a dimension", ValueError, f"{n} must have shape [", lambda x, n=n: {n: x[n][0]}) for n in EACH),
    *((f"{n} has one more dimension", ValueError, f"{n} must have shape [", lambda x, n=n: {n: x[n][None]}) for n in EACH),
    *((f"{n} has fewer tokens", ValueError, f"{n} must have shape [", lambda x, n=n: {n: x[n][:, 1:]}) for n in EACH[1:]),
    *(
        (f"{n} has another batch", ValueError, f"{n} must have shape [", lambda x, n=n: {n: torch.cat([x[n]] * 2)})
        for n in EACH[1:]
    ),
    (
        "k has other heads",
        ValueError,
        "k must have shape [B, T, H, K] = [1, 10, 2, 128], got [1, 10, 1, 128]",
        lambda x: {"k": x["k"][:, :, :1]},
    ),
    ("g has other heads", ValueError, "g must have shape [B, T, HV, K] = [1, 10, 4, 128]", lambda x: {"g": x["g"][:, :, :2]}),
    (
        "beta has other heads",
        ValueError,
        "beta must have shape [B, T, HV] = [1, 10, 4]",
        lambda x: {"beta": x["beta"][:, :, :2]},
    ),
    ("g is per head, as in GDN", ValueError, "g must have shape [B, T, HV, K]", lambda x: {"g": x["g"][..., 0]}),
    (
        "K is 256",
        ValueError,
        "K, the last size of q, must be from 1 to 128, got 256",
        lambda x: {n: torch.cat([x[n]] * 2, -1) for n in ("q", "k", "g")},
    ),
    (
        "V is 384",
        ValueError,
        "V, the last size of v, must be from 1 to 256, got 384",
        lambda x: {"v": x["v"].repeat(1, 1, 1, 3)},
    ),
    (
        "HV is no multiple of H",
        ValueError,
        "HV, the heads of v, must be a positive multiple of H, the heads of q: got HV = 3, H = 2",
        lambda x: {n: x[n][:, :, :3] for n in ("v", "g", "beta")},
    ),
    (
        "H is 0",
        ValueError,
        "HV, the heads of v, must be a positive multiple of H",
        lambda x: {n: x[n][:, :, :0] for n in ("q", "k")},
    ),
    (
        "HV is 0",
        ValueError,
        "HV, the heads of v, must be a positive",
        lambda x: {n: x[n][:, :, :0] for n in ("v", "g", "beta")},
    ),
    ("chunk_size", ValueError, "chunk_size must be 64, got 32", lambda x: {"chunk_size": 32}),
    ("chunk_size is a text", ValueError, "chunk_size must be 64, got '64'", lambda x: {"chunk_size": "64"}),
    ("scale is a text", TypeError, "scale must be a number, or None for K ** -0.5, got str", lambda x: {"scale": "a"}),
    ("scale is beyond all floats", ValueError, "scale must be a number, or None", lambda x: {"scale": 2**1024}),
    ("scale is a flag", TypeError, "scale must be a number, or None for K ** -0.5, got bool", lambda x: {"scale": True}),
    ("scale is a tensor", TypeError, "scale must be a number, or None", lambda x: {"scale": torch.ones(())}),
    # cu_seqlens
    ("offsets are a list", TypeError, "cu_seqlens must be a torch.Tensor, got list", lambda x: {"cu_seqlens": [0, 10]}),
    (
        "offsets are floats",
        TypeError,
        "cu_seqlens must have dtype int32, int64, got float32",
        lambda x: {"cu_seqlens": torch.tensor([0.0, 10.0])},
    ),
    ("offsets are int16", TypeError, "cu_seqlens must have dtype", lambda x: {"cu_seqlens": offsets(0, 10, dtype=torch.int16)}),
    ("offsets are a matrix", ValueError, "cu_seqlens must have shape [N + 1]", lambda x: {"cu_seqlens": offsets(0, 10)[None]}),
    ("offsets are none at all", ValueError, "cu_seqlens must have shape [N + 1]", lambda x: {"cu_seqlens": offsets()}),
    ("offsets start late", ValueError, "cu_seqlens must start at 0, got 1", lambda x: {"cu_seqlens": offsets(1, 10)}),
    ("offsets start early", ValueError, "cu_seqlens must start at 0, got -1", lambda x: {"cu_seqlens": offsets(-1, 10)}),
    (
        "offsets decrease",
        ValueError,
        "cu_seqlens must not decrease, got 7 then 6 at index 2",
        lambda x: {"cu_seqlens": offsets(0, 7, 6, 10)},
    ),
    ("offsets end past T", ValueError, "cu_seqlens must not exceed T = 10, got 11", lambda x: {"cu_seqlens": offsets(0, 11)}),
    (
        "offsets past int32",
        ValueError,
        "cu_seqlens must not exceed T = 10, got 4294967306",
        lambda x: {"cu_seqlens": offsets(0, 2**32 + 10, dtype=torch.int64)},
    ),
    (
        "offsets are elsewhere",
        ValueError,
        "cu_seqlens must be on cpu like q, got meta",
        lambda x: {"cu_seqlens": offsets(0, 10).to("meta")},
    ),
    (
        "a pack with a batch",
        ValueError,
        "q must have batch size 1 where cu_seqlens is given",
        lambda x: {**{n: torch.cat([x[n]] * 2) for n in EACH}, "cu_seqlens": offsets(0, 10), "initial_state": None},
    ),
    ("host offsets alone", ValueError, "cu_seqlens_cpu needs cu_seqlens", lambda x: {"cu_seqlens_cpu": offsets(0, 10)}),
    (
        "host offsets of another length",
        ValueError,
        "cu_seqlens_cpu must have as many entries as cu_seqlens, 2, got 3",
        lambda x: {"cu_seqlens": offsets(0, 10), "cu_seqlens_cpu": offsets(0, 5, 10)},
    ),
    (
        "host offsets are elsewhere",
        ValueError,
        "cu_seqlens_cpu must be on the cpu, got meta",
        lambda x: {"cu_seqlens": offsets(0, 10), "cu_seqlens_cpu": offsets(0, 10).to("meta")},
    ),
    (
        "host offsets are floats",
        TypeError,
        "cu_seqlens_cpu must have dtype int32, int64",
        lambda x: {"cu_seqlens": offsets(0, 10), "cu_seqlens_cpu": offsets(0, 10).float()},
    ),
    # initial_state
    ("the state is no tensor", TypeError, "initial_state must be a torch.Tensor, got float", lambda x: {"initial_state": 0.0}),
    (
        "the state is of float64",
        TypeError,
        "initial_state must have dtype bfloat16, float16, float32, got float64",
        lambda x: {"initial_state": x["initial_state"].double()},
    ),
    (
        "the state is elsewhere",
        ValueError,
        "all tensors must be on one device",
        lambda x: {"initial_state": x["initial_state"].to("meta")},
    ),
    (
        "the state has other heads",
        ValueError,
        "initial_state must have shape [N, HV, K, V] = [1, 4, 128, 128], got [1, 2, 128, 128]",
        lambda x: {"initial_state": x["initial_state"][:, :2]},
    ),
    (
        "the state is of one sequence, the pack of two",
        ValueError,
        "initial_state must have shape [N, HV, V, K] = [2, 4, 128, 128], got [1, 4, 128, 128]",
        lambda x: {"cu_seqlens": offsets(0, 5, 10), "state_v_first": True},
    ),
    # gate, beta
    ("a gate without a scale", ValueError, "use_gate_in_kernel needs A_log, lower_bound or both", lambda x: gate(A_log=None)),
    ("A_log of another shape", ValueError, "A_log must have shape [HV] = [4], got [2]", lambda x: gate(A_log=torch.zeros(2))),
    (
        "A_log is elsewhere",
        ValueError,
        "A_log must be on cpu like q, got meta",
        lambda x: gate(A_log=torch.zeros(4, device="meta")),
    ),
    (
        "dt_bias of another shape",
        ValueError,
        "dt_bias must have shape [HV * K] = [512] or [HV, K] = [4, 128], got [4]",
        lambda x: gate(dt_bias=torch.zeros(4)),
    ),
    ("dt_bias is elsewhere", ValueError, "dt_bias must be on cpu", lambda x: gate(dt_bias=torch.zeros(512, device="meta"))),
    ("lower_bound is positive", ValueError, "lower_bound must be finite and below 0", lambda x: gate(lower_bound=5.0)),
    ("lower_bound is 0", ValueError, "lower_bound must be finite and below 0", lambda x: gate(lower_bound=0.0)),
    ("lower_bound is infinite", ValueError, "lower_bound must be finite and below 0", lambda x: gate(lower_bound=-torch.inf)),
    (
        "lower_bound is missing",
        ValueError,
        "safe_gate=True with use_gate_in_kernel=True needs lower_bound",
        lambda x: gate(safe_gate=True),
    ),
    ("lower_bound is NaN", ValueError, "lower_bound must be finite and below 0", lambda x: gate(lower_bound=torch.nan)),
    ("A_log is of integers", TypeError, "A_log must have dtype ", lambda x: gate(A_log=torch.zeros(4, dtype=torch.int32))),
    ("lower_bound is a text", TypeError, "lower_bound must be a number < 0, got str", lambda x: gate(lower_bound="-5")),
    (
        "allow_neg_eigval alone",
        ValueError,
        "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True",
        lambda x: {"allow_neg_eigval": True},
    ),
    # what is not there
    ("an unknown argument", TypeError, "chunk_kda has no argument 'betta'", lambda x: {"betta": 1}),
    (
        "head_first",
        TypeError,
        "chunk_kda has no argument 'head_first': inputs are [B, T, H, ...]",
        lambda x: {"head_first": False},
    ),
    ("a context", TypeError, "cp_context must be a kda_tl.ContextParallel", lambda x: {"cp_context": object()}),
    (
        "all on a device without kernels",
        kda_tl.UnsupportedDevice,
        "no kernels for meta tensors",
        lambda x: {n: x[n].to("meta") for n in (*EACH, "initial_state")},
    ),
    # pools
    (
        "indices without a pool",
        ValueError,
        "state_indices needs initial_state, the pool",
        lambda x: {"state_indices": offsets(0), "initial_state": None},
    ),
    ("a null index alone", ValueError, "null_index needs state_indices", lambda x: {"null_index": -1}),
    (
        "a null index that is a text",
        TypeError,
        "null_index must be an int",
        lambda x: {"null_index": "0", "state_indices": offsets(0)},
    ),
    (
        "a null index of 33 bits",
        ValueError,
        "null_index must be an int of 32 bits or None, got 4294967296",
        lambda x: {"null_index": 2**32, "state_indices": offsets(0)},
    ),
    (
        "one memory for all slots",
        ValueError,
        "initial_state must not be expanded to be updated in place",
        lambda x: {"initial_state": x["initial_state"].expand(3, -1, -1, -1), "state_indices": offsets(0)},
    ),
    ("indices of floats", TypeError, "state_indices must have dtype int32, int64", lambda x: {"state_indices": torch.zeros(1)}),
    ("indices in a list", TypeError, "state_indices must be a torch.Tensor, got list", lambda x: {"state_indices": [0]}),
    (
        "too many indices",
        ValueError,
        "state_indices must have shape [N] = [1], got [2]",
        lambda x: {"state_indices": offsets(0, 1)},
    ),
    (
        "a pool with other heads",
        ValueError,
        "initial_state must have shape [slots, HV, K, V] = [slots, 4, 128, 128] where",
        lambda x: {"state_indices": offsets(0), "initial_state": x["initial_state"][:, :2]},
    ),
    (
        "no state to have",
        ValueError,
        "has_initial_state needs initial_state",
        lambda x: {"has_initial_state": torch.ones(1, dtype=torch.bool), "initial_state": None},
    ),
    (
        "has_initial_state of integers",
        TypeError,
        "has_initial_state must have dtype bool",
        lambda x: {"has_initial_state": offsets(1)},
    ),
    (
        "has_initial_state of another length",
        ValueError,
        "has_initial_state must have shape [N] = [1], got [3]",
        lambda x: {"has_initial_state": torch.ones(3, dtype=torch.bool)},
    ),
    (
        "indices are elsewhere",
        ValueError,
        "state_indices must be on cpu like q, got meta",
        lambda x: {"state_indices": offsets(0).to("meta")},
    ),
]


@pytest.mark.parametrize(("error", "message", "change"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_refused_by_name(x: Inputs, error: type[Exception], message: str, change: Callable[[Inputs], Inputs]) -> None:
    with pytest.raises(error, match="^" + re.escape(message)) as caught:
        kda_tl.chunk_kda(**{**x, **change(x)})
    assert type(caught.value) is error


def test_mixed_devices_are_listed(x: Inputs) -> None:
    x["beta"] = x["beta"].to("meta")
    with pytest.raises(ValueError, match=r"got q on cpu, beta on meta$"):
        kda_tl.chunk_kda(**x)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
@pytest.mark.parametrize("options", [{"return_intermediate_states": True}, {"state_indices": offsets(0)}])
def test_gradients_that_are_not_there_are_refused_not_dropped(x: Inputs, name: str, options: Inputs, cpu_kernels) -> None:
    x = {**x, **gate(), **options}
    x[name] = x[name].clone().requires_grad_() * 1.0
    with pytest.raises(NotImplementedError, match=f"^{name} requires a gradient"):
        kda_tl.chunk_kda(**x)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            x["initial_state"] = x["initial_state"].clone()
            assert not kda_tl.chunk_kda(**x)[0].requires_grad


def test_the_old_name_of_a_flag_still_works(x: Inputs, cpu_kernels) -> None:
    x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
    expected = kda_tl.chunk_kda(**x, state_v_first=True, output_final_state=True)
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is now named state_v_first"):
        found = kda_tl.chunk_kda(**x, transpose_state_layout=True, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("option", [{"safe_gate": True}, {"disable_recompute": True}, {"use_graph": True}, {"max_num_seqs": 8}])
def test_what_is_accepted_for_compatibility_changes_nothing(x: Inputs, option: Inputs, cpu_kernels) -> None:
    expected = kda_tl.chunk_kda(**x, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(kda_tl.chunk_kda(**x, output_final_state=True, **option), expected))


def test_a_missing_artifact_names_the_command(x: Inputs, tmp_path, monkeypatch) -> None:
    from kda_tl.runtime import dispatcher

    monkeypatch.setattr(dispatcher, "search_path", lambda: [tmp_path])
    monkeypatch.setattr(dispatcher, "_kernels", {})
    with pytest.raises(
        kda_tl.ArtifactMissing, match=r"no artifact of chunk_wy\[.*dtype=float32.* for cpu .*`kda-tl build --arch cpu`"
    ):
        kda_tl.chunk_kda(**x)


@pytest.mark.parametrize("values", [(0, 5), (0, 11), (0, 400)])
def test_offsets_that_differ_from_their_host_copy(x: Inputs, values: tuple[int, ...]) -> None:
    """The kernels follow cu_seqlens: past the end they would read and write what is not theirs."""
    with pytest.raises(ValueError, match=r"^cu_seqlens"):
        kda_tl.chunk_kda(**x, cu_seqlens=offsets(*values), cu_seqlens_cpu=offsets(0, 10))
    kda_tl.explain("chunk_kda", **x, cu_seqlens=offsets(0, 10), cu_seqlens_cpu=offsets(0, 10, dtype=torch.int64))


def test_forward_mode_is_refused_too(x: Inputs) -> None:
    with torch.autograd.forward_ad.dual_level():
        x["k"] = torch.autograd.forward_ad.make_dual(x["k"], torch.ones_like(x["k"]))
        with pytest.raises(NotImplementedError, match=r"^k requires a gradient"):
            kda_tl.chunk_kda(**x)


def test_gate_parameters_that_are_not_used_may_need_a_gradient(x: Inputs, cpu_kernels) -> None:
    o, _ = kda_tl.chunk_kda(**x, A_log=torch.zeros(4, requires_grad=True))
    assert torch.equal(o, kda_tl.chunk_kda(**x)[0])


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_gate_parameters_that_are_no_tensors(x: Inputs, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, got list"):
        kda_tl.chunk_kda(**{**x, **gate(**{name: [0.0] * 4})})


# -- KDA_TL_CHECK=1: the values that a device alone knows, tried here through the same checks ---------------------------------


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_TL_CHECK", "1")


def test_a_gate_above_zero_is_refused_on_request(x: Inputs, cpu_kernels, checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer#2490: exp(g) in place of g."""
    kda_tl.chunk_kda(**x)
    x["g"][0, 3, 1, 7] = torch.nan
    kda_tl.chunk_kda(**x)
    x["g"][0, 3, 1, 7] = 0.25
    with pytest.raises(ValueError, match=r"^g must be a natural-log decay <= 0, got 0\.25"):
        kda_tl.chunk_kda(**x)
    kda_tl.chunk_kda(**{**x, **gate()})
    kda_tl.chunk_kda(**{**x, "cu_seqlens": offsets(0, 3)})
    monkeypatch.setenv("KDA_TL_CHECK", "0")
    kda_tl.chunk_kda(**x)


def test_slots_are_checked_on_request(x: Inputs, cpu_kernels, checked) -> None:
    """What is not in the pool is padding, whose decays may be anything; no slot is named twice."""
    x |= {"initial_state": torch.zeros(3, 4, 128, 128), "cu_seqlens": offsets(0, 4, 10), "null_index": -1}
    x["g"][:, 4:] = 0.25
    for padding in (-1, -2, 3):
        kda_tl.chunk_kda(**x, state_indices=offsets(1, padding))
    kda_tl.chunk_kda(**x, state_indices=offsets(-1, -1))
    with pytest.raises(ValueError, match=r"^g must be a natural-log decay"):
        kda_tl.chunk_kda(**x, state_indices=offsets(-1, 1))
    with pytest.raises(ValueError, match=r"^state_indices must not name a slot twice, got \[1, 1\]"):
        kda_tl.chunk_kda(**x, state_indices=offsets(1, 1))


def test_the_switch_has_two_positions(x: Inputs, cpu_kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_TL_CHECK", "true")
    with pytest.raises(ValueError, match="KDA_TL_CHECK must be 0 or 1, got 'true'"):
        kda_tl.chunk_kda(**x)


@pytest.mark.parametrize(
    ("values", "message"), [((1, 10), "start at 0"), ((0, 7, 6), "not decrease"), ((0, 11), "not exceed T = 10")]
)
def test_offsets_that_a_device_alone_knows_are_checked_on_request(
    x: Inputs, checked, monkeypatch: pytest.MonkeyPatch, values: tuple[int, ...], message: str
) -> None:
    from kda_tl.ops import checks

    real = checks.host_offsets
    monkeypatch.setattr(checks, "host_offsets", lambda cu, cpu: None)  # as where the offsets lie on a device
    from kda_tl.ops.arguments import Arguments
    from kda_tl.ops.chunk_kda import CHUNK_KDA
    from kda_tl.ops.prefill_checks import check, check_on_device

    a = Arguments(**{**x, "initial_state": None}, cu_seqlens=offsets(*values))
    problem = check(CHUNK_KDA, a)
    monkeypatch.setattr(checks, "host_offsets", real)
    with pytest.raises(ValueError, match=f"^cu_seqlens must {message}"):
        check_on_device(CHUNK_KDA, a, problem)
