"""States that live in a pool, sequences that start from nothing, and the states between chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chunk_kda_cases import nan_filled_memory
from op_inputs import offsets
from rule_inputs import call, inputs
from torch import Tensor

pytestmark = pytest.mark.usefixtures("cpu_kernels")
LENGTHS = [3, 0, 65]

POOLS: dict[str, Any] = {
    "contiguous": lambda slots, dtype: torch.full((slots, 2, 64, 64), torch.nan, dtype=dtype),
    "one half of a storage": lambda slots, dtype: torch.full((slots, 2, 2, 64, 64), torch.nan, dtype=dtype)[:, 1],
    "padded slots": lambda slots, dtype: torch.full((slots, 9000), torch.nan, dtype=dtype)[:, :8192].view(slots, 2, 64, 64),
    "heads last": lambda slots, dtype: torch.full((slots, 64, 64, 2), torch.nan, dtype=dtype).permute(0, 3, 1, 2),
}


def packed(rule: str = "kda", lengths: list[int] = LENGTHS, tail: int = 2) -> tuple[dict[str, Tensor], Tensor]:
    return inputs(rule, sum(lengths) + tail, HV=2, N=len(lengths)), torch.tensor(offsets(lengths), dtype=torch.int32)


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.float().nan_to_num(9.0), expected.float().nan_to_num(9.0))


@pytest.mark.parametrize("how", POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_a_pool_is_read_and_written_in_place(how: str, dtype: torch.dtype, state_v_first: bool) -> None:
    """flashinfer#3118: the caller's pool moves on, whatever its strides and dtype, and nothing else does."""
    x, cu_seqlens = packed()
    pool, indices = POOLS[how](7, dtype), torch.tensor([5, 0, 2], dtype=torch.int32)
    pool[indices.long()] = x.pop("initial_state").to(dtype)
    storage = pool._base if pool._base is not None else pool
    before = storage.clone()
    own = {**x, "initial_state": pool[indices.long()].float()}
    options = {"cu_seqlens": cu_seqlens, "state_v_first": state_v_first, "output_final_state": True}
    o_true, state_true = call("kda", own, **options)
    with nan_filled_memory():
        o, state = call("kda", {**x, "initial_state": pool}, state_indices=indices, **options)
    assert state is pool and torch.equal(o, o_true)
    assert torch.equal(pool[indices.long()], state_true.to(dtype))
    pool[indices.long()] = before.as_strided(pool.shape, pool.stride(), pool.storage_offset())[indices.long()]
    assert same(storage, before), "something beside the named slots was written"


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("padding", [(0, None, 0), (-1, None, None), (7, -1, None), (-1, -1, -1), (2**31 - 1, -5, 0)])
def test_sequences_that_are_padding(padding: tuple[int | None, ...], pack: bool, index_dtype: torch.dtype) -> None:
    """lightseekorg/tokenspeed#700: a padding index is no slot, and slot 0 belongs to somebody."""
    indices = torch.tensor([2 + n if slot is None else slot for n, slot in enumerate(padding)], dtype=index_dtype)
    null_index = 0 if 0 in padding else None
    live = torch.tensor([slot is None for slot in padding])
    if pack:
        x, cu_seqlens = packed(lengths=[3, 5, 4])
        tokens = torch.repeat_interleave(torch.arange(3), torch.tensor([3, 5, 4]))
    else:
        x, cu_seqlens = inputs("kda", 5, B=3, HV=2), None
    pool = torch.randn((7, 2, 64, 64), generator=torch.Generator().manual_seed(3))
    pool[live.logical_not().nonzero().squeeze(-1)] = torch.nan  # no slot that a live sequence names
    before = pool.clone()
    own = {**x, "initial_state": torch.where(live[:, None, None, None], before[torch.where(live, indices, 0)], 0.0)}
    o_true, state_true = call("kda", own, cu_seqlens=cu_seqlens, output_final_state=True)
    if pack:
        o_true[0, :12].masked_fill_(~live[tokens][:, None, None], 0.0)
    else:
        o_true[~live] = 0.0
        x["v"][~live] = torch.nan
    o, nothing = call(
        "kda", {**x, "initial_state": pool}, cu_seqlens=cu_seqlens, state_indices=indices, null_index=null_index
    )  # fmt: skip
    assert nothing is None and torch.equal(o, o_true)
    expected = before.clone()
    expected[indices[live].long()] = state_true[live]
    assert same(pool, expected)


@pytest.mark.parametrize("from_pool", [False, True])
def test_sequences_without_a_state_start_from_zero(from_pool: bool) -> None:
    x, cu_seqlens = packed()
    has = torch.tensor([True, False, False])
    own = {**x, "initial_state": x["initial_state"] * has[:, None, None, None]}
    o_true, state_true = call("kda", own, cu_seqlens=cu_seqlens, output_final_state=True)
    x["initial_state"][~has] = torch.nan
    options = {"cu_seqlens": cu_seqlens, "has_initial_state": has, "output_final_state": True}
    if from_pool:
        options["state_indices"] = torch.tensor([2, 1, 0])
        x["initial_state"] = x["initial_state"].flip(0).contiguous()
    o, state = call("kda", x, **options)
    assert torch.equal(o, o_true) and torch.equal(state.flip(0) if from_pool else state, state_true)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_initial_state_is_not_misread(dtype: torch.dtype) -> None:
    """fla#639."""
    x = inputs("kda", 10)
    x["initial_state"] = x["initial_state"].to(dtype)
    o, state = call("kda", x, output_final_state=True)
    x["initial_state"] = x["initial_state"].float()
    o_true, state_true = call("kda", x, output_final_state=True)
    assert torch.equal(o, o_true) and torch.equal(state, state_true)


