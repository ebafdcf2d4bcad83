from __future__ import annotations

import pytest
import torch

from kda_tl.reference import read_slots, recurrent_kda, write_slots


def test_a_step_through_a_pool_that_is_a_view(inputs, relative_error) -> None:
    """The caller's own pool moves on, padding and foreign slots do not, and the other half of the storage is untouched."""
    storage = torch.randn(8, 2, 2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).bfloat16()
    before, pool = storage.clone(), storage[:, 1]
    indices = torch.tensor([2, -1, 7, 0], dtype=torch.int32)
    x = inputs(4, 3, 1, 2, 4, 6)
    x["initial_state"] = read_slots(pool, indices, torch.tensor([True, True, False, True]))
    assert torch.equal(x["initial_state"][[0, 3]], before[[2, 0], 1])
    assert not x["initial_state"][[1, 2]].any()
    _, states = recurrent_kda(**x, state_v_first=True)
    write_slots(pool, indices, states)
    assert torch.equal(storage[:, 0], before[:, 0])
    assert torch.equal(storage[[1, 3, 4, 5, 6], 1], before[[1, 3, 4, 5, 6], 1])
    assert torch.equal(pool[[2, 7, 0]], states[[0, 2, 3]].bfloat16())


@pytest.mark.parametrize(("null_index", "indices"), [(-1, [2, -1, -1]), (0, [2, 0, 0]), (-1, [-1, -1, -1]), (-1, [4, 99, -7])])
def test_padding_reads_zero_and_writes_nothing(null_index: int, indices: list[int]) -> None:
    pool = torch.randn(4, 1, 3, 3)
    pool[1] = torch.nan
    before, slots = pool.clone(), torch.tensor(indices)
    states = read_slots(pool, slots, null_index=null_index)
    assert not states[1:].any()
    write_slots(pool, slots, torch.full_like(states, 5.0), null_index)
    written = [2] if indices[0] == 2 else []
    others = [slot for slot in range(4) if slot not in written]
    assert torch.equal(pool[others].nan_to_num(), before[others].nan_to_num()) and (pool[written] == 5.0).all()


def test_a_fresh_sequence_does_not_see_what_its_slot_held() -> None:
    pool = torch.full((2, 1, 2, 2), torch.nan)
    states = read_slots(pool, torch.tensor([1]), torch.tensor([False]))
    assert torch.equal(states, torch.zeros(1, 1, 2, 2))


def test_gradients_reach_the_pool() -> None:
    pool = torch.randn(3, 1, 2, 2, requires_grad=True)
    read_slots(pool, torch.tensor([2, -1])).sum().backward()
    assert pool.grad is not None and pool.grad.sum(dim=(1, 2, 3)).tolist() == [0.0, 0.0, 4.0]


def test_wrong_arguments_are_named() -> None:
    pool, slots = torch.zeros(3, 1, 2, 2), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"^state_indices must be a one-dim"):
        read_slots(pool, slots.float())
    with pytest.raises(ValueError, match=r"^has_initial_state must be bool"):
        read_slots(pool, slots, torch.ones(2))
    with pytest.raises(ValueError, match=r"^states must be"):
        write_slots(pool, slots, pool)
    with pytest.raises(ValueError, match=r"^state_indices must not name a slot twice"):
        write_slots(pool, torch.tensor([1, 1]), pool[:2])
