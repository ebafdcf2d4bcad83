"""DeltaLog decode, from the public functions to the registered ops torch.ops.kda_tl.deltalog_decode_RULE.

A registered op takes the cache's tensors one by one and declares that it writes all of them, so that a compiler may trace it.
As in `prefill_library`, an eager call on plain tensors goes straight to the kernels, and without a check where an equal one has
gone before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_tl.ops.arguments import Op
from kda_tl.ops.checks import (
    check_decay,
    check_dtype,
    check_null_index,
    check_number,
    check_shape,
    check_tensors,
    checks_values,
    live_rows,
    refuse_gradients,
)
from kda_tl.ops.deltalog_cache import FLOAT_DTYPES, DeltaLogCache, Storage, storage_of
from kda_tl.ops.deltalog_launch import Call, launch, launches, prep_size
from kda_tl.ops.known import Known, any_mode, is_plain, traits
from kda_tl.ops.plan import Plan
from kda_tl.ops.repeated import Candidate, Repeated, presented
from kda_tl.runtime import dispatcher
from kda_tl.runtime.environment import UNCHECKED, check_setting
from kda_tl.specs.gates import BetaForm, GateForm, gate_form

__all__ = ["DeltaLogArguments", "plan", "public"]

P = ParamSpec("P")


class DeltaLogArguments(NamedTuple):
    """The arguments of a call but for the cache; shapes and dtypes as in `deltalog_decode_kda`. bonus: [H, K], of RWKV6."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    bonus: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    state_indices: Tensor
    valid: Tensor | None
    null_index: int | None
    scale: float | None
    lower_bound: float | None
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    verify: bool | None


TENSORS = DeltaLogArguments._fields[: DeltaLogArguments._fields.index("null_index")]
VALUED = (TENSORS.index("state_indices"),)  # checked to name no slot twice where the host has them
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? bonus, Tensor? A_log, Tensor? dt_bias, "
    "Tensor state_indices, Tensor? valid, int? null_index, float? scale, float? lower_bound, bool use_qk_l2norm_in_kernel, "
    "bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool? verify, Tensor(a!) base, "
    "Tensor(b!) base_low, Tensor(c!) log_k, Tensor(d!) log_u, Tensor(e!) log_decay, Tensor(f!) cursor, bool state_v_first, "
    "int merge_every, int launches) -> Tensor"
)

_library = torch.library.Library("kda_tl", "FRAGMENT")
_checked: Known[bool] = Known()


