"""What users of other libraries of this kind have reported, as tests that name the thread and cover its kind.

Sizes, serving, caches and cuts are in test_known_faults_serving.py.

Held elsewhere, by the test that is named:

- fla#104, an open gate is the delta rule: ops/test_ops_chunk_kda, ops/test_ops_rules; reference/test_reference_recurrent.
- meta-pytorch/attention-gym#394, MoonshotAI/FlashKDA#7, constant and alternating strong gates: test_strong_constant_gates,
  test_a_strong_gate_on_one_row, test_strong_gates; of DeltaLog, test_every_gate.
- sgl-project/sglang#38975, the sigmoid in float32: test_sigmoid_of_beta_is_not_rounded_to_the_input_type,
  test_the_sigmoid_is_not_rounded_to_the_input_type, test_the_error_of_the_state_does_not_grow,
  test_an_accumulated_state_keeps_the_float32_sigmoid.
- fla#77, attention-gym#461, fla#1007, fla#863, gate gradients: test_strong_decays_at_the_first_row_of_a_block,
  test_gate_gradients_of_a_constant_gate, test_a_first_token_has_no_gate_gradient_at_all, test_a_saturated_bounded_gate,
  test_no_gate_is_a_gate_of_zero.
- MoonshotAI/FlashKDA#32, no tokens: test_no_tokens_or_no_sequences, test_no_tokens_and_no_sequences,
  test_no_tokens_and_no_requests, test_no_requests_and_no_tokens, test_gradients_of_nothing.
- lightseekorg/tokenspeed#700, padding: test_sequences_that_are_padding, test_padding_touches_no_slot,
  test_padding_is_zero_and_touches_nothing.
- mlc-ai/TIRx-kernels#206, sgl-project/sglang#38994, replays of a CUDA graph: gpu/. Indices that change in place, below.
- vllm-project/vllm#41292, layouts: test_both_state_layouts, test_state_with_v_first, test_a_layout_is_what_lies_in_memory.
- flashinfer#3118, pools that are no contiguous tensor: test_a_pool_is_read_and_written_in_place,
  test_a_pool_that_is_no_contiguous_tensor, test_narrow_states_move_where_they_lie, test_a_pool_of_ones_own_is_used_in_place.
- flashinfer#4896, states between chunks: test_states_between_chunks and those after it.
- flashinfer#2490, exp(g) in place of g: test_a_gate_above_zero_is_refused_on_request,
  test_a_linear_decay_is_refused_on_request.
- flashinfer#4214, float16 bits: test_every_accepted_dtype, test_narrow_activations_are_computed_in_float32.
- fla#66, vllm-project/vllm#52413, threads and processes with a cold cache: test_cold_threads_load_once,
  test_cold_processes_share_one_registry.
- fla#52, under a compiler: test_compiled_equals_eager, test_compiled_gradients_equal_eager_ones; decode, below.
- MoonshotAI/FlashKDA#9, sequences that are cut: test_any_gate_is_exact, distributed/test_distributed_context,
  test_splits_are_exact_for_weak_decay_too.
- fla#945, configurations that race: gpu/.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from chunk_kda_cases import nan_filled_memory, relative_error
from torch import Tensor

sys.path.append(str(Path(__file__).parent / "ops"))

import deltalog_cases
from decode_cases import OPS as RECURRENT
from decode_cases import DecodeCase, decode_truth, make_decode_inputs
from fault_calls import LIMIT, PER_TOKEN, decode, deltalog, one_by_one, run
from rule_inputs import call, inputs, truth

import kda_tl

pytestmark = pytest.mark.usefixtures("cpu_kernels")


# -- A. forward numerics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [17, 22, 33, 47])
@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_fla_1240_a_future_gate_changes_no_bit_of_outputs_and_gradients(rule: str, T: int) -> None:
    """Bounded gate in the kernel, bfloat16, beta 1: only the last token's gate changes, or a token follows."""
    x = inputs(rule, T + 1, H=2, HV=2)
    del x["initial_state"]
    x |= {"beta": torch.ones_like(x["beta"]), "g": torch.randn(x["g"].shape, generator=torch.Generator().manual_seed(T))}
    x = {name: tensor.bfloat16() for name, tensor in x.items()}
    gate: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": torch.zeros(2)} | (
        {"lower_bound": -5.0} if rule == "kda" else {}
    )
    results = []
    for tokens, last in [(T, -9.0), (T, 9.0), (T + 1, 9.0)]:
        leaves = {name: tensor[:, :tokens].clone() for name, tensor in x.items()}
        leaves["g"][:, T - 1 :] = last
        leaves = {name: tensor.requires_grad_() for name, tensor in leaves.items()}
        o, _ = call(rule, leaves, **gate)
        o[:, : T - 1].float().square().sum().backward()
        results.append([o.detach()[:, : T - 1], *(leaves[name].grad[:, : T - 1] for name in PER_TOKEN)])
        assert not any(leaves[name].grad[:, T - 1 :].any() for name in PER_TOKEN)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("T", [7, 50, 64, 65, 256, 1024])