def test_empty_pools_and_no_sequences() -> None:
    x = inputs("kda", 5, B=2)
    o, _ = call("kda", {**x, "initial_state": torch.empty(0, 1, 64, 64)}, state_indices=torch.tensor([0, 1]))
    assert not o.any()
    x = inputs("kda", 5, N=0)
    pool = torch.randn(3, 1, 64, 64)
    before = pool.clone()
    call("kda", {**x, "initial_state": pool}, state_indices=torch.empty(0, dtype=torch.int32), cu_seqlens=torch.tensor([0]))
    assert torch.equal(pool, before)


def test_indices_that_are_a_slice_or_change_in_place() -> None:
    """vllm-project/vllm#52413, QwenLM/FlashQLA#23."""
    x, cu_seqlens = packed()
    buffer = torch.tensor([99, 1, 2, 3, 99], dtype=torch.int32)
    states = x.pop("initial_state")
    for slots in ([1, 2, 3], [4, 0, 2]):
        buffer[1:4] = torch.tensor(slots)
        pool = torch.zeros(5, 2, 64, 64)
        pool[slots] = states
        expected = call("kda", {**x, "initial_state": states}, cu_seqlens=cu_seqlens, output_final_state=True)
        o, _ = call("kda", {**x, "initial_state": pool}, cu_seqlens=cu_seqlens, state_indices=buffer[1:4])
        assert torch.equal(o, expected[0]) and torch.equal(pool[slots], expected[1])


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_states_between_chunks(rule: str, state_v_first: bool) -> None:
    """flashinfer#4896: the checkpoint at 128 is the final state of a run over 128 tokens."""
    x = inputs(rule, 130, B=2, HV=2, V=64)
    options = {"output_final_state": True, "state_v_first": state_v_first}
    o, state, states = call(rule, x, return_intermediate_states=True, **options)
    o_true, state_true = call(rule, x, **options)
    assert torch.equal(o, o_true) and torch.equal(state, state_true)
    assert states.shape == (2, 3, 2, 64, 64) and states.dtype == torch.float32
    assert torch.equal(states[:, 0], x["initial_state"])
    for i in (1, 2):
        short = {name: tensor if name == "initial_state" else tensor[:, : 64 * i] for name, tensor in x.items()}
        assert torch.equal(states[:, i], call(rule, short, **options)[1])


def test_states_between_chunks_of_a_pack() -> None:
    lengths = [130, 0, 1, 64]
    x, cu_seqlens = packed(lengths=lengths)
    _, nothing, states = call("kda", x, cu_seqlens=cu_seqlens, return_intermediate_states=True)
    assert nothing is None and states.shape == (1, 3 + 0 + 1 + 1, 2, 64, 64)
    assert torch.equal(states[0, [0, 3, 4]], x["initial_state"][[0, 2, 3]])
    for i in (1, 2):
        short = {name: tensor[:1] if name == "initial_state" else tensor[:, : 64 * i] for name, tensor in x.items()}
        assert torch.equal(states[:, i], call("kda", short, output_final_state=True)[1])
    x["v"][:, 130:] = torch.nan
    _, _, of_the_first = call("kda", x, cu_seqlens=cu_seqlens, return_intermediate_states=True)
    assert torch.equal(of_the_first, states)


def test_states_between_chunks_without_a_state_and_without_tokens() -> None:
    x = inputs("kda", 70)
    del x["initial_state"]
    assert not call("kda", x, return_intermediate_states=True)[2][:, 0].any()
    assert call("kda", inputs("kda", 0, B=2), return_intermediate_states=True)[2].shape == (2, 0, 1, 64, 64)
    x, cu_seqlens = packed(lengths=[0, 0])
    assert call("kda", x, cu_seqlens=cu_seqlens, return_intermediate_states=True)[2].shape == (1, 0, 2, 64, 64)


def test_states_between_chunks_of_sequences_from_a_pool() -> None:
    x, cu_seqlens = packed(lengths=[70, 64])
    states = x.pop("initial_state")
    _, final, between = call(
        "kda", {**x, "initial_state": states}, cu_seqlens=cu_seqlens, output_final_state=True, return_intermediate_states=True
    )
    pool = torch.zeros(3, 2, 64, 64)
    pool[[2, 0]] = states
    _, _, found = call(
        "kda", {**x, "initial_state": pool}, cu_seqlens=cu_seqlens, state_indices=torch.tensor([2, 0]),
        return_intermediate_states=True,
    )  # fmt: skip
    assert torch.equal(found, between) and torch.equal(pool[[2, 0]], final)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("pack", [False, True])
def test_states_between_chunks_of_sequences_without_a_slot_are_zero(pack: bool, size: int, segments: int) -> None:
    """Kernels that work in the pool leave them unwritten; what torch gathers for the others starts from zero and goes on."""
    x = inputs("kda", 70, B=3, K=size, V=size)
    states = x.pop("initial_state")
    options: dict[str, Any] = {"return_intermediate_states": True, "intracard_segments": segments}
    if pack:
        x = {name: tensor.reshape(1, 210, *tensor.shape[2:]) for name, tensor in x.items()}
        options["cu_seqlens"] = torch.tensor([0, 70, 140, 210])
    expected = call("kda", {**x, "initial_state": states}, **options)[2].view(3, 2, 1, size, size)
    pool = torch.full((3, 1, size, size), torch.nan)
    pool[2] = states[1]
    with nan_filled_memory():
        _, _, found = call("kda", {**x, "initial_state": pool}, state_indices=torch.tensor([-1, 2, 7]), **options)
    found = found.view(3, 2, 1, size, size)
    assert torch.equal(found[1], expected[1]) and not found[[0, 2]].any()
