"""Head dims, dtypes and large grids: right, or refused before a launch."""

from __future__ import annotations

import pytest
import torch
from chunk_kda_cases import relative_error
from rule_inputs import call, inputs, truth

import kda_tl
from kda_tl.ops import offered
from kda_tl.ops.prefill_checks import Problem
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.prefill import shipped_head_dims
from kda_tl.specs.rules import RULES

pytestmark = pytest.mark.usefixtures("cpu_kernels")
LIMIT = 1e-5


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    ("K", "V"),
    [(1, 1), (16, 128), (48, 80), (64, 64), (64, 128), (80, 64), (96, 16), (127, 129), (128, 160), (128, 192), (64, 256)],
)
def test_head_dims(K: int, V: int, pack: bool) -> None:
    """QwenLM/FlashQLA#24, inclusionAI/cuLA#41: never silently wrong."""
    x = inputs("kda", 67, H=1, HV=2, K=K, V=V, N=2 if pack else 1)
    cu_seqlens = torch.tensor([0, 65, 66]) if pack else None
    for v_first in (False, True):
        if v_first:
            x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
        o, state = call("kda", x, cu_seqlens=cu_seqlens, output_final_state=True, state_v_first=v_first)
        o_true, state_true = truth("kda", x, cu_seqlens=cu_seqlens, state_v_first=v_first)
        assert o.is_contiguous() and state.is_contiguous() and state.shape == state_true.shape
        assert relative_error(o, o_true) < LIMIT and relative_error(state, state_true) < LIMIT
    del x["initial_state"]
    o, none = call("kda", x, cu_seqlens=cu_seqlens)
    assert none is None and relative_error(o, truth("kda", x, cu_seqlens=cu_seqlens)[0]) < LIMIT


def test_a_padded_head_with_norm_and_gate() -> None:
    x = inputs("kda", 20, K=40, V=72)
    x["q"] *= 3.0
    A_log, dt_bias = torch.tensor([0.5]), torch.randn(40, generator=torch.Generator().manual_seed(1))
    o, state = call(
        "kda", x, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, output_final_state=True
    )
    true = {name: tensor.double() for name, tensor in x.items()}
    for name in ("q", "k"):
        true[name] = true[name] / (true[name].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    true["g"] = -A_log.double().exp() * (1 + (true["g"] + dt_bias.double()).exp()).log()
    o_true, state_true = truth("kda", true)
    assert relative_error(o, o_true) < LIMIT and relative_error(state, state_true) < LIMIT


@pytest.mark.parametrize(
    ("K", "V", "message"),
    [
        (129, 64, "K, the last size of q, must be from 1 to 128, got 129"),
        (0, 64, "K, the last size of q, must be from 1 to 128, got 0"),
        (64, 257, "V, the last size of v, must be from 1 to 256, got 257"),
        (64, 512, "V, the last size of v, must be from 1 to 256, got 512"),
        (64, 0, "V, the last size of v, must be from 1 to 256, got 0"),
    ],
)
def test_head_dims_that_are_refused(K: int, V: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call("kda", inputs("kda", 3, K=K, V=V))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rule", RULES)
def test_runs_over_v_cover_every_column_once(rule: str, dtype: str) -> None:
    sizes = shipped_head_dims(RULES[rule], dtype)
    for V in range(1, offered.MAX_HEAD_DIM_V + 1):
        runs = offered.v_runs(RULES[rule], dtype, V)
        assert [c for first, columns, _ in runs for c in range(first, first + columns)] == list(range(V))
        assert all(columns <= size and size in sizes for _, columns, size in runs)
    for K in range(1, offered.MAX_HEAD_DIM_K + 1):
        assert offered.shipped_k(RULES[rule], dtype, K) == min(size for size in sizes if size >= K)


def test_everything_that_the_cpu_may_need_is_built_by_default() -> None:
    from kda_tl.ops.prefill_launch import launches

    built = set(default_specs("cpu"))
    for K in (1, 64, 128):
        for V in (1, 64, 128, 192, 256):
            for dtype in offered.FLOATS:
                problem = Problem(RULES["kda"], 1, 1, 1, 1, 1, K, V, False, dtype, "cpu")
                assert {launch.spec for launch in launches(problem)} <= built


@pytest.mark.parametrize("dtype", offered.FLOATS)
def test_kernels_on_a_gpu_are_of_the_dtype_of_the_inputs(dtype: torch.dtype) -> None:
    """flashinfer#4214: float16 bits are never read as bfloat16."""
    from kda_tl.ops.prefill_launch import launches

    problem = Problem(RULES["kda"], 1, 1, 1, 1, 1, 128, 128, False, dtype, "sm_90")
    assert problem.kernel_dtype is dtype
    assert {launch.spec.dtype for launch in launches(problem)} == {str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("dtype", offered.FLOATS)
@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_every_accepted_dtype(rule: str, dtype: torch.dtype) -> None:
    x = {name: tensor.to(dtype) for name, tensor in inputs(rule, 40, HV=2).items()}
    o, state = call(rule, x, output_final_state=True)
    o_true, state_true = truth(rule, x)
    assert o.dtype == dtype and state.dtype == torch.float32
    assert (
        relative_error(o, o_true) < (LIMIT if dtype == torch.float32 else 0.004) and relative_error(state, state_true) < LIMIT
    )


def test_the_table_of_dtypes_names_every_tensor() -> None:
    from kda_tl.ops.arguments import TENSORS

    assert set(offered.DTYPES) == set(TENSORS)
    table = offered.dtype_table()
    assert "| initial_state | bfloat16, float16, float32 |" in table and "| state_indices | int32, int64 |" in table


@pytest.mark.parametrize("HV", [1, 5, 12, 24])
def test_a_head_does_not_depend_on_how_many_there_are(HV: int) -> None:
    """flashinfer#4351."""
    x = inputs("gdn", 65, HV=HV)
    x["beta"] = x["beta"].bfloat16()
    o, state = call("gdn", x, output_final_state=True)
    alone = {
        name: tensor if name in ("q", "k") else tensor[:, -1:] if name == "initial_state" else tensor[:, :, -1:]
        for name, tensor in x.items()
    }
    o_alone, state_alone = call("gdn", alone, output_final_state=True)
    assert torch.equal(o[:, :, -1:], o_alone) and torch.equal(state[:, -1:], state_alone)


def test_the_plan_of_more_than_one_run() -> None:
    plan = kda_tl.explain("chunk_kda", *(inputs("kda", 1, K=80, V=200)[name] for name in ("q", "k", "v", "g", "beta")))
    assert [(launch.spec.kernel, launch.spec.head_dim_k) for launch in plan.launches] == [
        ("chunk_wy", 128),
        *[("chunk_scan", 128)] * 2,
    ]
    assert "1 sequence of 1 token," in str(plan) and "grid 1 chunk slot x 1 head\n" in str(plan)
