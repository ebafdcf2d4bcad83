"""The launches of an op as one native call: the same kernels, on the same tensors, with the same results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import tvm_ffi
from extern_kernels import extern_kernel
from fused_calls import CALLS, inputs, unfused
from torch import Tensor

import kda_tl
from kda_tl.ops import prefill_decision, prefill_launch
from kda_tl.ops.known import Known
from kda_tl.ops.prefill_decision import Decision
from kda_tl.runtime import dispatcher, fused
from kda_tl.runtime.counters import counters, reset_counters

pytestmark = [pytest.mark.tilelang, pytest.mark.usefixtures("cpu_kernels", "native_helper")]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The cpu's kernels behind TVM-FFI's interface, and calls fused as a GPU's are. Gives the kernels in the order of calls."""
    called: list[str] = []
    find, made = dispatcher.kernel, {}

    def kernel(spec: Any, *rest: Any) -> Any:
        if spec.key not in made:
            function = find(spec, *rest)
            made[spec.key] = extern_kernel(lambda *arguments: (called.append(spec.kernel), function(*arguments)))
        return made[spec.key]

    def launch(d: Decision, *arguments: Any) -> None:
        whole = d.whole_v and not d.padding
        d.to_fuse = whole and d.fused is None
        plain(d, *arguments)

    plain = prefill_launch.launch
    known: Known[Decision] = Known()
    monkeypatch.setattr(prefill_launch, "launch", launch)
    monkeypatch.setattr(kda_tl.chunk_kda.repeated, "call", lambda *given: None)
    monkeypatch.setattr(dispatcher, "kernel", kernel)
    for name, found in (("known", known.get), ("once", known.once)):
        monkeypatch.setattr(f"kda_tl.ops.prefill_library.{name}", found)
    yield called


@pytest.mark.parametrize("name", CALLS)
def test_a_fused_call_gives_the_same_bits(name: str, as_on_a_gpu: list[str]) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        x = CALLS[name](seed, "cpu")
        pool = x.get("initial_state")
        kept = None if pool is None else pool.clone()
        reset_counters()
        found = kda_tl.chunk_kda(**x)
        fused_calls, launched = counters().hits, list(as_on_a_gpu)
        as_on_a_gpu.clear()
        after = None if pool is None else pool.clone()
        if pool is not None:
            pool.copy_(kept)
        expected = unfused(x)
        assert launched == as_on_a_gpu and (seed == 0 or fused_calls == len(launched))
        as_on_a_gpu.clear()
        for a, b in zip((*found, after), (*expected, pool)):
            assert (a is None and b is None) or torch.equal(a, b)


def test_tensors_that_are_one_are_not_taken_for_each_other(as_on_a_gpu: list[str]) -> None:
    """q is k in the call that is watched, and not in the next."""
    x = inputs(0, "cpu")
    kda_tl.chunk_kda(**{**x, "q": x["k"]})
    for _ in range(3):
        o = kda_tl.chunk_kda(**x)[0]
    assert torch.equal(o, unfused(x)[0])
    assert not torch.equal(kda_tl.chunk_kda(**{**x, "q": x["k"]})[0], o)


def test_a_decision_keeps_no_tensor_of_a_call(as_on_a_gpu: list[str]) -> None:
    x = CALLS["gate and states"](0, "cpu")
    references = [weakref.ref(x[name]) for name in ("q", "v", "initial_state")]
    for _ in range(3):
        results = kda_tl.chunk_kda(**x)
    references.append(weakref.ref(results[0]))
    del x, results
    gc.collect()
    assert all(reference() is None for reference in references)


def test_without_the_native_function_or_with_ranges_kernels_are_called_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fused.Watch()
    watch.of(lambda x: None)(1)
    assert watch.fused([]) is None
    monkeypatch.setattr(fused, "native", lambda name: None)
    watch = fused.Watch()
    watch.of(tvm_ffi.get_global_func("testing.nop"))(1)
    assert watch.fused([]) is None


def test_launches_with_a_tensor_of_unknown_origin_stay_apart() -> None:
    watch = fused.Watch()
    watch.of(tvm_ffi.get_global_func("testing.nop"))(torch.zeros(1))
    assert watch.fused([torch.zeros(1)]) is None


def test_views_lie_apart_in_the_scratch_tensor() -> None:
    seen: list[Tensor] = []
    watch = fused.Watch()
    parts = [torch.zeros(3, 5), torch.zeros(7, dtype=torch.float16), torch.zeros(2, 2, 2, dtype=torch.bfloat16)]
    given = torch.zeros(4, 6)
    watch.of(extern_kernel(lambda *a: seen.extend(a)))(*parts, 5, 0.5, given.transpose(0, 1), fused.stand_in(torch.zeros(1)))
    watch.scratch += parts
    run = watch.fused([given])
    assert run is not None
    seen.clear()
    other = torch.zeros(4, 6)
    run(other)
    assert [(x.shape, x.dtype, x.stride()) for x in seen[:3]] == [(x.shape, x.dtype, x.stride()) for x in parts]
    start = seen[0].data_ptr()
    assert [x.data_ptr() - start for x in seen[:3]] == [0, 512, 1024] and seen[3:5] == [5, 0.5]
    assert seen[5].data_ptr() == other.data_ptr() and (seen[5].shape, seen[5].stride()) == ((6, 4), (1, 6))


def test_an_error_of_a_kernel_is_raised() -> None:
    watch = fused.Watch()
    function = tvm_ffi.convert(lambda fail: 1 / fail)
    watch.of(function)(1)
    watch.launches[0] = (function, (0,))
    run = watch.fused([torch.zeros(1)])
    assert run is not None
    with pytest.raises(RuntimeError, match="division by zero"):
        run(torch.zeros(1))
    assert prefill_decision.known(None) is None
