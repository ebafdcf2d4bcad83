"""Python functions as native TVM-FFI kernels, which get tensors where TVM-FFI's Python side sees a bare DLTensor."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi

INT, FLOAT, DLTENSOR, TENSOR = 1, 3, 7, 70  # type indices of TVM-FFI's c_api.h
OBJECT_BYTES = 24  # TVMFFIObject, in front of a Tensor's DLTensor
DTYPES = {(2, 32): torch.float32, (2, 16): torch.float16, (4, 16): torch.bfloat16, (0, 32): torch.int32, (1, 8): torch.uint8}


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]  # fmt: skip


class Value(ctypes.Union):
    _fields_ = [("int", ctypes.c_int64), ("float", ctypes.c_double), ("pointer", ctypes.c_void_p)]


class Any_(ctypes.Structure):
    _fields_ = [("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", Value)]


SafeCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Any_), ctypes.c_int32, ctypes.POINTER(Any_))


def read(given: Any_) -> Any:
    if given.type_index in (DLTENSOR, TENSOR):
        address = given.value.pointer + (OBJECT_BYTES if given.type_index == TENSOR else 0)
        return tensor_at(DLTensor.from_address(address))
    return given.value.float if given.type_index == FLOAT else given.value.int


def tensor_at(found: DLTensor) -> torch.Tensor:
    dtype = DTYPES[found.code, found.bits]
    sizes, strides = found.shape[: found.ndim], found.strides[: found.ndim]
    if 0 in sizes:
        return torch.empty_strided(sizes, strides, dtype=dtype)
    count = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(found.data + found.byte_offset)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


def extern_kernel(function: Callable[..., Any]) -> tvm_ffi.Function:
    def call(_: Any, arguments: Any, count: int, __: Any) -> int:
        try:
            function(*(read(arguments[i]) for i in range(count)))
        except Exception:
            traceback.print_exc()
            return -1
        return 0

    pointer = SafeCall(call)
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    assert address is not None
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=pointer)
