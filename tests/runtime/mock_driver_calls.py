# ruff: noqa: E402
"""Runs in a process of its own, with the mock driver on the library path: loads both kernels of ARCH from REGISTRY and calls
them on host memory that claims to lie on cuda:0. Prints one JSON line of what was raised; the mock logs what was launched.

    mock_driver_calls.py REGISTRY ARCH [hide-tilelang]
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)  # as importing a CUDA build of torch would

if sys.argv[3:] == ["hide-tilelang"]:
    sys.modules["tilelang"] = sys.modules["tvm"] = None  # type: ignore[assignment]

import torch
from fake_device import on_device
from prefill_arguments import prefill_arguments

from kda_tl.registry import Registry
from kda_tl.runtime import fused
from kda_tl.runtime.loader import load
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec

OPERANDS = getattr(torch, ChunkWySpec().operand_dtype)


def arguments(*shape: Any) -> dict[str, dict[str, Any]]:
    return prefill_arguments(*shape, dtype=torch.bfloat16, operand_dtype=OPERANDS)


def call_fused(kernels: dict[str, Any], calls: dict[str, dict[str, Any]]) -> str | None:
    """Both kernels as one native call. Memory between them is the caller's as well: torch has none of a device to lend here."""
    watch = fused.Watch()
    watch.launches = [(kernels[kernel], tuple(by_name.values())) for kernel, by_name in calls.items()]
    given = [x for by_name in calls.values() for x in by_name.values() if isinstance(x, torch.Tensor) and x.numel() > 0]
    tensors = list({id(x): x for x in given}.values())
    constant = fused._constant
    fused._constant = lambda argument: on_device(constant(argument))
    made = watch.fused(tensors)
    assert made is not None
    try:
        made.run(*map(on_device, tensors))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    registry, arch = Registry(sys.argv[1]), sys.argv[2]
    kernels = {}
    for spec in (ChunkWySpec(), ChunkScanSpec()):
        path = registry.find(arch, spec.key)
        assert path is not None
        kernels[spec.kernel] = load(registry, path, arch, spec.key)

    def call(kernel: str, by_name: dict[str, Any]) -> str | None:
        values = [on_device(x) for x in by_name.values()]
        try:
            kernels[kernel](*values)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    right, wrong = [], {}
    for shape in ((1, 1000, 2, 4, None), (3, 64, 1, 1, None), (1, 200, 4, 4, [0, 1, 63, 0, 64, 65])):
        for kernel, by_name in arguments(*shape).items():
            right.append(call(kernel, by_name))
    fused_call = call_fused(kernels, arguments(1, 1000, 2, 4, None))
    for kernel, by_name in arguments(1, 1000, 2, 4, None).items():
        for name, value in by_name.items():
            if not isinstance(value, torch.Tensor):
                continue
            other = torch.float64 if value.dtype == torch.float32 else torch.float32
            wrong[f"{kernel} {name} dtype"] = call(kernel, {**by_name, name: value.to(other)})
            wrong[f"{kernel} {name} dimensions"] = call(kernel, {**by_name, name: value[None]})
            if value.shape[-1] in (64, 128):
                wrong[f"{kernel} {name} size"] = call(kernel, {**by_name, name: value[..., :32].contiguous()})
            if name in ("q", "k", "g", "v", "o"):
                apart = value.repeat_interleave(2, -1)[..., ::2]
                wrong[f"{kernel} {name} stride"] = call(kernel, {**by_name, name: apart})
                wrong[f"{kernel} {name} tokens"] = call(kernel, {**by_name, name: value[:, 1:]})
    imported = sorted(name for name, module in sys.modules.items() if module)
    print(json.dumps({"right": right, "fused": fused_call, "wrong": wrong, "imported": imported}))


main()