def test_fla_104_a_gate_of_zero_on_half_of_the_tokens(T: int) -> None:
    half = torch.rand(T, generator=torch.Generator().manual_seed(T)) < 0.5
    for rule in ("kda", "gdn", "gla", "simple_gla"):
        x = inputs(rule, T)
        x["g"][:, half] = 0.0
        o, state = run(rule, x)
        o_true, state_true = truth(rule, x)
        assert relative_error(o, o_true) < LIMIT and relative_error(state, state_true) < LIMIT


@pytest.mark.parametrize("gate", [-5.9, -80.0, -1000.0, -torch.inf, "alternating"])
def test_attention_gym_394_strong_gates_in_decode(gate: float | str) -> None:
    for rule in ("kda", "gdn", "gla", "rwkv6", "simple_gla"):
        x = decode(rule, T=20)
        g = x[next(name for name in ("g", "gk", "w") if name in x)]
        g.fill_(0.0 if gate == "alternating" else gate)
        if gate == "alternating":
            g[:, 1::2] = -20.0
        o, state = RECURRENT[rule](**x)
        case = DecodeCase(rule, rule=rule, T=20, dtype=torch.float32)
        made = make_decode_inputs(case, "cpu", 0)
        made.args.update(x)
        o_true, states = decode_truth(case, made)
        assert relative_error(o, o_true) < LIMIT
        assert relative_error(state.transpose(-1, -2), torch.stack(states)) < LIMIT


def test_tokenspeed_847_the_bounded_gate_in_decode() -> None:
    """g = -5 sigmoid(0) = -2.5; a clamped softplus gives -0.693."""
    zeros = {"g": torch.zeros(1, 1, 1, 128), "beta": torch.zeros(1, 1, 1)} | dict.fromkeys("qkv", torch.ones(1, 1, 1, 128))
    gate = {"use_gate_in_kernel": True, "lower_bound": -5.0, "A_log": torch.zeros(1), "dt_bias": torch.zeros(128)}
    state = torch.randn(1, 1, 128, 128, generator=torch.Generator().manual_seed(0))
    expected = torch.exp(torch.tensor(-2.5)) * state
    _, dense = kda_tl.recurrent_kda(**zeros, **gate, initial_state=state, output_final_state=True)
    cache = kda_tl.DeltaLogCache(1, 1)
    cache.write_state([0], state)
    kda_tl.deltalog_decode_kda(**zeros, **gate, cache=cache, state_indices=torch.tensor([0]))
    for found in (dense, cache.read_state()):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


# -- B. gradients ------------------------------------------------------------------------------------------------------------


def test_fla_863_a_gate_of_zero_has_the_gradients_of_none() -> None:
    x = inputs("gdn", 128, H=2, HV=2)
    found = []
    for rule, gate in (("gdn", {"g": torch.zeros_like(x["g"])}), ("delta_rule", {})):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items() if name != "g"}
        o, state = call(rule, {**leaves, **gate}, output_final_state=True)
        (o.sin().sum() + state.cos().sum()).backward()
        found.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, gradient in found[0].items():
        assert relative_error(gradient, found[1][name].double()) < LIMIT, name


@pytest.mark.parametrize("bounds", [[0, 100, 150], [0, 64, 128]])
@pytest.mark.parametrize("rule", ["kda", "gdn", "gla"])
def test_FlashQLA_36_gradients_past_the_pack_are_zero(rule: str, bounds: list[int]) -> None:
    x = inputs(rule, 256, N=2)
    for name in PER_TOKEN:
        if name in x:
            x[name][:, bounds[-1] :] = torch.nan
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
    with nan_filled_memory():
        o, state = call(rule, leaves, cu_seqlens=torch.tensor(bounds), output_final_state=True)
        assert not o[:, bounds[-1] :].any()
        (o.sin().sum() + state.sum()).backward()
    for name, leaf in leaves.items():
        assert leaf.grad.isfinite().all() and leaf.grad.any()
        assert name == "initial_state" or not leaf.grad[:, bounds[-1] :].any()


# -- C. shapes, head dims, head counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [63, 65, 500, 1000])
@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_cuLA_38_the_last_chunk_of_a_batch_row(rule: str, T: int) -> None:
    x = inputs(rule, T, B=2)
    o, state = run(rule, x)
    _, state_true = truth(rule, x)
    assert all(relative_error(state[b], state_true[b]) < LIMIT for b in (0, 1))
    for name in PER_TOKEN:
        x[name][1] = torch.nan
    o_alone, state_alone = run(rule, x)
    assert torch.equal(o_alone[0], o[0]) and torch.equal(state_alone[0], state[0])


