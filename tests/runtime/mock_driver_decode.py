# ruff: noqa: E402
"""Runs in a process of its own, with the mock driver on the library path: the decode ops, then those of DeltaLog, on host
memory that claims to lie on cuda:0, with the artifacts of ARCH from REGISTRY; the decode ops once per size class, CLASSES of
them, where a spec with fewer ones takes its last. Prints one JSON line: what each call raised, or null.

    mock_driver_decode.py REGISTRY ARCH CLASSES
"""

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
from deltalog_cases import OPS as DELTALOG_OPS
from deltalog_cases import tokens
from fake_device import on_device

from kda_tl.ops.deltalog import DeltaLogCache
from kda_tl.registry import Registry
from kda_tl.runtime import dispatcher
from kda_tl.runtime.loader import load

# Of DeltaLog: launches of a step, requests, tokens, value heads; its artifacts here are of KDA, with float32 states.
DELTALOG_CALLS = [(1, 3, 1, 4), (1, 2, 3, 4), (2, 3, 1, 2), (2, 2, 3, 2)]


def main() -> None:
    registry, arch, index = Registry(sys.argv[1]), sys.argv[2], 0

    def kernel(spec: Any, arch_name: str, device: torch.device, size: int) -> Any:
        classes = registry.classes(arch_name, spec.key)
        assert classes, spec.key
        function = load(registry, classes[min(index, len(classes) - 1)].path, arch_name, spec.key)
        return lambda *a: function(*map(on_device, a))

    dispatcher.device_arch = lambda device: arch
    dispatcher.kernel = kernel
    raised: dict[str, str | None] = {}

    def call(name: str, function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            raised[name] = None
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {error}"

    for case in CASES:
        if case.K == 64:  # tests build no kernel for it
            continue
        for dtype in (torch.float32, torch.bfloat16):
            case = replace(case, state_dtype=dtype)
            x = make_decode_inputs(case, "cpu", 0).args
            for index in range(int(sys.argv[3])):
                call(f"{case.name} {dtype} class {index}", OPS[case.rule], **x)
    for launches, n, T, HV in DELTALOG_CALLS:
        x = tokens(n, T, 2, HV, "kda", "bounded", "cpu", 0)
        x |= {name: x[name].bfloat16() for name in ("q", "k", "v")}
        cache = DeltaLogCache(n + 1, HV, launches=launches)
        slots = torch.arange(n, dtype=torch.int32)
        call(f"DeltaLog {launches} {n} {T} {HV}", DELTALOG_OPS["kda"], **x, cache=cache, state_indices=slots)
    print(json.dumps(raised))


main()
