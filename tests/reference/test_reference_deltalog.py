"""Base and log against the token recurrence: every interval, every cursor, every rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kda_tl.reference import recurrent_kda
from kda_tl.reference.deltalog import DeltaLogState, deltalog_kda, deltalog_rwkv6, replay_weights

LIMIT = 1e-12
GATES = ("none", "mild", "strong", "constant -60", "masked")


def rwkv6_loop(r: Tensor, k: Tensor, v: Tensor, w: Tensor, bonus: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One vector at a time in numpy: read before decay and write, bonus for the token at hand."""
    arrays = [x.numpy() for x in (r, k, v, w)]
    o, final, group = np.zeros(v.shape), state.numpy().copy(), v.shape[2] // r.shape[2]
    for b, h in np.ndindex(v.shape[0], v.shape[2]):
        r_h, k_h, v_h, w_h = (x[b, :, h // group if i < 2 else h] for i, x in enumerate(arrays))
        for t in range(v.shape[1]):
            o[b, t, h] = r_h[t] @ final[b, h] + (r_h[t] * bonus[h // group].numpy() * k_h[t]).sum() * v_h[t]
            final[b, h] = np.exp(w_h[t])[:, None] * final[b, h] + np.outer(k_h[t], v_h[t])
    return torch.from_numpy(o), torch.from_numpy(final)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("merge_every", [1, 2, 3, 8, 50])
def test_kda_equals_the_recurrence(inputs, relative_error, gate, merge_every) -> None:
    x = inputs(2, 21, 1, 2, 16, 24, gate)
    o_true, state_true = recurrent_kda(**x)
    o, state = deltalog_kda(**x, merge_every=merge_every)
    assert state.cursor == 21 % merge_every
    assert relative_error(o, o_true) < LIMIT and relative_error(state.logical(), state_true) < LIMIT


@pytest.mark.parametrize("merge_every", [1, 3, 8])
def test_gdn_has_one_decay_for_all_keys(inputs, relative_error, merge_every) -> None:
    x = inputs(1, 17, 2, 4, 16, 16, "bounded")
    x["g"] = x["g"][..., 0]
    o_true, state_true = recurrent_kda(**x)
    o, state = deltalog_kda(**x, merge_every=merge_every)
    assert relative_error(o, o_true) < LIMIT and relative_error(state.logical(), state_true) < LIMIT


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("merge_every", [1, 4, 50])
def test_rwkv6_equals_the_recurrence(inputs, relative_error, gate, merge_every) -> None:
    x = inputs(2, 19, 2, 4, 16, 24, gate)
    bonus = torch.randn(2, 16, dtype=torch.float64)
    o_true, state_true = rwkv6_loop(x["q"], x["k"], x["v"], x["g"], bonus, x["initial_state"])
    o, state = deltalog_rwkv6(*(x[name] for name in "qkvg"), bonus, 1.0, x["initial_state"], merge_every)
    assert relative_error(o, o_true) < LIMIT and relative_error(state.logical(), state_true) < LIMIT


def test_every_interval_and_cursor_gives_the_same_logical_state(inputs, relative_error) -> None:
    for T in range(1, 12):
        x = inputs(1, T, 1, 1, 8, 8, "masked", seed=T)
        truth = recurrent_kda(**x)[1]
        for merge_every in range(1, 12):
            for first_window in (1, 2, merge_every):
                _, state = deltalog_kda(**x, merge_every=merge_every, first_window=first_window)
                assert relative_error(state.logical(), truth) < LIMIT


def test_truncation_is_the_state_before_the_dropped_tokens(inputs, relative_error) -> None:
    x = inputs(1, 9, 1, 2, 8, 8, "masked")
    _, state = deltalog_kda(**x, merge_every=50)
    for drop in range(10):
        few = {name: y if name == "initial_state" else y[:, : 9 - drop] for name, y in x.items()}
        assert relative_error(state.truncate(drop).logical(), recurrent_kda(**few)[1]) < LIMIT
    for drop in (-1, 10):
        with pytest.raises(ValueError, match="drop must be from 0 to the cursor, 9"):
            state.truncate(drop)


def test_a_mask_takes_no_precision_from_its_neighbours() -> None:
    """In float32 the cumulative sums -1000.001 - -1000 would be wrong by 6e-5."""
    g = torch.tensor([-0.5, -1000.0, -1e-3, -2e-3]).unsqueeze(-1)
    w, w_base = replay_weights(g)
    torch.testing.assert_close(w[:, 0].double(), torch.tensor([-1000.003, -3e-3, -2e-3, 0.0]).double().exp(), rtol=2e-7, atol=0)
    assert w_base == 0


def test_an_empty_log() -> None:
    base = torch.randn(2, 4, 3)
    state = DeltaLogState.of(base)
    assert state.cursor == 0 and torch.equal(state.logical(), base) and torch.equal(state.merge().base, base)
    x = torch.randn(2, 4)
    torch.testing.assert_close(state.read(x), (x.unsqueeze(-2) @ base).squeeze(-2))


@pytest.mark.parametrize("name", ["merge_every", "first_window"])
def test_intervals_below_one_are_refused(inputs, name) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        deltalog_kda(**inputs(1, 2, 1, 1, 4, 4), **{name: 0})
