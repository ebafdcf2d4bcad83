"""Every bad input of DeltaLog decode is refused by name, before anything is read or written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deltalog_cases import K, V, tokens

from kda_tl.ops.deltalog import DeltaLogCache, deltalog_decode_gdn, deltalog_decode_kda, deltalog_decode_rwkv6

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def kda(**changes: Any) -> None:
    n, T = changes.pop("n", 2), changes.pop("T", 1)
    x = tokens(n, T, 1, 2, "kda", "weak", "cpu", 0)
    cache = DeltaLogCache(4, 2)
    before = cache.base.clone()
    try:
        deltalog_decode_kda(**{**x, "cache": cache, "state_indices": torch.arange(n), **changes})
    finally:
        assert torch.equal(cache.base, before) and not cache.lengths().any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": 3}, TypeError, "q must be a torch.Tensor, got int"),
        ({"beta": None}, TypeError, "beta must be a torch.Tensor, got NoneType"),
        ({"g": None}, TypeError, "g must be a torch.Tensor, got NoneType"),
        ({"state_indices": [0, 1]}, TypeError, "state_indices must be a torch.Tensor, got list"),
        ({"cache": None}, TypeError, "cache must be a DeltaLogCache, got NoneType"),
        ({"cache": DeltaLogCache(4, 2, rule="gdn")}, ValueError, "cache must be of rule kda, got one of gdn"),
        ({"q": torch.zeros(2, 1, K)}, ValueError, r"q must have shape \[n, T, H, K\]"),
        ({"q": torch.zeros(2, 1, 1, 64)}, ValueError, "K, the last size of q, must be 128 like the cache, got 64"),
        ({"q": torch.zeros(2, 1, 3, K)}, ValueError, "HV, the value heads of the cache, must be a multiple of H"),
        ({"q": torch.zeros(2, 1, 0, K)}, ValueError, "HV, the value heads of the cache, must be a multiple of H"),
        (
            {"q": torch.zeros(2, 1, 1, K, dtype=torch.float64)},
            TypeError,
            "q must have dtype bfloat16, float16, float32, got float64",
        ),
        ({"k": torch.zeros(2, 2, 1, K)}, ValueError, r"k must have shape \[n, T, H, K\] = \[2, 1, 1, 128\], got"),
        ({"v": torch.zeros(2, 1, 3, V)}, ValueError, r"v must have shape \[n, T, HV, V\] = \[2, 1, 2, 128\], got"),
        ({"v": torch.zeros(2, 1, 2, V, device="meta")}, ValueError, "all tensors must be on one device"),
        ({"g": torch.zeros(2, 1, 2)}, ValueError, r"g must have shape \[n, T, HV, K\]"),
        ({"g": torch.zeros(2, 1, 2, K, dtype=torch.int32)}, TypeError, "g must have dtype"),
        ({"beta": torch.zeros(2, 1, 1)}, ValueError, r"beta must have shape \[n, T, HV\]"),
        ({"state_indices": torch.zeros(3, dtype=torch.int32)}, ValueError, r"state_indices must have shape \[n\] = \[2\]"),
        ({"state_indices": torch.zeros(2)}, TypeError, "state_indices must have dtype int32, int64, got float32"),
        ({"state_indices": torch.tensor([3, 3])}, ValueError, r"state_indices must not name a slot twice, got \[3, 3\]"),
        ({"valid": torch.zeros(1, dtype=torch.int32)}, ValueError, r"valid must have shape \[n\] = \[2\]"),
        ({"valid": torch.zeros(2)}, TypeError, "valid must have dtype int32, int64"),
        ({"null_index": 2**31}, ValueError, "null_index must be an int of 32 bits or None, got 2147483648"),
        ({"null_index": "x"}, TypeError, "null_index must be an int or None, got str"),
        ({"null_index": True}, TypeError, "null_index must be an int or None, got bool"),
        ({"scale": "x"}, TypeError, "scale must be a number, or None for K .* got str"),
        ({"scale": torch.ones(())}, TypeError, "scale must be a number, or None for K .* got Tensor"),
        ({"T": 17}, ValueError, "T must be at most 16, the capacity of the log, got 17"),
        ({"T": 2, "verify": False}, ValueError, "verify=False needs T = 1, got T = 2"),
        ({"A_log": torch.zeros(2)}, ValueError, "A_log needs use_gate_in_kernel=True"),
        ({"dt_bias": torch.zeros(2, K)}, ValueError, "dt_bias needs use_gate_in_kernel=True"),
        ({"use_gate_in_kernel": True}, ValueError, "needs A_log, lower_bound or both"),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(3)}, ValueError, r"A_log must have shape \[HV\] = \[2\]"),
        (
            {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.zeros(K)},
            ValueError,
            "dt_bias must have shape",
        ),
        ({"use_gate_in_kernel": True, "lower_bound": 1.0}, ValueError, "lower_bound must be finite and below 0"),
        ({"use_gate_in_kernel": True, "lower_bound": "x"}, TypeError, "lower_bound must be a number < 0, got str"),
        ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True"),
        (
            {"q": torch.zeros(2, 1, 1, K, requires_grad=True)},
            NotImplementedError,
            "q requires a gradient and deltalog_decode_kda has no backward",
        ),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kda(**changes)


def test_the_other_rules_name_their_own_arguments() -> None:
    x = tokens(1, 1, 1, 2, "gdn", "weak", "cpu", 0)
    indices = torch.tensor([0])
    with pytest.raises(ValueError, match=r"g must have shape \[n, T, HV\] = \[1, 1, 2\]"):
        deltalog_decode_gdn(**{**x, "g": torch.zeros(1, 1, 2, K)}, cache=DeltaLogCache(1, 2, rule="gdn"), state_indices=indices)
    x = tokens(1, 1, 1, 2, "rwkv6", "weak", "cpu", 0)
    cache = DeltaLogCache(1, 2, rule="rwkv6")
    for name, value, message in [
        ("r", torch.zeros(1, 1, K), r"r must have shape \[n, T, H, K\]"),
        ("w", torch.zeros(1, 1, 2), r"w must have shape \[n, T, HV, K\]"),
        ("u", torch.zeros(K), r"u must have shape \[H, K\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            deltalog_decode_rwkv6(**{**x, name: value}, cache=cache, state_indices=indices)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"slots": 0}, ValueError, "slots must be an integer from 1 to 2147483647, got 0"),
        ({"slots": True}, ValueError, "slots must be an integer from 1 to 2147483647, got True"),
        ({"slots": 2**31}, ValueError, "slots must be an integer from 1 to 2147483647, got 2147483648"),
        ({"HV": 1.5}, ValueError, "HV must be an integer from 1 to 65535, got 1.5"),
        ({"HV": 65536}, ValueError, "HV must be an integer from 1 to 65535, got 65536"),
        ({"K": 64.0}, ValueError, "K must be 64 or 128, got 64.0"),
        ({"rule": ["kda"]}, ValueError, r"rule must be one of kda, gdn, rwkv6, got \['kda'\]"),
        ({"K": 96}, ValueError, "K must be 64 or 128, got 96"),
        ({"V": 256}, ValueError, "V must be 64 or 128, got 256"),
        ({"rule": "mamba"}, ValueError, "rule must be one of kda, gdn, rwkv6, got 'mamba'"),
        ({"dtype": torch.float64}, TypeError, "dtype must be bfloat16, float16 or float32"),
        ({"state_dtype": torch.float64}, TypeError, "state_dtype must be bfloat16, float16 or float32"),
        ({"merge_every": 0}, ValueError, "merge_every must be an integer from 1 to 16, got 0"),
        ({"merge_every": 17}, ValueError, "merge_every must be an integer from 1 to 16, got 17"),
        ({"launches": 3}, ValueError, "launches must be 1 or 2, got 3"),
        (
            {"launches": 2, "rule": "gdn"},
            ValueError,
            "launches must be 1 for gdn with a float32 base; for cpu, two launches are built",
        ),
        (
            {"state_v_first": False, "rule": "rwkv6"},
            ValueError,
            r"state_v_first must be True for rwkv6 with a float32 base; for cpu, \[K, V\] is built",
        ),
        ({"state_v_first": False, "launches": 2}, ValueError, "launches must be 1 where state_v_first is False"),
        ({"state_v_first": False, "base": torch.zeros(4, 2, 64, V)}, ValueError, r"base must have shape \[slots, HV, K, V\]"),
        (
            {"base": torch.zeros(1, 2, V, K).expand(4, -1, -1, -1)},
            ValueError,
            "base must not be expanded to be updated in place",
        ),
        ({"base": torch._neg_view(torch.zeros(4, 2, V, K))}, ValueError, "base must not be a lazily negated view"),
        ({"base": 1}, TypeError, "base must be a torch.Tensor, got int"),
        ({"base": torch.zeros(2, 2, V, K)}, ValueError, r"base must have shape \[slots, HV, V, K\]"),
        ({"base": torch.zeros(4, 2, V, K, dtype=torch.int8)}, TypeError, "base must have dtype"),
        ({"base": torch.zeros(4, 2, K, V).transpose(-1, -2)}, ValueError, "base must have a last stride of 1"),
        (
            {"base": torch.zeros(4, 2, V, K + 1)[..., :K]},
            ValueError,
            "base must have a last stride of 1, other strides that are",
        ),
        ({"base": torch.zeros(4 * 2 * V * K + 1)[1:].view(4, 2, V, K)}, ValueError, "at 4 past 16 bytes"),
    ],
)
def test_a_cache_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DeltaLogCache(**{"slots": 4, "HV": 2, **changes})


def test_maintenance_refuses() -> None:
    cache = DeltaLogCache(4, 2)
    state = torch.zeros(1, 2, K, V)
    other = DeltaLogCache(4, 2, rule="gdn").snapshot([0])
    for run, error, message in [
        (lambda: cache.read_state([4]), ValueError, "state_indices must be from 0 to 3, got 4"),
        (lambda: cache.flush([-1]), ValueError, "state_indices must be from 0 to 3, got -1"),
        (lambda: cache.reset([1, 1]), ValueError, "state_indices must not name a slot twice"),
        (lambda: cache.read_state(torch.tensor([1.0])), ValueError, "state_indices must be int32 or int64"),
        (lambda: cache.write_state([0, 1], state), ValueError, r"state must have shape \[n, HV, K, V\]"),
        (lambda: cache.write_state([0], [1]), TypeError, "state must be a torch.Tensor, got list"),
        (lambda: cache.write_state([0], state.to_sparse()), TypeError, "state must be a dense, strided tensor, got sparse_coo"),
        (lambda: DeltaLogCache(1, 2, base=state.to_sparse()), TypeError, "base must be a dense, strided tensor"),
        (lambda: cache.fork([0], [1, 2]), ValueError, "target must have as many entries as source, 1, got 2"),
        (lambda: cache.fork([0, 1], [2, 2]), ValueError, "target must not name a slot twice"),
        (lambda: cache.fork([9], [1]), ValueError, "source must be from 0 to 3, got 9"),
        (lambda: cache.restore(3), TypeError, "snapshot must be a DeltaLogSnapshot, got int"),
        (lambda: cache.restore(cache.snapshot([0]), [1, 2]), ValueError, "state_indices must have 1 entries like the snapshot"),
        (lambda: cache.restore(other), ValueError, "snapshot is of another kind of cache: log_decay"),
        (lambda: cache.truncate([1], [0]), ValueError, "drop must be from 0 to the cursor: slot 0 has 0 entries, got 1"),
        (lambda: cache.truncate([-1], [0]), ValueError, "drop must be from 0 to the cursor"),
        (lambda: cache.truncate([1, 2], [0]), ValueError, "drop must have as many entries as state_indices, 1, got 2"),
        (lambda: cache.truncate([0.5], [0]), ValueError, "drop must be int32 or int64"),
        (lambda: cache.truncate([2**32 + 1], [0]), ValueError, "drop must be from 0 to the cursor"),
        (lambda: cache.truncate([0, 0], [1, 1]), ValueError, "state_indices must not name a slot twice, got .1, 1."),
        (lambda: cache.truncate([0], [1], null_index="x"), TypeError, "null_index must be an int or None, got str"),
        (lambda: cache.truncate([0], [2**70]), TypeError, "state_indices must be a tensor or a sequence of integers"),
        (lambda: cache.reset(3), TypeError, "state_indices must be a tensor or a sequence of integers, got 3"),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            run()
