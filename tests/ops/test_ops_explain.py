"""explain: the plan of a call, printed, and what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from op_inputs import make
from rule_inputs import NAMES, inputs

import kda_tl
from kda_tl.ops import prefill
from kda_tl.ops.explain import PREFILL_OPS
from kda_tl.ops.plan import Launch, Plan
from kda_tl.registry import Registry
from kda_tl.runtime import dispatcher
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec

WY, SCAN = ChunkWySpec(dtype="float32"), ChunkScanSpec(dtype="float32")
BYTES = 4 * (3 * 64 * 128 + 128 + 2 * 64 * 64)  # of the workspace, per slot and head: three [C, K], one [K], two [C, C]


def test_the_plan_of_a_dense_batch(cpu_kernels: Registry) -> None:
    x = make(130, B=2, H=2, HV=4)
    plan = kda_tl.explain("chunk_kda", **x)
    assert [launch.spec for launch in plan.launches] == [WY, SCAN]
    assert plan.arch == "cpu" and plan.op == "chunk_kda"
    slots = 2 * 3
    assert plan.workspace_bytes == slots * 4 * BYTES
    text = str(plan)
    for words in ("chunk_kda on cpu", "B 2, T 130, H 2, HV 4, K 128, V 128", "2 sequences of 130 tokens", "float32"):
        assert words in text
    assert "grid 6 chunk slots x 4 heads" in text and "grid 2 sequences x 4 heads" in text
    for spec in (WY, SCAN):
        assert spec.key in text and f"artifact {cpu_kernels.find('cpu', spec.key).name}" in text
    assert str(cpu_kernels.root) in text and "MISSING" not in text and "kda-tl build" not in text


def test_the_plan_of_a_pack(cpu_kernels: Registry) -> None:
    x = make(150, N=3)
    plan = kda_tl.explain(kda_tl.chunk_kda, **x, cu_seqlens=torch.tensor([0, 70, 70, 140]))
    text = str(plan)
    slots = 150 // 64 + 3
    assert plan.workspace_bytes == slots * BYTES
    assert "3 packed sequences" in text and f"grid {slots} chunk slots" in text and "grid 4 sequences" in text


@pytest.mark.parametrize("name", PREFILL_OPS)
def test_every_op_has_a_plan(name: str, cpu_kernels: Registry) -> None:
    function = PREFILL_OPS[name]
    rule = function.op.name.removeprefix("chunk_")
    x = {NAMES.get(rule, {}).get(field, field): tensor for field, tensor in inputs(rule, 1).items()}
    x |= {"normalize": False} if rule == "linear_attention" else {}
    try:
        plan = kda_tl.explain(name, **x)
    except NotImplementedError:  # for want of kernels, as the call itself
        with pytest.raises(NotImplementedError):
            function(**x)
        return
    assert plan.op == function.op.name and "1 sequence of 1 token," in str(plan) and "MISSING" not in str(plan)
    assert str(kda_tl.explain(function, **x)) == str(plan)


@pytest.mark.parametrize("given", ["nothing", "state", "z", "both"])
def test_a_plan_with_a_normalizer_is_that_of_the_joined_tensors(given: str) -> None:
    """It is made of shapes alone, without joining anything."""
    module = sys.modules["kda_tl.ops.chunk_linear_attention"]
    q, k, v = (torch.randn(2, 130, 2, 128) for _ in range(3))
    state, z = torch.randn(2, 2, 128, 128, dtype=torch.bfloat16), torch.randn(2, 1, 2, 128)
    pair = {"nothing": None, "state": (state, None), "z": (None, z), "both": (state, z)}[given]
    joined = prefill.plan(module.CHUNK_LINEAR_ATTENTION, module.arguments(q, k, v, initial_state=pair))
    assert kda_tl.explain("chunk_linear_attention", q, k, v, initial_state=pair) == joined
    assert joined.problem["V"] == 129


def test_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "search_path", lambda: [tmp_path / "nowhere"])
    text = str(kda_tl.explain("chunk_kda", **make(10)))
    assert text.count(f"MISSING, in none of {tmp_path / 'nowhere'}") == 2
    assert text.splitlines()[-1].strip() == "build what is missing: kda-tl build --arch cpu"
    assert text.count("build what is missing") == 1


def test_a_spec_that_no_default_build_brings_has_a_command_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "search_path", lambda: [tmp_path / "nowhere"])
    extra = ChunkScanSpec(dtype="float16")
    plan = Plan("op", {}, "cpu", (Launch(WY, "1"), Launch(extra, "1"), Launch(SCAN, "1")), 0)
    assert [line.strip() for line in str(plan).splitlines()[-2:]] == [
        "build what is missing: kda-tl build --arch cpu",
        f"build what is missing: kda-tl build --arch cpu --spec '{extra.key}'",
    ]


@pytest.mark.parametrize("change", [{"v": torch.zeros(1, 10, 3, 128)}, {"cu_seqlens": torch.tensor([0, 11])}])
def test_it_refuses_what_the_op_refuses(change: dict[str, Any]) -> None:
    x = {**make(10, H=2, HV=2), **change}
    del x["initial_state"]
    with pytest.raises(ValueError) as by_op:
        kda_tl.chunk_kda(**x)
    with pytest.raises(ValueError) as by_plan:
        kda_tl.explain("chunk_kda", **x)
    assert str(by_op.value) == str(by_plan.value)


@pytest.mark.parametrize("op", ["chunk_kdaa", len, 3])
def test_an_unknown_op(op: Any) -> None:
    with pytest.raises(ValueError, match=r"^op must be one of .*chunk_kda.*, got"):
        kda_tl.explain(op)


def test_it_takes_and_refuses_the_arguments_of_the_op(cpu_kernels: Registry) -> None:
    x = make(10)
    by_position = kda_tl.explain("chunk_kda", x["q"], x["k"], x["v"], x["g"], x["beta"], 0.5, x["initial_state"], True)
    assert str(by_position) == str(kda_tl.explain("chunk_kda", **x))
    for wrong in ({"betta": 1}, {"chunk_size": 32}):
        with pytest.raises((TypeError, ValueError)):
            kda_tl.explain("chunk_kda", **x, **wrong)