@pytest.mark.parametrize("pack", [False, True])
def test_FlashQLA_24_every_head_dim(pack: bool) -> None:
    sizes = [(K, 128) for K in (16, 32, 48, 64, 80, 96, 128)] + [(128, V) for V in range(16, 257, 16)]
    for K, V in sizes:
        x = inputs("gdn", 66, HV=2, K=K, V=V, N=2 if pack else 1)
        options = {"cu_seqlens": torch.tensor([0, 1, 66])} if pack else {}
        for state in (True, False):
            if not state:
                del x["initial_state"]
            o, final = run("gdn", x, **options)
            o_true, final_true = truth("gdn", x, **options)
            assert relative_error(o, o_true) < LIMIT and relative_error(final, final_true) < LIMIT, (K, V, state)
    for K in (160, 192, 256):
        with pytest.raises(ValueError, match=f"K, the last size of q, must be from 1 to 128, got {K}"):
            call("gdn", inputs("gdn", 3, K=K))


def test_fla_639_values_much_wider_than_keys() -> None:
    case = DecodeCase("wide", T=3, V=512, dtype=torch.bfloat16, gate_dtype=torch.bfloat16, state_dtype=torch.bfloat16, H=4)
    made = make_decode_inputs(case, "cpu", 0)
    o, state = kda_tl.recurrent_kda(**made.args)
    o_true, states = decode_truth(case, made)
    assert o.shape[-1] == 512 and relative_error(o, o_true) < 5e-3
    assert relative_error(state.transpose(-1, -2), torch.stack(states)) < 5e-3
    with pytest.raises(ValueError, match="V, the last size of v, must be from 1 to 256, got 512"):
        call("kda", inputs("kda", 3, K=128, V=512))


@pytest.mark.parametrize("HV", [1, 2, 3, 5, 6, 12, 24, 48])
def test_flashinfer_4351_a_head_does_not_depend_on_the_number_of_heads(HV: int) -> None:
    """bfloat16 write strengths, whose rows are then of any number of bytes."""
    last = {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "initial_state": 1}
    for T in (1, 64, 65, 130) if HV < 24 else (1, 65):
        x = inputs("kda", T, H=HV, HV=HV)
        x["beta"] = x["beta"].bfloat16()
        o, state = run("kda", x)
        o_alone, state_alone = run("kda", {name: y.narrow(last[name], HV - 1, 1) for name, y in x.items()})
        assert torch.equal(o[:, :, -1:], o_alone) and torch.equal(state[:, -1:], state_alone)
    for rule in ("kda", "gdn"):
        x = decode(rule, H=HV, HV=HV, v_first=False)
        x["beta"] = x["beta"].bfloat16()
        o, state = RECURRENT[rule](**x)
        own = {name: y.narrow(last[name], HV - 1, 1) if name in last else y for name, y in x.items()}
        o_alone, state_alone = RECURRENT[rule](**own)
        assert torch.equal(o[:, :, -1:], o_alone) and torch.equal(state[:, -1:], state_alone)
        steps = deltalog_cases.tokens(2, 3, HV, HV, rule, "bounded", "cpu", HV)
        steps["beta"] = steps["beta"].bfloat16()
        many, one = (kda_tl.DeltaLogCache(2, heads, rule=rule, merge_every=2) for heads in (HV, 1))
        o = deltalog(rule, steps, many, [1, 0])
        o_alone = deltalog(rule, {name: y.narrow(2, HV - 1, 1) for name, y in steps.items()}, one, [1, 0])
        assert torch.equal(o[:, :, -1:], o_alone) and torch.equal(many.read_state()[:, -1:], one.read_state())


# -- D. packs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [[0, 63, 64], [0, 64, 65], [0, 1, 2], [0, 511, 512], [0, 0, 1, 1]])
@pytest.mark.parametrize("rule", ["kda", "gdn", "gla", "rwkv6"])
def test_cudnn_frontend_1013_a_last_sequence_of_one_token(rule: str, bounds: list[int]) -> None:
    x = inputs(rule, bounds[-1], HV=2, N=len(bounds) - 1)
    o, state = run(rule, x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    o_alone, state_alone = one_by_one(rule, x, bounds)
    assert torch.equal(o, o_alone) and torch.equal(state, state_alone)


def test_fla_npu_242_a_tail_of_39_rows_amid_poison() -> None:
    x = inputs("kda", 64 + 39, H=2, HV=2)
    o, state = run("kda", x)
    assert o.isfinite().all() and state.isfinite().all()
    for value in (torch.nan, 1e30, torch.inf):
        behind = {name: _surrounded(y, value) for name, y in x.items()}
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(run("kda", behind), (o, state)))


def _surrounded(x: Tensor, value: float) -> Tensor:
    buffer = torch.full([size + 16 for size in x.shape], value)
    return buffer[tuple(slice(8, 8 + size) for size in x.shape)].copy_(x)


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_fla_npu_242_twelve_lengths_in_one_call(rule: str) -> None:
    bounds = [0, *itertools.accumulate([2049, 1011, 513, 256, 128, 65, 32, 16, 8, 4, 5, 1])]
    x = inputs(rule, bounds[-1], N=12)
    o, state = run(rule, x, cu_seqlens=torch.tensor(bounds))
    o_alone, state_alone = one_by_one(rule, x, bounds)
    assert o.isfinite().all() and torch.equal(o, o_alone) and torch.equal(state, state_alone)
