"""The smallest launch of a kernel, from the description that its artifact gives of itself."""

from __future__ import annotations

import pytest
import torch

import kda_tl
from kda_tl.registry import Registry
from kda_tl.runtime.warmup import launch_once, smallest_arguments
from kda_tl.specs.defaults import default_specs

CPU = torch.device("cpu")


@pytest.mark.parametrize("spec", default_specs("cpu"), ids=lambda spec: spec.key)
def test_every_kernel_of_the_default_set_starts(fresh, cpu_kernels: Registry, spec) -> None:
    launch_once(spec, "cpu", CPU)
    assert (kda_tl.counters().loads, kda_tl.counters().misses) == (1, 0)
    launch_once(spec, "cpu", CPU)
    assert (kda_tl.counters().loads, kda_tl.counters().hits) == (1, 1)


def test_sizes_are_one_and_memory_is_small() -> None:
    parameters = [
        {"name": "q", "dtype": "bfloat16", "shape": ["B", "T", "H", "128"], "strides": []},
        {"name": "cu_seqlens", "dtype": "int32", "shape": ["N + 1"], "strides": []},
        {"name": "log", "dtype": "float32", "shape": ["(slots - 1) * 2 + 3 // 2", "HV % 2"], "strides": []},
        {"name": "scale", "dtype": "float32"},
        {"name": "uniform", "dtype": "int32"},
    ]
    q, offsets, log, scale, uniform = smallest_arguments(parameters, CPU)
    assert (q.shape, q.dtype) == ((1, 1, 1, 128), torch.bfloat16) and q.is_contiguous()
    assert (offsets.shape, offsets.dtype) == ((2,), torch.int32) and log.shape == (1, 1)
    assert (scale, uniform) == (1.0, 1) and isinstance(scale, float) and isinstance(uniform, int)
    assert all(not tensor.any() for tensor in (q, offsets, log))
    assert sum(tensor.untyped_storage().nbytes() for tensor in (q, offsets, log)) < 2**18


@pytest.mark.parametrize("extent", ["f(T)", "T ** 2", "1.5", "__import__('os')"])
def test_only_arithmetic_is_evaluated(extent: str) -> None:
    with pytest.raises(ValueError, match="extents are integers"):
        smallest_arguments([{"name": "q", "dtype": "float32", "shape": [extent]}], CPU)
