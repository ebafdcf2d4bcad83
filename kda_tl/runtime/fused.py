"""Several launches of one op as one call into native code, where the kernels are CUDA artifacts.

What torch takes longest over in a small call is tensor objects: a view of a workspace costs it as much as a launch. So the
launches of a call are watched once, and from then on made by `kda_tl.launches` (compiler/native/launches.cc), which fills in
the tensors of each call and cuts what lies between the kernels out of one allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_tl.runtime.counters import counts
from kda_tl.runtime.loader import KernelFunction

__all__ = ["Fused", "Watch", "all_distinct"]

FIRST_TENSOR = 1 << 16  # kFirstTensor of launches.cc
ALIGNMENT = 512  # bytes; TMA asks for 16, torch's allocator gives 512
TYPE_CODES = {torch.float32: 2, torch.float16: 2, torch.bfloat16: 4, torch.int32: 0, torch.uint8: 1}  # DLPack's


class Fused(NamedTuple):
    """The launches of all calls that have equal decisions. `run` takes a [scratch_bytes] uint8 tensor, then the call's."""

    run: Callable[..., Any]
    scratch_bytes: int
    kernels: int

    def __call__(self, device: torch.device, *tensors: Tensor | None) -> None:
        counts.hits += self.kernels
        self.run(torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device), *tensors)


def all_distinct(tensors: Sequence[Tensor | None]) -> bool:
    """Whether each tensor of a call can be told from the others: where q is k, nobody sees which of them a kernel was given."""
    given = [id(tensor) for tensor in tensors if tensor is not None]
    return len(set(given)) == len(given)


class Watch:
    """Records the launches of one call, which it makes as well."""

    def __init__(self) -> None:
        self.launches: list[tuple[KernelFunction, tuple[Any, ...]]] = []

    def of(self, kernel: KernelFunction) -> KernelFunction:
        def launch(*arguments: Any) -> Any:
            self.launches.append((kernel, arguments))
            return kernel(*arguments)

        return launch

    def fused(self, scratch: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Fused | None:
        """scratch: what is written and read again within a call. tensors: in the order in which calls will hand them over.

        None where a kernel is no TVM-FFI function, where it took a tensor that is neither scratch nor handed over, or where the
        native function is not there: built by an older version.
        """
        make = _maker()
        if make is None or not all(_is_native(kernel) for kernel, _ in self.launches):
            return None
        views: list[list[int]] = []
        size = 0
        for part in scratch:
            views.append([size, TYPE_CODES[part.dtype], part.itemsize * 8, *part.shape])
            size += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        places = {id(tensor): FIRST_TENSOR + i for i, tensor in enumerate(tensors) if tensor is not None}
        places |= {id(part): -1 - i for i, part in enumerate(scratch)}
        kernels = []
        for kernel, arguments in self.launches:
            constants: list[Any] = []
            codes = []
            for argument in arguments:
                place = places.get(id(argument)) if isinstance(argument, Tensor) else None
                if place is None:
                    if isinstance(argument, Tensor) and argument.numel() > 1:
                        return None  # it belongs to this call alone
                    place = len(constants)
                    constants.append(_constant(argument))
                codes.append(place)
            kernels.append([kernel, constants, codes])
        return Fused(make(views, kernels), max(size, 1), len(kernels))


def _constant(argument: Any) -> Any:
    """A number, or a tensor that no kernel reads: one without elements must not keep a workspace alive."""
    if not isinstance(argument, Tensor) or argument.numel():
        return argument
    return argument.new_empty(argument.shape)


def _is_native(kernel: KernelFunction) -> bool:
    import tvm_ffi

    return isinstance(kernel, tvm_ffi.Function)


def _maker() -> Callable[..., Any] | None:
    import tvm_ffi

    found: Callable[..., Any] | None = tvm_ffi.get_global_func("kda_tl.launches", allow_missing=True)
    return found
