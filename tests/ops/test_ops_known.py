"""Prefill calls that are recognised: nothing that a check or a plan looks at is left out of what they are recognised by."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from op_inputs import make

import kda_tl
from kda_tl.ops.known import Known, traits
from kda_tl.ops.prefill_decision import decide, key_of
from kda_tl.runtime import dispatcher

pytestmark = [pytest.mark.tilelang, pytest.mark.usefixtures("cpu_kernels")]
OP, ARGUMENTS = kda_tl.chunk_kda.op, kda_tl.chunk_kda.arguments
GATED = {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(4, 128)}


def call() -> dict[str, Any]:
    x: dict[str, Any] = {name: tensor.clone() for name, tensor in make(70, H=2, HV=4, N=2).items()}
    return x | GATED | {"cu_seqlens": torch.tensor([0, 30, 70]), "cu_seqlens_cpu": torch.tensor([0, 30, 70])}


def key(**changes: Any) -> Any:
    return key_of(OP, ARGUMENTS(**{**call(), **changes}))


def test_equal_calls_are_recognised_whatever_their_addresses() -> None:
    assert key() == key() and hash(key()) == hash(key())
    assert key() == key(q=torch.randn_like(call()["q"]))


CHANGES: dict[str, dict[str, Any]] = {
    "a shape": {"v": torch.zeros(1, 70, 4, 64)},
    "a dtype": {"g": torch.zeros(1, 70, 4, 128, dtype=torch.bfloat16)},
    "strides": {"k": torch.zeros(1, 2, 70, 128).transpose(1, 2)},
    "alignment": {"q": torch.zeros(70 * 256 + 1)[1:].view(1, 70, 2, 128)},
    "a negated view": {"beta": torch._neg_view(torch.zeros(1, 70, 4))},
    "offsets": {"cu_seqlens": torch.tensor([0, 31, 70]), "cu_seqlens_cpu": torch.tensor([0, 31, 70])},
    "offsets on the device alone": {"cu_seqlens": torch.tensor([0, 31, 70])},
    "an offset's dtype": {"cu_seqlens": torch.tensor([0, 30, 70], dtype=torch.int32)},
    "no offsets on the host": {"cu_seqlens_cpu": None},
    "no state": {"initial_state": None},
    "no bias": {"dt_bias": None},
    "the bias's layout": {"dt_bias": torch.zeros(512)},
    "a mask": {"has_initial_state": torch.tensor([True, False])},
    "a pool": {"state_indices": torch.tensor([0, 1])},
    **{name: {name: True} for name in (
        "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first", "output_final_state",
        "return_intermediate_states")},
    "the gate's bound": {"lower_bound": -1.0},
    "scale": {"scale": 0.5},
    "segments": {"intracard_segments": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_other_calls_are_not(name: str) -> None:
    assert key(**CHANGES[name]) != key()


def test_numbers_that_are_equal_but_of_another_type_are_told_apart() -> None:
    assert key(scale=1.0) != key(scale=True) and key(intracard_segments=1) != key(intracard_segments=True)
    kda_tl.chunk_kda(**call(), intracard_segments=1)
    with pytest.raises(TypeError, match="intracard_segments must be an int"):
        kda_tl.chunk_kda(**call(), intracard_segments=True)


def test_what_is_not_plain_is_never_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    x = call()
    parameter = torch.nn.Parameter(x["q"])
    assert key(q=parameter) is None
    with torch.no_grad():
        assert key(q=parameter) == key()
    assert key(q=x["q"].as_subclass(type("Other", (torch.Tensor,), {}))) is None
    assert key(q=None) is None and key(k=3) is None
    monkeypatch.setenv("KDA_TL_CHECK", "1")
    assert key() is None
    monkeypatch.setenv("KDA_TL_CHECK", "0")
    assert key() is not None


def test_what_a_call_depends_on_besides_its_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    here = key()
    with dispatcher.assume_arch("sm_90"):
        assert key() != here
    monkeypatch.setenv("KDA_TL_REGISTRY", str(tmp_path))  # its schedules say how sequences are cut
    assert key() != here


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"g": torch.ones(1, 70, 4, 128)}, "g must be a natural-log decay"),
        ({"cu_seqlens": torch.tensor([0, 80, 70])}, "cu_seqlens"),
        ({"state_indices": torch.tensor([1, 1])}, "state_indices must not name a slot twice"),
    ],
)
def test_values_are_checked_after_an_equal_call(wrong: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = {name: value for name, value in call().items() if name not in (*GATED, "cu_seqlens_cpu")}
    right = {"state_indices": torch.tensor([1, 0])} if "state_indices" in wrong else {}
    kda_tl.chunk_kda(**x, **right)
    monkeypatch.setenv("KDA_TL_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        kda_tl.chunk_kda(**{**x, **right, **wrong})


def test_a_decision_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("kda_tl.ops.prefill.decide", lambda *given: made.append(given) or decide(*given))
    x = call() | {"scale": 0.123}
    results = [kda_tl.chunk_kda(**x)[0] for _ in range(3)]
    assert len(made) == 1 and all(torch.equal(results[0], o) for o in results)


def test_the_oldest_are_forgotten() -> None:
    known: Known[int] = Known(most=3)
    for n in range(5):
        known.put(n, n)
    assert len(known) == 3 and known.get(0) is None and known.get(4) == 4
    assert known.get([]) is None  # no key of a call that passes its checks
    assert not traits([], [torch.zeros(2).to_sparse()])


def test_threads_may_share_what_is_known() -> None:
    known: Known[int] = Known(most=8)

    def work(start: int) -> None:
        for n in range(start, start + 2000):
            known.put(n, n)
            assert known.get(n) in (n, None)

    threads = [threading.Thread(target=work, args=(7000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(known) <= 8 + len(threads)
