# ruff: noqa: E402
"""Runs in a process of its own, with the mock driver on the library path: calls that come again, on host memory that claims to
lie on cuda:0, down to the artifacts of sm_90 from REGISTRY. Prints one JSON line: of each call whether it was recognised, which
kernels it launched, whether these were given what they got the first time, and what they raised."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)  # as importing a CUDA build of torch would

import torch
from extern_kernels import extern_kernel
from fake_device import on_device

import kda_tl
from kda_tl.registry import Registry
from kda_tl.runtime import dispatcher
from kda_tl.runtime.loader import load


def cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    heads = 4

    def tokens(B: int, T: int, gates: torch.dtype = torch.float32) -> dict[str, Any]:
        x: dict[str, Any] = {name: torch.randn(B, T, heads, 128).bfloat16() for name in ("q", "k", "v")}
        x |= {"g": torch.randn(B, T, heads, 128).to(gates), "beta": torch.randn(B, T, heads).to(gates)}
        x |= {"A_log": torch.rand(heads), "dt_bias": torch.randn(heads * 128)}
        return x | {"use_gate_in_kernel": True, "lower_bound": -5.0}

    def pack(*ends: int, dtype: torch.dtype = torch.int32) -> dict[str, Any]:
        offsets = torch.tensor([0, *ends], dtype=dtype)
        return {"cu_seqlens": offsets, "cu_seqlens_cpu": offsets.clone()}

    states = {"initial_state": torch.randn(2, heads, 128, 128), "output_final_state": True}
    slots = {"initial_state": torch.randn(8, heads, 128, 128), "state_indices": torch.tensor([3, 1], dtype=torch.int32)}
    decode = tokens(2, 1, torch.bfloat16) | {"state_indices": torch.tensor([3, 1])}
    return {
        "dense": (kda_tl.chunk_kda, tokens(2, 100)),
        "pack": (kda_tl.chunk_kda, tokens(1, 100) | pack(30, 100) | states | {"state_v_first": True}),
        "pool": (kda_tl.chunk_kda, tokens(1, 100) | pack(30, 100, dtype=torch.int64) | slots),
        "segments": (kda_tl.chunk_kda, tokens(1, 600) | pack(300, 600) | states | {"intracard_segments": 2}),
        "decode": (kda_tl.recurrent_kda, decode | {"initial_state": slots["initial_state"], "inplace": True}),
        "deltalog": (kda_tl.deltalog_decode_kda, decode | {"cache": kda_tl.DeltaLogCache(8, heads)}),
    }


def main() -> None:
    registry = Registry(sys.argv[1])
    made: dict[str, Any] = {}
    seen: list[tuple[str, list[Any]]] = []
    raised: list[str] = []
    asked: list[str] = []

    def kernel(spec: Any, arch: str, device: torch.device, size: int) -> Any:
        asked.append(spec.key)
        if spec.key not in made:
            path = registry.find("sm_90", spec.key)
            assert path is not None, spec.key
            function = load(registry, path, "sm_90", spec.key)

            def call(*arguments: Any) -> None:
                is_tensor = [isinstance(x, torch.Tensor) for x in arguments]
                seen.append((spec.kernel, [
                    (list(x.shape), x.stride(), str(x.dtype)) if tensor else x for x, tensor in zip(arguments, is_tensor)
                ]))  # fmt: skip
                try:
                    function(*map(on_device, arguments))
                except Exception as error:
                    raised.append(f"{spec.kernel}: {error}")

            made[spec.key] = extern_kernel(call)
        return made[spec.key]

    dispatcher.kernel = kernel
    report = {}
    with dispatcher.assume_arch("sm_90"), torch.no_grad():
        for name, (op, x) in cases().items():
            runs = []
            for _ in range(4):
                seen.clear()
                asked.clear()
                op(**x)
                runs.append(list(seen))
            same = runs[0] == runs[-1]
            kernels = [kernel for kernel, _ in seen]
            report[name] = {"recognised": not asked, "kernels": kernels, "same": same, "raised": [*raised]}
            raised.clear()
    print(json.dumps(report))


main()
