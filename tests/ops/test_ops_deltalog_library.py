"""The DeltaLog ops as torch sees them: compiled, traced with fake tensors, checked by torch.library; and their plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deltalog_cases import OPS, tokens
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kda_tl
from kda_tl.ops.deltalog_cache import DeltaLogCache
from kda_tl.ops.explain import DELTALOG_OPS
from kda_tl.runtime import dispatcher

pytestmark = [pytest.mark.tilelang, pytest.mark.usefixtures("cpu_kernels")]
SLOTS, HV = 5, 2


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def cache_of(rule: str, **options: Any) -> DeltaLogCache:
    cache = DeltaLogCache(SLOTS, HV, rule=rule, merge_every=3, **options)
    cache.write_state(range(SLOTS), torch.randn(SLOTS, HV, 128, 128, generator=torch.Generator().manual_seed(0)))
    return cache


def step_of(rule: str, T: int = 1, seed: int = 1) -> dict[str, Any]:
    x = tokens(3, T, 1, HV, rule, "weak", "cpu", seed, fused=rule != "rwkv6")
    return x | {"state_indices": torch.tensor([4, -1, 1], dtype=torch.int32)}


def held(cache: DeltaLogCache) -> tuple[Tensor, ...]:
    # What lies past a cursor is no state.
    return cache.base, cache.cursor, cache.read_state()


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.bfloat16}, {"launches": 2}, {"state_v_first": False}], ids=str)
@pytest.mark.parametrize("rule", OPS)
def test_compiled_steps_move_the_cache_as_eager_ones_do(rule: str, options: dict[str, Any]) -> None:
    if rule != "kda" and options.keys() & {"launches", "state_v_first"}:
        pytest.skip("not built")
    cache, other = cache_of(rule, **options), cache_of(rule, **options)

    def steps(cache: DeltaLogCache, *inputs: dict[str, Any]) -> list[Tensor]:
        return [OPS[rule](**x, cache=cache).sin() for x in inputs]

    inputs = [step_of(rule), step_of(rule, seed=2), step_of(rule, T=2)]
    compiled = torch.compile(steps, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        found, expected = compiled(cache, *inputs), steps(other, *inputs)
        assert all(torch.equal(a, b) for a, b in zip((*found, *held(cache)), (*expected, *held(other))))
    assert cache.lengths().any()


def registered(rule: str, T: int = 1, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The registered op, and what it is called with."""
    function = DELTALOG_OPS[f"deltalog_decode_{rule}"]
    cache, a = function.arguments(**step_of(rule, T), cache=cache_of(rule, **options))
    values = (*a, *cache.stored, cache.state_v_first, cache.merge_every, cache.launches)
    return getattr(torch.ops.kda_tl, function.op.name).default, values


@pytest.mark.parametrize("rule", OPS)
def test_torch_accepts_the_registration(rule: str) -> None:
    torch.library.opcheck(*registered(rule))
    torch.library.opcheck(*registered(rule, T=2, state_dtype=torch.bfloat16))


def test_fake_tensors_have_the_shapes_dtypes_and_strides_of_real_ones() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        op, values = registered("kda", T=2)
        values = (*(x.to(dtype) for x in values[:3]), *values[3:])
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in values]
            found = op(*fake)
            with pytest.raises(ValueError, match=r"^beta must have shape"):
                op(*fake[:4], fake[4][1:], *fake[5:])
        expected = op(*values)
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_a_gradient_is_refused_by_the_registered_op_too() -> None:
    op, values = registered("gdn")
    with pytest.raises(NotImplementedError, match=r"^q requires a gradient"):
        op(values[0].requires_grad_(), *values[1:])


def test_a_wrong_call_after_a_right_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, cache = step_of("kda"), cache_of("kda")
    OPS["kda"](**x, cache=cache)
    before = [tensor.clone() for tensor in held(cache)]
    for wrong, error in (
        ({"scale": True}, TypeError), ({"cache": cache_of("gdn")}, ValueError), ({"valid": torch.ones(2)}, TypeError),
        ({"state_indices": torch.tensor([1, 1, 0], dtype=torch.int32)}, ValueError), ({"q": x["q"][:2]}, ValueError),
        ({"cache": DeltaLogCache(SLOTS, 4)}, ValueError),
    ):  # fmt: skip
        with pytest.raises(error):
            OPS["kda"](**{**x, "cache": cache, **wrong})
    monkeypatch.setenv("KDA_TL_CHECK", "1")
    with pytest.raises(ValueError, match="g must be a natural-log decay"):
        OPS["kda"](**{**x, "cache": cache, "use_gate_in_kernel": False, "A_log": None, "dt_bias": None, "g": x["g"].abs() + 1})
    assert all(torch.equal(a, b) for a, b in zip(held(cache), before))


def test_plans_name_what_a_step_launches() -> None:
    x, cache = step_of("kda"), cache_of("kda", launches=2)
    used: list[str] = []
    find = dispatcher.kernel
    for T, kernels in ((1, ["deltalog_prep", "deltalog_decode"]), (2, ["deltalog_decode", "deltalog_decode"])):
        x = step_of("kda", T)
        plan = kda_tl.explain(kda_tl.deltalog_decode_kda, **x, cache=cache)
        assert [launch.spec.kernel for launch in plan.launches] == kernels and "MISSING" not in str(plan)
        used.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatcher, "kernel", lambda spec, *rest: used.append(spec.key) or find(spec, *rest))
            kda_tl.deltalog_decode_kda(**x, cache=cache)
        assert set(used) == {launch.spec.key for launch in plan.launches}
        assert plan.workspace_bytes == (4 * 3 * HV * (4 * 128 + 2 * 17 + 4) if T == 1 else 0)
    with pytest.raises(TypeError, match="cache must be a DeltaLogCache"):
        kda_tl.workspace_bytes("deltalog_decode_kda", **x, cache=None)
