"""One smallest launch of a kernel: the module is on the device afterwards, and a first call has nothing left to load."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kda_tl.runtime import dispatcher
from kda_tl.runtime.errors import ArtifactMissing
from kda_tl.specs.kernels import KernelSpec

__all__ = ["launch_once", "smallest_arguments"]

ALIGNED = 16  # elements
SIZES = {"V": 16}  # run-time sizes that a kernel takes in multiples only
SLACK = 1 << 16  # bytes of zeros behind every tensor, for kernels that read whole tiles


def launch_once(spec: KernelSpec, arch_name: str, device: torch.device, size: int | None = None) -> None:
    """Loads the kernel of problems of `size`, without one those of every size class, and launches it with every run-time size 1
    on zeros of its own, on the current stream.

    Raises:
        what `dispatcher.kernel` raises.
    """
    if size is None:
        function = dispatcher.kernel(spec, arch_name, device)  # the miss, where there is one, is told or mended here
        for bound in dispatcher.choose(spec, arch_name).bounds:
            launch_once(spec, arch_name, device, bound)
        size = dispatcher.LARGEST
    else:
        function = dispatcher.kernel(spec, arch_name, device, size)
    choice = dispatcher.choose(spec, arch_name, size)
    if choice.registry is None or choice.path is None:
        raise ArtifactMissing(f"{spec.key} for {arch_name} has just been loaded and is {choice.reason} now")
    parameters = choice.registry.load_meta(choice.path)["parameters"]
    with dispatcher.device_guard(device):
        function(*smallest_arguments(parameters, device))


def smallest_arguments(parameters: Sequence[Mapping[str, Any]], device: torch.device) -> list[Any]:
    """Arguments in program order, by an artifact's description of its parameters: zeros, and 1 for every size and number."""
    return [_argument(parameter, device) for parameter in parameters]


def _argument(parameter: Mapping[str, Any], device: torch.device) -> Any:
    name = parameter["dtype"]
    if "shape" not in parameter:
        return 1.0 if name.startswith(("float", "bfloat")) else 1
    dtype: torch.dtype = getattr(torch, name)
    shape = [_with_ones(extent) for extent in parameter["shape"]]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for axis, text in enumerate(parameter["strides"]):
        if shape[axis] == 1 and text.isidentifier():
            # No element is a stride away here, and kernels ask for aligned ones.
            strides[axis] = -(-strides[axis] // ALIGNED) * ALIGNED
    return torch.zeros(math.prod(shape) + SLACK // dtype.itemsize, dtype=dtype, device=device).as_strided(shape, strides)


_OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _with_ones(extent: str) -> int:
    """The value of "4096 * HV" with every symbol 1, or what SIZES says."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return SIZES.get(node.id, 1)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError(f"extents are integers, names, + - * // and %, got {extent!r}")

    return value(ast.parse(extent, mode="eval").body)
