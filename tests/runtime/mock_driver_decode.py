# ruff: noqa: E402
"""Runs in a process of its own, with the mock driver on the library path: the decode ops on host memory that claims to lie on
cuda:0, with the artifacts of ARCH from REGISTRY. Prints one JSON line: what each call raised, or null."""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)  # as importing a CUDA build of torch would
sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))

import torch
from decode_cases import CASES, OPS, make_decode_inputs
from fake_device import on_device

from kda_tl.registry import Registry
from kda_tl.runtime import dispatcher
from kda_tl.runtime.loader import load


def main() -> None:
    registry, arch = Registry(sys.argv[1]), sys.argv[2]

    def kernel(spec: Any, arch_name: str, device: torch.device, size: int) -> Any:
        path = registry.find(arch_name, spec.key)
        assert path is not None, spec.key
        function = load(registry, path, arch_name, spec.key)
        return lambda *a: function(*map(on_device, a))

    dispatcher.device_arch = lambda device: arch
    dispatcher.kernel = kernel
    raised: dict[str, str | None] = {}
    for case in CASES:
        if case.K == 64:  # tests build no kernel for it
            continue
        for dtype in (torch.float32, torch.bfloat16):
            case = replace(case, state_dtype=dtype)
            x = make_decode_inputs(case, "cpu", 0).args
            try:
                OPS[case.rule](**x)
                raised[f"{case.name} {dtype}"] = None
            except Exception as error:
                raised[f"{case.name} {dtype}"] = f"{type(error).__name__}: {error}"
    print(json.dumps(raised))


main()
