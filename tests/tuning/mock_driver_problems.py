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

import torch
import tvm_ffi

from kda_tl.runtime.loader import load_artifact
from kda_tl.specs.floors import Problem
from kda_tl.specs.kernels import spec_of_key
from kda_tl.tuning.problems import check_case, full_case

KDL_CUDA = 2
CPU = torch.device("cpu")

capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype = ctypes.c_void_p
capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class OnDevice:
    """torch's own DLPack capsule of a host tensor, its device field overwritten (it follows the data pointer)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return KDL_CUDA, 0

    def __dlpack__(self, **_: object) -> object:
        capsule = self.tensor.__dlpack__()
        device = capsule_pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
        ctypes.c_int32.from_address(device).value = KDL_CUDA
        return capsule


def raised(key: str, id: str) -> str | None:
    spec = spec_of_key(key)
    try:
        kernel = load_artifact(Path(sys.argv[1]), id, sys.argv[2], key)
        for case in (check_case(spec, CPU), full_case(spec, Problem(2, 256, 2, 4, 2), CPU)):
            for call in case.calls:
                kernel(*(tvm_ffi.from_dlpack(OnDevice(x)) if isinstance(x, torch.Tensor) else x for x in call))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    pairs = [argument.rpartition("=")[::2] for argument in sys.argv[3:]]
    found: dict[str, Any] = {key: raised(key, id) for key, id in pairs}
    print(json.dumps(found))


main()