def public(op: Op) -> Callable[[Callable[P, tuple[DeltaLogCache, DeltaLogArguments]]], Callable[P, Tensor]]:
    """Registers `op`, and makes the public function out of one that has its signature and docstring, and returns the cache and
    the arguments. That one stays reachable as `.arguments`, for `explain`."""
    _register(op)

    def decorate(arguments: Callable[P, tuple[DeltaLogCache, DeltaLogArguments]]) -> Callable[P, Tensor]:
        repeated = Repeated()

        @functools.wraps(arguments)
        def function(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            cache, a = arguments(*args, **kwargs)
            found: Any = None
            if type(cache) is DeltaLogCache and not torch.compiler.is_compiling():
                names = cache.rule, cache.spec.key, cache.arch, cache.launches, cache.merge_every  # the rest, tensors tell
                found = repeated.call(names, (*a, *cache.stored), VALUED)
                if isinstance(found, Tensor):
                    return found
            watch: Candidate | None = found
            o = run(op, cache, a, watch)
            if watch is not None:
                watch.settle(o)
            return o

        return presented(op, arguments, function, repeated, "Tensor")

    return decorate


def run(op: Op, cache: DeltaLogCache, a: DeltaLogArguments, watch: Candidate | None = None) -> Tensor:
    """o [n, T, HV, V] in the dtype of v."""
    traced = torch.compiler.is_compiling() or any_mode()
    key = None if traced else _key(op, cache, a)
    if key is None or not _checked.get(key):
        check_options(op, cache, a)
        if traced or not is_plain(a[:10]):
            call = getattr(torch.ops.kda_tl, op.name).default
            return cast(Tensor, call(*a, *cache.stored, cache.state_v_first, cache.merge_every, cache.launches))
        check(op, cache, a)
        _refuse_gradients(op, a)
        if key is not None:
            _checked.put(key, True)
    elif forward_ad._current_level >= 0:
        _refuse_gradients(op, a)
    return carry_out(op, cache, a, watch)


def plan(op: Op, given: tuple[DeltaLogCache, DeltaLogArguments]) -> Plan:
    """What a call will launch; raises what it would raise for types, sizes and names."""
    cache, a = given
    check_options(op, cache, a)
    check(op, cache, a)
    (n, T, H, K), HV, V = a.q.shape, cache.HV, cache.V
    needed = launches(cache, n, T, _verifies(a))
    prepared = 4 * n * HV * prep_size(K, cache.capacity) if len(needed) == 2 and needed[0].spec != needed[1].spec else 0
    sizes = {"n": n, "T": T, "H": H, "HV": HV, "K": K, "V": V, "gate": _gate(a).name.lower(), "merge_every": cache.merge_every}
    return Plan(
        op=op.name,
        problem={**sizes, "dtype": cache.spec.dtype, "state": cache.spec.state_dtype},
        arch=cache.arch,
        launches=needed,
        workspace_bytes=prepared,
    )


def carry_out(op: Op, cache: DeltaLogCache | Storage, a: DeltaLogArguments, watch: Candidate | None = None) -> Tensor:
    if cache.device.type == "cpu":
        live_rows(a.state_indices, cache.slots, a.null_index)
    T, K = a.q.shape[1], a.q.shape[3]
    o = torch.empty((a.q.shape[0], T, cache.HV, cache.V), dtype=cache.dtype, device=cache.device)
    if o.numel() > 0:
        beta = BetaForm.TWICE_SIGMOID if a.allow_neg_eigval else BetaForm.SIGMOID
        call = Call(
            a.q, a.k, a.v, a.g if op.rule.decay == "per_key" else a.g.unsqueeze(-1), a.beta, a.A_log, a.dt_bias, a.bonus,
            a.state_indices, a.valid, o, K**-0.5 if a.scale is None else float(a.scale), a.lower_bound or 0.0, _gate(a),
            beta if a.use_beta_sigmoid_in_kernel else BetaForm.IDENTITY, a.use_qk_l2norm_in_kernel, a.null_index,
        )  # fmt: skip
        with dispatcher.device_guard(cache.device):
            launch(cache, call, T, _verifies(a), watch)
        if watch is not None:
            watch.whole(o, written=cache.base)
    return o if o.dtype == a.v.dtype else o.to(a.v.dtype)


def _verifies(a: DeltaLogArguments) -> bool:
    return a.q.shape[1] > 1 if a.verify is None else bool(a.verify)


def _gate(a: DeltaLogArguments) -> GateForm:
    return gate_form(a.use_gate_in_kernel, a.A_log is not None, a.lower_bound)


def _key(op: Op, cache: DeltaLogCache, a: DeltaLogArguments) -> object:
    """All that checks depend on; None where they depend on more, or the call is not plain."""
    if check_setting() not in UNCHECKED or not isinstance(cache, DeltaLogCache):
        return None
    key: list[object] = [op.name, cache.rule, cache.device, cache.arch, cache.dtype, cache.HV, cache.K, cache.V, cache.capacity]
    if not traits(key, a[:10]):
        return None
    key += (*a[10:], type(a.null_index), type(a.scale), type(a.lower_bound))
    return tuple(key)


# -- checks --------------------------------------------------------------------------------------------------------------


def check_options(op: Op, cache: DeltaLogCache, a: DeltaLogArguments) -> None:
    """Everything that is no tensor, and tensors where tensors are needed."""
    if not isinstance(cache, DeltaLogCache):
        raise TypeError(f"cache must be a DeltaLogCache, got {type(cache).__name__}")
    if cache.rule != op.name.removeprefix("deltalog_decode_"):
        raise ValueError(f"cache must be of rule {op.name.removeprefix('deltalog_decode_')}, got one of {cache.rule}")
    for name in (*op.required, "state_indices"):
        if not isinstance(getattr(a, name), Tensor):
            check_tensors(**{op.called(name): getattr(a, name)})
    for name in ("A_log", "dt_bias", "valid"):
        if getattr(a, name) is not None:
            check_tensors(**{name: getattr(a, name)})
    if a.lower_bound is not None:
        check_number("lower_bound", a.lower_bound, "a number < 0")
        if not -float("inf") < a.lower_bound < 0:
            raise ValueError(f"lower_bound must be finite and below 0 (natural log per token), got {a.lower_bound}")
    if not a.use_gate_in_kernel:
        for name in ("A_log", "dt_bias"):
            if getattr(a, name) is not None:
                raise ValueError(f"{name} needs use_gate_in_kernel=True; without it g is the log decay itself")
    _gate(a)
    if a.allow_neg_eigval and not a.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    check_null_index(a.null_index)
    check_number("scale", a.scale, "a number, or None for K ** -0.5")


def check(op: Op, cache: DeltaLogCache | Storage, a: DeltaLogArguments, fake: bool = False) -> None:
    """Devices, dtypes and shapes. fake: the tensors have no values.

    Raises TypeError or ValueError for a wrong argument.
    """
    q, g, q_name, g_name = a.q, a.g, op.called("q"), op.called("g")
    check_tensors(**{op.called(name): x for name, x in zip(TENSORS, a[:10]) if x is not None})
    if q.device != cache.device:
        raise ValueError(f"{q_name} must be on {cache.device} like the cache, got {q.device}")
    if q.dim() != 4:
        raise ValueError(f"{q_name} must have shape [n, T, H, K], got {list(q.shape)}")
    (n, T, H, K), HV, V = q.shape, cache.HV, cache.V
    activations = FLOAT_DTYPES if cache.arch == "cpu" else (cache.dtype,)
    check_dtype(q_name, q, activations)
    check_dtype("k", a.k, activations)
    check_dtype("v", a.v, activations)
    if K != cache.K:
        raise ValueError(f"K, the last size of {q_name}, must be {cache.K} like the cache, got {K}")
    if H == 0 or HV % H:
        raise ValueError(f"HV, the value heads of the cache, must be a multiple of H, the heads of {q_name}: {HV} and {H}")
    check_shape("k", a.k, "[n, T, H, K]", (n, T, H, K))
    check_shape("v", a.v, "[n, T, HV, V]", (n, T, HV, V))
    per_key = op.rule.decay == "per_key"
    layout, shape = ("[n, T, HV, K]", (n, T, HV, K)) if per_key else ("[n, T, HV]", (n, T, HV))
    check_shape(g_name, g, layout, shape)
    if a.beta is not None:
        check_shape("beta", a.beta, "[n, T, HV]", (n, T, HV))
        check_dtype("beta", a.beta, FLOAT_DTYPES)
    check_dtype(g_name, g, FLOAT_DTYPES)
    for name, tensor, kind, sizes in (("u", a.bonus, "[H, K]", (H, K)), ("A_log", a.A_log, "[HV]", (HV,))):
        if tensor is not None:
            check_dtype(name, tensor, FLOAT_DTYPES)
            check_shape(name, tensor, kind, sizes)
    if a.dt_bias is not None:
        check_dtype("dt_bias", a.dt_bias, FLOAT_DTYPES)
        allowed = ((HV, K), (HV * K,)) if per_key else ((HV,),)
        if tuple(a.dt_bias.shape) not in allowed:
            shapes = " or ".join(map(str, map(list, allowed)))
            raise ValueError(f"dt_bias must have shape {shapes}, got {list(a.dt_bias.shape)}")
    for name, indices in (("state_indices", a.state_indices), ("valid", a.valid)):
        if indices is not None:
            check_dtype(name, indices, (torch.int32, torch.int64))
            check_shape(name, indices, "[n]", (n,))
    if cache.capacity < T:
        raise ValueError(f"T must be at most {cache.capacity}, the capacity of the log, got {T}")
    if a.verify is False and T > 1:
        raise ValueError(f"verify=False needs T = 1, got T = {T}: several tokens of one call stay in the log")
    if fake or not checks_values(q):
        return
    if not a.use_gate_in_kernel:
        counted = torch.full_like(a.state_indices, T) if a.valid is None else a.valid
        live = (a.state_indices >= 0) & (a.state_indices < cache.slots) & (a.state_indices != a.null_index)
        check_decay(g_name, g[live[:, None] & (torch.arange(T, device=g.device) < counted[:, None])])
    live_rows(a.state_indices, cache.slots, a.null_index)


def _refuse_gradients(op: Op, a: DeltaLogArguments) -> None:
    refuse_gradients(op.tensors(a, TENSORS), f"{op.name} has no backward")


# -- registration --------------------------------------------------------------------------------------------------------


def _register(op: Op) -> None:
    """Defines it, with what it does on a device, under a fake mode and for a gradient."""
    rule = op.name.removeprefix("deltalog_decode_")
    count = len(DeltaLogArguments._fields)

    def implementation(*values: Any) -> Tensor:
        a, cache = DeltaLogArguments(*values[:count]), storage_of(rule, values[count:])
        check(op, cache, a)
        return carry_out(op, cache, a)

    def fake(*values: Any) -> Tensor:
        a, cache = DeltaLogArguments(*values[:count]), storage_of(rule, values[count:], fake=True)
        check(op, cache, a, fake=True)
        return torch.empty((*a.q.shape[:2], cache.HV, cache.V), dtype=a.v.dtype, device=a.v.device)

    def gradient(*values: Any) -> Tensor:
        _refuse_gradients(op, DeltaLogArguments(*values[:count]))
        with torch._C._AutoDispatchBelowAutograd():
            return cast(Tensor, getattr(torch.ops.kda_tl, op.name).default(*values))

    _library.define(op.name + SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(op.name, implementation, "CPU")
    _library.impl(op.name, implementation, "CUDA")
    _library.impl(op.name, gradient, "Autograd")
    torch.library.register_fake(f"kda_tl::{op.name}", fake, lib=_library)
