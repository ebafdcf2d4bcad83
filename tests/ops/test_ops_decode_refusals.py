"""Every bad argument of the decode ops is refused by name, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_cases import OPS, SERVING, DecodeCase, make_decode_inputs

import kda_tl


def _narrower(x: dict[str, Any]) -> dict[str, Any]:
    return {name: x[name][..., :96] for name in ("q", "k", "g", "dt_bias", "initial_state")}


BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "q is no tensor": (lambda x: {"q": 3}, TypeError, "q must be a torch.Tensor"),
    "q has 3 dims": (lambda x: {"q": x["q"][0]}, ValueError, r"q must have shape \[B, T, H, K\]"),
    "float64": (lambda x: {"q": x["q"].double()}, TypeError, "q must have dtype .* got float64"),
    "mixed dtypes": (lambda x: {"v": x["v"].half()}, TypeError, "v must have dtype float32, got float16"),
    "k shape": (lambda x: {"k": x["k"][:, :, :1]}, ValueError, "k must have shape"),
    "HV % H": (lambda x: {n: x[n][:, :, :3] for n in ("v", "g", "beta")}, ValueError, "HV = 3, H = 2"),
    "K": (_narrower, ValueError, "K, the last size of q, must be 64 or 128, got 96"),
    "V": (lambda x: {"v": x["v"][..., :7]}, ValueError, "multiple of 8"),
    "g shape": (lambda x: {"g": x["g"][..., 0]}, ValueError, r"g must have shape \[B, T, HV, K\]"),
    "g is None": (lambda x: {"g": None}, TypeError, "g must be a torch.Tensor"),
    "beta shape": (lambda x: {"beta": x["beta"][..., None]}, ValueError, r"beta must have shape \[B, T, HV\]"),
    "no beta": (lambda x: {"beta": None}, ValueError, "use_beta_sigmoid_in_kernel=True needs beta"),
    "neg eigval": (lambda x: {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True}, ValueError, "allow_neg_eigval"),
    "no scale of the gate": (lambda x: {"A_log": None}, ValueError, "A_log, lower_bound or both"),
    "A_log shape": (lambda x: {"A_log": x["A_log"][:1]}, ValueError, r"A_log must have shape \[HV\]"),
    "dt_bias shape": (lambda x: {"dt_bias": x["dt_bias"][:, 0]}, ValueError, "dt_bias must have shape"),
    "dt_bias type": (lambda x: {"dt_bias": 0.5}, TypeError, "dt_bias must be a torch.Tensor"),
    "lower_bound": (lambda x: {"lower_bound": 5.0}, ValueError, "lower_bound must be finite and below 0"),
    "lower_bound type": (lambda x: {"lower_bound": "5"}, TypeError, "lower_bound must be a number"),
    "state layout": (
        lambda x: {"initial_state": x["initial_state"][..., :64]},
        ValueError,
        r"initial_state must have shape \[slots",
    ),
    "state dtype": (lambda x: {"initial_state": x["initial_state"].double()}, TypeError, "initial_state must have dtype"),
    "state dims": (lambda x: {"initial_state": x["initial_state"][0]}, ValueError, "initial_state must have shape"),
    "in place on nothing": (
        lambda x: {"initial_state": None, "state_indices": None},
        ValueError,
        "inplace=True needs initial_state",
    ),
    "indices without a pool": (lambda x: {"initial_state": None, "inplace": False}, ValueError, "state_indices needs"),
    "indices shape": (lambda x: {"state_indices": x["state_indices"][:2]}, ValueError, r"state_indices must have shape \[N\]"),
    "indices dtype": (
        lambda x: {"state_indices": x["state_indices"].float()},
        TypeError,
        "state_indices must have dtype int32, int64",
    ),
    "null without indices": (
        lambda x: {"state_indices": None, "null_index": 0, "inplace": False},
        ValueError,
        "null_index needs",
    ),
    "null type": (lambda x: {"null_index": True}, TypeError, "null_index must be an int or None, got bool"),
    "null of 41 bits": (lambda x: {"null_index": 2**40}, ValueError, "null_index must be an int of 32 bits"),
    "scale type": (lambda x: {"scale": "1"}, TypeError, "scale must be a number, or None for K .* got str"),
    "scale flag": (lambda x: {"scale": True}, TypeError, "scale must be a number, or None for K .* got bool"),
    "scale tensor": (lambda x: {"scale": torch.ones(2)}, TypeError, "scale must be a number, or None for K .* got Tensor"),
    "one memory for all slots": (
        lambda x: {"initial_state": x["initial_state"][:1].expand(7, -1, -1, -1)},
        ValueError,
        "initial_state must not be expanded to be updated in place",
    ),
    "a negated pool": (
        lambda x: {"initial_state": torch._neg_view(x["initial_state"].clone())},
        ValueError,
        "initial_state must not be a lazily negated view to be updated in place",
    ),
    "starts dtype": (lambda x: {"has_initial_state": torch.ones(5)}, TypeError, "has_initial_state must have dtype bool"),
    "starts shape": (lambda x: {"has_initial_state": torch.ones(4) > 0}, ValueError, "has_initial_state must have shape"),
    "cu_seqlens with a batch": (lambda x: {"cu_seqlens": torch.tensor([0, 1])}, ValueError, "batch size 1"),
    "cu_seqlens_cpu alone": (lambda x: {"cu_seqlens_cpu": torch.tensor([0, 1])}, ValueError, "cu_seqlens_cpu needs"),
    "unknown": (lambda x: {"cp_kontext": 1}, TypeError, "no argument 'cp_kontext'"),
    "meta device": (lambda x: {"beta": x["beta"].to("meta")}, ValueError, "beta must be on cpu"),
    "a gradient": (lambda x: {"dt_bias": x["dt_bias"].requires_grad_()}, NotImplementedError, "dt_bias requires a gradient"),
    "odd strides": (lambda x: {"initial_state": _odd(x["initial_state"])}, ValueError, "to be updated in place, got strides"),
    "misaligned": (lambda x: {"initial_state": _shifted(x["initial_state"])}, ValueError, "address % 16 = 4"),
}


def _odd(state: torch.Tensor) -> torch.Tensor:
    return torch.cat([state, state], -1)[..., ::2]


def _shifted(state: torch.Tensor) -> torch.Tensor:
    return torch.zeros(state.numel() + 1)[1:].view(state.shape)


@pytest.mark.tilelang
@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("name", BAD)
def test_refused_by_name(name: str) -> None:
    change, error, message = BAD[name]
    case = DecodeCase("bad", gate="softplus", beta="sigmoid", slots=7, N=5, inplace=True, dtype=torch.float32)
    x = make_decode_inputs(case, "cpu", 0).args
    state = x["initial_state"].clone()
    with pytest.raises(error, match=message):
        kda_tl.recurrent_kda(**{**x, **change(x)})
    assert torch.equal(x["initial_state"], state)


@pytest.mark.parametrize("rule", [rule for rule in OPS if rule not in ("kda", "gdn")])
def test_the_other_rules_refuse_what_they_do_not_have(rule: str) -> None:
    x = make_decode_inputs(DecodeCase(rule, rule=rule, dtype=torch.float32), "cpu", 0).args
    with pytest.raises(TypeError, match="has no argument 'A_log'"):
        OPS[rule](**x, A_log=torch.zeros(4))


def test_a_gate_needs_a_gate() -> None:
    x = make_decode_inputs(DecodeCase("gdn", rule="gdn", dtype=torch.float32), "cpu", 0).args
    with pytest.raises(ValueError, match="use_gate_in_kernel=True needs g"):
        kda_tl.recurrent_gdn(**{**x, "g": None, "use_gate_in_kernel": True})


def test_no_artifact_is_an_error_that_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("KDA_TL_REGISTRY", str(tmp_path))
    monkeypatch.setattr("kda_tl.runtime.dispatcher.search_path", lambda: [tmp_path])
    x = make_decode_inputs(SERVING, "cpu", 0).args
    with pytest.raises(kda_tl.ArtifactMissing, match="kda-tl build --arch cpu"):
        kda_tl.recurrent_kda(**x)
