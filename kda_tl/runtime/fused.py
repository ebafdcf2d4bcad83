"""Several launches of one op as one call into native code, where the kernels are CUDA artifacts.

What torch takes longest over in a small call is tensor objects: a view of a workspace costs it as much as a launch. So the
launches of a call are watched once, and from then on made by `kda_tl.fused` (compiler/native/launches.cc), which fills in where
the tensors of each call start and cuts what lies between the kernels out of one allocation. `kda_tl.ops.repeated` has
`kda_tl.calls` of the same file recognise a call, too.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_tl.runtime.counters import counts
from kda_tl.runtime.loader import KernelFunction

__all__ = ["Derivation", "Fused", "Watch", "all_distinct", "derived", "native", "stand_in"]

ALIGNMENT = 512  # bytes; TMA asks for 16, torch's allocator gives 512
TYPE_CODES = {torch.float32: 2, torch.float16: 2, torch.bfloat16: 4, torch.int32: 0, torch.uint8: 1}  # DLPack's
SCRATCH = -1  # as a base, in launches.cc


class Fused(NamedTuple):
    """The launches of all calls that have equal decisions. `run` takes what the watched call named, in the same order."""

    run: Callable[..., Any]
    kernels: int

    def __call__(self, *tensors: Tensor | None) -> None:
        counts.hits += self.kernels
        self.run(*tensors)


def all_distinct(tensors: Sequence[object]) -> bool:
    """Whether each tensor of a call can be told from the others by where it starts: where q is k, nobody sees which of them a
    kernel was given."""
    starts = [x.data_ptr() for x in tensors if isinstance(x, Tensor) and x.numel() > 0]
    return len(set(starts)) == len(starts)


def stand_in(tensor: Tensor) -> Tensor:
    """Says of a tensor that it is kept, and no kernel reads or writes it: it takes the place of what a call lacks."""
    tensor.kda_tl_stand_in = True  # type: ignore[attr-defined]
    return tensor


class Derivation(NamedTuple):
    """What a call makes of one of its tensors by torch's own operations, before the launches: a conversion, a copy."""

    source: Tensor
    function: Callable[[Tensor], Tensor]
    result: Tensor


def derived(watch: Watch | None, source: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """function(source), of which `watch` is told where it is more than another view of the same memory.

    function: depends on nothing else that a later call could have otherwise.
    """
    result = function(source)
    if watch is not None and result.data_ptr() != source.data_ptr():
        watch.derivations.append(Derivation(source, function, result))
    return result


def native(name: str) -> Callable[..., Any] | None:
    """A function of launches.cc; None before an artifact for a GPU was loaded, where an older version built it, or where torch
    does not lend its allocator to TVM-FFI."""
    if "tvm_ffi" not in sys.modules or not hasattr(Tensor, "__dlpack_c_exchange_api__"):
        return None
    import tvm_ffi

    found: Callable[..., Any] | None = tvm_ffi.get_global_func(name, allow_missing=True)
    return found


class Watch:
    """Records the launches of one call, which it makes as well.

    Attributes:
        kernels: how many were looked up.
        scratch: what is written and read again within a call.
        derivations: what is made of the call's tensors before the launches.
    """

    def __init__(self) -> None:
        self.kernels = 0
        self.derivations: list[Derivation] = []
        self.launches: list[tuple[KernelFunction, tuple[Any, ...]]] = []
        self.scratch: list[Tensor] = []

    def of(self, kernel: KernelFunction) -> KernelFunction:
        def launch(*arguments: Any) -> Any:
            self.launches.append((kernel, arguments))
            return kernel(*arguments)

        self.kernels += 1
        return launch

    def fused(self, tensors: Sequence[Tensor | None]) -> Fused | None:
        """tensors: in the order in which calls will hand them over, `all_distinct`, the first of them there.

        None where a kernel is no TVM-FFI function, where it took a tensor that starts where none of these does, or where the
        native function is not there.
        """
        run = self._made(tensors, 0, 0)
        return None if run is None else Fused(run, self.kernels)

    def recognised(self, number: int, results: Sequence[Tensor | None], given: Sequence[object]) -> Callable[..., bool] | None:
        """As `fused`, of a ticket for call `number` of `kda_tl.calls`, and results; given: what such calls are found by."""
        return self._made((*results, *given), number, len(results))

    def _made(self, tensors: Sequence[object], number: int, given: int) -> Callable[..., Any] | None:
        make = native("kda_tl.fused")
        if make is None or not all(_is_native(kernel) for kernel, _ in self.launches):
            return None
        size, places = 0, {}
        for part in self.scratch:
            places[id(part)] = SCRATCH, size
            size += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        starts = {x.data_ptr(): i for i, x in enumerate(tensors) if isinstance(x, Tensor) and x.numel() > 0}
        known: dict[int, int] = {}  # id -> code
        objects: list[Any] = []
        views: list[int] = []
        kernels: list[int] = []
        for kernel, arguments in self.launches:
            kernels += len(objects), len(arguments)
            objects.append(kernel)
            for argument in arguments:
                if isinstance(argument, Tensor) and argument.numel() > 0 and not hasattr(argument, "kda_tl_stand_in"):
                    if id(argument) not in known:
                        base, offset = places.get(id(argument)) or (starts.get(argument.data_ptr()), 0)
                        if base is None or argument.dtype not in TYPE_CODES:
                            return None  # it belongs to this call alone, or nobody says what it is
                        views += _view(argument, base, offset)
                        known[id(argument)] = -1 - len(known)
                    kernels.append(known[id(argument)])
                else:
                    kernels.append(len(objects))
                    objects.append(_constant(argument))
        layout = [len(known), *views, len(self.launches), *kernels]
        made: Callable[..., Any] = make(struct.pack(f"{len(layout)}q", *layout), objects, size, number, given)
        return made


def _view(tensor: Tensor, base: int, offset: int) -> list[int]:
    code, bits = TYPE_CODES[tensor.dtype], tensor.itemsize * 8
    return [base, offset, code, bits, tensor.dim(), *tensor.shape, *tensor.stride()]


def _constant(argument: Any) -> Any:
    """A number, or a tensor that no kernel reads: one without elements must not keep a workspace alive."""
    if not isinstance(argument, Tensor) or argument.numel():
        return argument
    return argument.new_empty(argument.shape)


def _is_native(kernel: KernelFunction) -> bool:
    import tvm_ffi

    return isinstance(kernel, tvm_ffi.Function)
