"""Calls that come again, from the public function straight to one native call.

An eager call on plain tensors that is equal to two earlier ones, but for what its tensors hold and where they lie, is
recognised in native code by all that a decision may depend on: shapes, strides, dtypes, devices, alignment, options, and the
offsets that the host has. Its results are allocated here, by torch, and its kernels launched by one more native call. Whatever
is not plain (a compiler, a mode, a subclass, a gradient, a lazily negated view) or not known takes the way of a first call.

Of the call that comes second the kernels are watched. Where all their tensors are the caller's, or views or conversions of
these, or results or scratch, nothing else has to be done again; if not, every call takes the way of the first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.checks import mark_written
from kda_tl.ops.decode_checks import DecodeArguments
from kda_tl.ops.known import Known
from kda_tl.runtime.counters import counts
from kda_tl.runtime.dispatcher import assumed_arch
from kda_tl.runtime.environment import UNCHECKED, arch_setting, check_setting, registry_setting
from kda_tl.runtime.fused import Watch, native
from kda_tl.runtime.ranges import annotate_op

__all__ = ["Candidate", "Repeated", "presented", "recognising"]

PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float))
OFFSETS = ("cu_seqlens", "cu_seqlens_cpu")
MOST = 1024
TENSORS = frozenset(
    name for kind in (Arguments, DecodeArguments) for name, one in kind.__annotations__.items() if "Tensor" in str(one)
)
NUMBER = (1 << 31) - 1  # kNumberMask of launches.cc

is_negated: Callable[[Tensor], bool] = Tensor.is_neg
requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
dispatch_modes, transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
tracing = torch._C._get_tracing_state
empty_like, is_grad_enabled = torch.empty_like, torch.is_grad_enabled


class Repeat(NamedTuple):
    """What calls of one number do.

    Attributes:
        derived: of which values something is made before the launches, and what.
        numbers: the tensors among the values of a call that can be negated or need a gradient: not those of integers.
        device: of the launches, a CUDA device's index, or None on the cpu.
        o, final: as results, without memory; final None where nothing but o is allocated.
        written: which value is written in place, None for none.
        returned: which value is returned beside o; None for `final`.
        alone: o is all that is returned.
    """

    run: Callable[..., bool]
    kernels: int
    derived: tuple[tuple[int, Callable[[Tensor], Tensor]], ...]
    numbers: Callable[[Sequence[Any]], tuple[Tensor, ...]]
    device: int | None
    o: Tensor
    final: Tensor | None
    written: int | None
    returned: int | None
    alone: bool


class Table:
    """Calls of one op that have the same names of arguments. find and settle: as `kda_tl.calls` gives them. flags: which of the
    values are flags: a tensor in their place would count by its shape, not by what it holds, so such calls are not kept."""

    def __init__(self, make: Callable[..., Any], valued: Sequence[int], flags: Sequence[int]) -> None:
        self.find, self.settle = make(MOST, list(valued))
        self.flags = flags
        # They wait for nothing, and take less time than to let go of the interpreter and take hold of it again. And no thread
        # can hold their lock while another one forks.
        self.find.release_gil = self.settle.release_gil = False
        self.kept: Known[Repeat] = Known(MOST)
        self.get = self.kept.get_hashable


class Candidate(Watch):
    """The watch over a call that comes for the second time.

    The op hands over what it allocated as o and final state, and which of its arguments it wrote, if nothing but launches was
    needed: `whole`. What it says of itself is held against what its kernels were given.
    """

    def __init__(self, table: Table, number: int, values: tuple[Any, ...]) -> None:
        super().__init__()
        self._table, self._number, self._values = table, number, values
        self._whole: tuple[Tensor, Tensor | None, Tensor | None] | None = None

    def whole(self, o: Tensor, final: Tensor | None = None, written: Tensor | None = None) -> None:
        self._whole = o, final, written

    def settle(self, results: Tensor | tuple[Tensor | None, ...]) -> None:
        """results: what the call has returned."""
        repeat = None if self._whole is None else self._repeat(*self._whole, results)
        if repeat is not None:
            self._table.kept.put(self._number, repeat)
        self._table.settle(self._number, repeat is not None)

    def _repeat(self, o: Tensor, final: Tensor | None, written: Tensor | None, results: Any) -> Repeat | None:
        values = self._values
        alone = isinstance(results, Tensor)
        first, *others = (results, final) if alone else results
        if first is not o or len(others) != 1 or not self.launches:
            return None
        returned = None if others[0] is final else self._place(others[0])
        place = None if written is None else self._place(written)
        if (returned is None and others[0] is not final) or (place is None and written is not None):
            return None
        derived = []
        for source, function, _ in self.derivations:
            index = self._place(source)
            if index is None:
                return None
            derived.append((index, function))
        run = self.recognised(self._number, (o, final, *(made.result for made in self.derivations)), values)
        if run is None:
            return None
        numbers = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.is_floating_point()]
        return Repeat(
            run, self.kernels, tuple(derived), itemgetter(*numbers), o.device.index if o.is_cuda else None, _like(o),
            None if final is None else _like(final), place, returned, alone,
        )  # fmt: skip

    def _place(self, tensor: Tensor | None) -> int | None:
        return next((i for i, value in enumerate(self._values) if value is tensor), None)


class Repeated:
    """The calls of one public function. arguments: has its signature; None where values are not what the function takes."""

    def __init__(self, arguments: Callable[..., Any] | None = None) -> None:
        parameters = {} if arguments is None else inspect.signature(arguments).parameters
        self._names = list(parameters)
        self._tensors = TENSORS | {name for name, one in parameters.items() if "Tensor" in str(one.annotation)}
        self._tables: Known[Table] = Known(256)
        self._table = self._tables.get_hashable

    def call(self, names: tuple[Any, ...], values: tuple[Any, ...], valued: Sequence[int] = ()) -> Any:
        """What the function returns, a `Candidate` to be watched and settled, or None.

        names: all that the meaning of values depends on. With `arguments` given to the constructor: how many are positional,
        and the names of the others. valued: which of the values are lists of integers whose elements count where the host has
        them; with `arguments`, offsets are found by name.
        """
        if (
            check_setting() not in UNCHECKED
            or dispatch_modes() > 0
            or transforms() is not None
            or tracing() is not None
            or forward_ad._current_level >= 0
            or not PLAIN.issuperset(map(type, values))
        ):
            return None
        key = (registry_setting(), arch_setting(), assumed_arch(), *names)
        table = self._table(key) or self._new_table(key, names, valued)
        if table is None:
            return None
        try:
            ticket = table.find(*values)
        except Exception:  # what is not strided, or a number beyond 64 bits
            return None
        if ticket <= 0:
            return _candidate(table, -ticket, values) if ticket else None
        repeat = table.get(ticket & NUMBER)
        if repeat is None:
            return None
        run, kernels, derived, numbers_of, device, like_o, like_final, written, returned, alone = repeat
        numbers = numbers_of(values)
        if (
            any(map(is_negated, numbers))
            or (is_grad_enabled() and any(map(requires_grad, numbers)))
            or (device is not None and current_device() != device)
        ):
            return None
        o = empty_like(like_o)
        final = None if like_final is None else empty_like(like_final)
        if not (run(ticket, o, final, *[f(values[i]) for i, f in derived]) if derived else run(ticket, o, final)):
            return None  # a finalizer has made another call in between
        counts.hits += kernels
        if written is not None:
            mark_written(values[written])
        if alone:
            return o
        return o, final if returned is None else values[returned]

    def _new_table(self, key: object, names: tuple[Any, ...], valued: Sequence[int]) -> Table | None:
        make = native("kda_tl.calls")
        if make is None:
            return None
        flags: Sequence[int] = ()
        if self._names:
            placed = (*self._names[: names[0]], *names[1:])
            valued = [i for i, name in enumerate(placed) if name in OFFSETS]
            flags = [i for i, name in enumerate(placed) if name not in self._tensors]
        table = Table(make, valued, flags)
        self._tables.put(key, table)
        return table


def recognising(
    op: Op, arguments: Callable[..., Any], compute: Callable[[tuple[Any, ...], dict[str, Any], Candidate | None], Any]
) -> Callable[..., Any]:
    """The public function of `op`: a call that comes again is made as it was, any other is what `compute` returns for it.

    arguments: has its signature and docstring, and makes the op's arguments; stays reachable as `.arguments`, for `explain`.
    compute: takes positional and keyword arguments, and what watches the call, if it is to be kept.
    """
    repeated = Repeated(arguments)

    @functools.wraps(arguments)
    def function(*args: Any, **kwargs: Any) -> Any:
        watch: Any = None
        if not torch.compiler.is_compiling():
            watch = repeated.call((len(args), *kwargs), (*args, *kwargs.values()))
            if type(watch) is tuple:
                return watch
        results = compute(args, kwargs, watch)
        if watch is not None:
            watch.settle(results)
        return results

    return presented(op, arguments, function, repeated, "tuple[Tensor, Tensor | None]")


def presented(op: Op, arguments: Callable[..., Any], function: Any, repeated: Repeated, returned: str) -> Callable[..., Any]:
    """`function` as users meet it: the signature of `arguments` with what it returns, a range of its name for profilers."""
    function.__signature__ = inspect.signature(arguments).replace(return_annotation=returned)
    function.op, function.arguments, function.repeated = op, arguments, repeated
    return annotate_op(function, f"kda_tl::{op.name}")


def _candidate(table: Table, number: int, values: tuple[Any, ...]) -> Candidate | None:
    """None where this call, or this moment, is not for keeping."""
    if any(isinstance(values[i], Tensor) for i in table.flags):
        return None
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or any(map(is_negated, tensors)) or (is_grad_enabled() and any(map(requires_grad, tensors))):
        return None
    # A capture allocates from a pool that goes with its graph, and what is kept here must not hold on to it.
    if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
        return None
    return Candidate(table, number, values)


def _like(tensor: Tensor) -> Tensor:
    """All but the memory of a tensor: what `empty_like` asks for."""
    like = torch.empty_like(tensor)
    like.untyped_storage().resize_(0)
    return like
