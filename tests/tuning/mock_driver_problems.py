# ruff: noqa: E402
"""Runs in a process of its own, with the mock driver on the library path: calls artifacts of ARCH in REGISTRY with the tuner's
problems, whose tensors claim to lie on a device. Prints one JSON line, spec key -> what was raised.

    mock_driver_problems.py REGISTRY ARCH SPEC_KEY=ID ..
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)  # as importing a CUDA build of torch would

sys.path.append(str(Path(__file__).resolve().parents[1] / "runtime"))

import torch
from fake_device import on_device

from kda_tl.runtime.loader import load_artifact
from kda_tl.specs.floors import Problem
from kda_tl.specs.kernels import spec_of_key
from kda_tl.tuning.problems import check_case, full_case

CPU = torch.device("cpu")


def raised(key: str, id: str) -> str | None:
    spec = spec_of_key(key)
    try:
        kernel = load_artifact(Path(sys.argv[1]), id, sys.argv[2], key)
        for case in (check_case(spec, CPU), full_case(spec, Problem(2, 256, 2, 4, 2), CPU)):
            for call in case.calls:
                kernel(*map(on_device, call))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    pairs = [argument.rpartition("=")[::2] for argument in sys.argv[3:]]
    found: dict[str, Any] = {key: raised(key, id) for key, id in pairs}
    print(json.dumps(found))


main()
