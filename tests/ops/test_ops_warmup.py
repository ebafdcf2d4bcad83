"""warmup, workspace_bytes, and the inputs that ops are tried with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from op_inputs import make

import kda_tl
from kda_tl.ops.example import example_inputs, op_named
from kda_tl.ops.explain import PLANNERS
from kda_tl.registry import Registry
from kda_tl.runtime import counters, dispatcher, loader
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.kernels import ChunkWySpec


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_kernels", {})
    monkeypatch.setattr(loader, "_loaded", {})
    counters.reset_counters()


def test_everything_that_is_built(cpu_kernels: Registry) -> None:
    assert kda_tl.warmup(device="cpu") == [spec.key for spec in default_specs("cpu")]
    assert kda_tl.counters().loads == len(default_specs("cpu"))


def test_a_call_after_it_loads_nothing(cpu_kernels: Registry) -> None:
    x = make(66)
    for what in ("chunk_kda", kda_tl.chunk_kda, kda_tl.explain("chunk_kda", **x)):
        assert kda_tl.warmup(what, device="cpu")
        counters.reset_counters()
        kda_tl.chunk_kda(**x, use_qk_l2norm_in_kernel=True)
        assert kda_tl.counters() == kda_tl.Counters(hits=2, loads=0, misses=0, builds=0, fallbacks=0)


def test_one_spec_and_the_options_of_ops(cpu_kernels: Registry) -> None:
    spec = ChunkWySpec(dtype="float32")
    launched = kda_tl.warmup(spec, "chunk_kda", device="cpu", output_final_state=True)
    assert launched[:2] == [spec.key, "chunk_kda"]
    wy = {other.key for other in default_specs("cpu") if isinstance(other, ChunkWySpec)}
    of_kda = {ChunkWySpec(K, dtype="float32").key for K in (64, 128)}
    assert wy & set(launched[2:]) == of_kda
    assert {key.split("[")[0] for key in launched[2:]} == {"chunk_wy", "chunk_scan", "intracard_pre_scan", "intracard_merge"}
    with pytest.raises(ValueError, match="options are for ops, and none was named: got output_final_state"):
        kda_tl.warmup(spec, device="cpu", output_final_state=True)


def test_what_it_refuses(cpu_kernels: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"op must be one of .*chunk_kda.*, got 'chunk_kdaa'"):
        kda_tl.warmup("chunk_kdaa", device="cpu")
    with pytest.raises(TypeError, match="what must be ops, names of ops, specs and plans, got int"):
        kda_tl.warmup(3, device="cpu")
    with pytest.raises(ValueError, match="device must be a CUDA device or the cpu, got 'tpu'"):
        kda_tl.warmup("chunk_kda", device="tpu")
    with monkeypatch.context() as patch, pytest.raises(kda_tl.UnsupportedDevice, match="device cuda is not here"):
        patch.setattr(torch.cuda, "is_available", lambda: False)
        kda_tl.warmup("chunk_kda", device="cuda")
    with dispatcher.assume_arch("sm_90"):
        plan = kda_tl.explain("chunk_kda", **example_inputs(kda_tl.chunk_kda, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="the plan is one for sm_90, and cpu runs cpu"):
        kda_tl.warmup(plan, device="cpu")
    monkeypatch.setattr(dispatcher, "search_path", lambda: [tmp_path / "nowhere"])
    monkeypatch.setattr(dispatcher, "_kernels", {})
    with pytest.raises(kda_tl.ArtifactMissing, match=r"no artifacts for cpu .*kda-tl build --arch cpu"):
        kda_tl.warmup(device="cpu")


def test_not_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="before a CUDA graph is captured"):
        kda_tl.warmup(device="cuda")


def test_workspace_is_known_before_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "search_path", lambda: [tmp_path / "nowhere"])  # and needs no artifact
    x = make(130, B=2, H=2, HV=4)
    assert kda_tl.workspace_bytes("chunk_kda", **x) == kda_tl.explain(kda_tl.chunk_kda, **x).workspace_bytes > 0
    with pytest.raises(ValueError, match="op must be one of"):
        kda_tl.workspace_bytes("chunk_kdaa", **x)


@pytest.mark.parametrize("op", list(PLANNERS))
def test_every_op_can_be_planned_from_sizes(op: str) -> None:
    tokens = 70 if op.startswith("chunk") else 3
    plan = PLANNERS[op](**example_inputs(op_named(op), tokens=tokens, batch=2, heads=2, value_heads=4))
    assert plan.arch == "cpu" and plan.launches
    with dispatcher.assume_arch("sm_90"):
        inputs = example_inputs(op_named(op), tokens=tokens, heads=2, dtype=torch.bfloat16)
        assert {launch.spec for launch in PLANNERS[op](**inputs).launches} <= set(default_specs("sm_90"))


@pytest.mark.parametrize("op", ["recurrent_gla", "deltalog_decode_gdn"])
def test_a_decode_op_is_warm_with_all_its_kernels(cpu_kernels: Registry, op: str) -> None:
    name, *keys = kda_tl.warmup(op, device="cpu")
    assert name == op
    if op.startswith("deltalog"):
        assert keys and all("decay=scalar" in key for key in keys)
    else:
        assert keys == [spec.key for spec in default_specs("cpu") if spec.kernel == "recurrent_decode"]


def test_example_inputs_cost_no_memory_unless_real() -> None:
    inputs = example_inputs(kda_tl.chunk_kda, tokens=1 << 20, heads=96, batch=8, dtype=torch.bfloat16)
    assert inputs["q"].shape == (8, 1 << 20, 96, 128) and inputs["q"].dtype == torch.bfloat16
    assert inputs["beta"].shape == (8, 1 << 20, 96) and inputs["g"].dtype == torch.float32
    assert all(tensor.untyped_storage().nbytes() <= 4 for tensor in inputs.values())
    real = example_inputs(kda_tl.chunk_kda, lengths=(1, 0, 2), tokens=3, real=True)
    assert real["cu_seqlens"].tolist() == [0, 1, 1, 3] and all(tensor.is_contiguous() for tensor in real.values())


def test_gates_of_other_rules_and_unknown_arguments() -> None:
    def chunk_gdn(q, k, v, g, beta):
        """One decay per head."""

    def decode(q, pool, state_indices, flag=None):
        """An argument whose shape nobody can know."""

    chunk_gdn.op = kda_tl.chunk_gdn.op
    assert example_inputs(chunk_gdn, tokens=5, heads=3)["g"].shape == (1, 5, 3)
    with pytest.raises(ValueError, match="the shape of pool does not follow from its name"):
        example_inputs(decode)
    inputs = example_inputs(decode, shapes={"pool": (4, 2), "state_indices": (3,)})
    assert inputs["pool"].shape == (4, 2) and inputs["state_indices"].dtype == torch.int32 and "flag" not in inputs
    with pytest.raises(ValueError, match="decode has no argument 'poool'"):
        example_inputs(decode, shapes={"poool": (4, 2)})
    with pytest.raises(ValueError, match="chunk_gdn takes no packed sequences"):
        example_inputs(chunk_gdn, lengths=(1, 2))
    with pytest.raises(ValueError, match="op must be the name of a public op, got 'nothing'"):
        op_named("nothing")
