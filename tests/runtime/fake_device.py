"""Host memory that claims to lie on cuda:0, for launchers under the mock driver."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import tvm_ffi

KDL_CUDA = 2

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


def on_device(x: Any) -> Any:
    return tvm_ffi.from_dlpack(OnDevice(x)) if isinstance(x, torch.Tensor) else x
