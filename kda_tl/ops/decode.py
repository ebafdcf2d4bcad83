"""Dense recurrent decode, from the public functions to the registered ops torch.ops.kda_tl.NAME and NAME_in_place.

As in `prefill_library`: an eager call on plain tensors goes straight to the kernel, and without a check where an equal one has
gone before; a compiler, a mode or a subclass meets the op that is registered with torch, which says what it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_tl.ops.arguments import Op
from kda_tl.ops.checks import refuse_gradients
from kda_tl.ops.decode_checks import TENSORS, DecodeArguments, check, check_options
from kda_tl.ops.decode_launch import Decision, allocate, carry_out, decide
from kda_tl.ops.known import Known, any_mode, is_plain, offsets_known, traits
from kda_tl.ops.plan import Launch, Plan, counted
from kda_tl.ops.repeated import Candidate, recognising
from kda_tl.runtime import dispatcher
from kda_tl.runtime.environment import UNCHECKED, check_setting
from kda_tl.runtime.errors import UnsupportedDevice

__all__ = ["DecodeArguments", "key_of", "known", "plan", "public", "refuse_unknown"]

P = ParamSpec("P")
Results = tuple[Tensor, Tensor | None]

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? bonus, Tensor? A_log, Tensor? dt_bias, "
    "Tensor{mutated} initial_state, Tensor? has_initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, "
    "Tensor? state_indices, int? null_index, float? scale, float? lower_bound, bool use_qk_l2norm_in_kernel, "
    "bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first, "
    "bool output_final_state"
)
FUNCTIONAL = f"({ARGUMENTS.format(mutated='?')}) -> (Tensor, Tensor)"
IN_PLACE = f"({ARGUMENTS.format(mutated='(a!)')}) -> Tensor"

_library = torch.library.Library("kda_tl", "FRAGMENT")
_known: Known[Decision] = Known()
known = _known.get


def public(op: Op) -> Callable[[Callable[P, DecodeArguments]], Callable[P, Results]]:
    """Registers `op`, and makes the public function out of one that makes its arguments: `recognising`."""
    _register(op)

    def decorate(arguments: Callable[P, DecodeArguments]) -> Callable[P, Results]:
        made: Callable[..., DecodeArguments] = arguments

        def compute(args: tuple[Any, ...], kwargs: dict[str, Any], watch: Candidate | None) -> Results:
            return run(op, made(*args, **kwargs), watch)

        return recognising(op, arguments, compute)

    return decorate


def run(op: Op, a: DecodeArguments, watch: Candidate | None = None) -> Results:
    """o, and the final state: initial_state itself where `inplace`, else a new one, or None."""
    traced = torch.compiler.is_compiling() or any_mode()
    key = None if traced else key_of(op, a)
    decision = None if key is None else known(key)
    if decision is None:
        check_options(op, a)
        if traced or not is_plain(a[:13]):
            return _call(op, a)
        decision = _known.once(key, lambda: _decided(op, a))
    if forward_ad._current_level >= 0:
        _refuse_gradients(op, a)
    return carry_out(decision, a, watch)


def plan(op: Op, a: DecodeArguments) -> Plan:
    """What a call will launch; raises what it would raise for types, sizes and names."""
    check_options(op, a)
    p = check(op, a)
    assert p.spec is not None
    sizes = {"N": p.N, "T": p.T, "H": p.H, "HV": p.HV, "K": p.K, "V": p.V, "gate": p.gate.name.lower()}
    return Plan(
        op=op.name,
        problem={**sizes, "dtype": p.spec.dtype, "state": p.spec.state_dtype},
        arch=p.arch,
        launches=(
            Launch(
                p.spec,
                f"{counted(p.N + (a.cu_seqlens is not None), 'request')} x {counted(p.HV, 'head')} x V tiles",
                p.size,
            ),
        ),
        workspace_bytes=0,
    )


def refuse_unknown(op: Op, given: dict[str, Any], known: tuple[str, ...] = ()) -> None:
    """given: what a call has as **kwargs. Raises TypeError."""
    if unknown := given.keys() - set(known):
        raise TypeError(f"{op.name} has no argument {min(unknown)!r}")


def key_of(op: Op, a: DecodeArguments) -> object:
    """All that checks and decisions depend on; None where they depend on more, or the call is not plain."""
    if check_setting() not in UNCHECKED:
        return None
    key: list[object] = [op.name]
    if a.q is None or not traits(key, a[:13]):
        return None
    try:
        arch = dispatcher.device_arch(a.q.device)
    except UnsupportedDevice:
        return None
    key += (arch, *a[13:], type(a.null_index), type(a.scale), type(a.lower_bound))
    if a.cu_seqlens is not None or a.cu_seqlens_cpu is not None:
        return tuple(key) if offsets_known(key, a.cu_seqlens, a.cu_seqlens_cpu) else None
    return tuple(key)


def _refuse_gradients(op: Op, a: DecodeArguments) -> None:
    refuse_gradients(op.tensors(a, TENSORS), f"{op.name} has no backward")


def _decided(op: Op, a: DecodeArguments) -> Decision:
    p = check(op, a)
    _refuse_gradients(op, a)
    return decide(op, p, a)


def _decision(op: Op, a: DecodeArguments) -> Decision:
    """Of a call that comes through torch's dispatcher, as compiled code makes them: checked and planned once, too."""

    def make() -> Decision:
        check_options(op, a)
        return _decided(op, a)

    return _known.once(key_of(op, a), make)


def _call(op: Op, a: DecodeArguments) -> Results:
    """Through torch's dispatcher."""
    namespace = torch.ops.kda_tl
    if a.inplace:
        return getattr(namespace, op.name + "_in_place").default(*a[:-1]), a.initial_state
    o, final = getattr(namespace, op.name).default(*a[:-1])
    return o, final if a.output_final_state else None


def _register(op: Op) -> None:
    """Defines both variants, with what they do on a device, under a fake mode and for a gradient."""

    def functional(*values: Any) -> tuple[Tensor, Tensor]:
        a = DecodeArguments(*values)
        o, final = carry_out(_decision(op, a), a)
        return o, _nothing(a) if final is None else final

    def in_place(*values: Any) -> Tensor:
        a = DecodeArguments(*values)._replace(inplace=True)
        return carry_out(_decision(op, a), a)[0]

    def fake(*values: Any) -> tuple[Tensor, Tensor]:
        a = DecodeArguments(*values)
        o, final = allocate(check(op, a, fake=True), a, a.v.dtype)
        return o, _nothing(a) if final is None else final

    def fake_in_place(*values: Any) -> Tensor:
        a = DecodeArguments(*values)._replace(inplace=True)
        return allocate(check(op, a, fake=True), a, a.v.dtype)[0]

    def gradient(*values: Any) -> Any:
        _refuse_gradients(op, DecodeArguments(*values))
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.kda_tl, op.name).default(*values)

    def gradient_in_place(*values: Any) -> Any:
        _refuse_gradients(op, DecodeArguments(*values))
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.kda_tl, op.name + "_in_place").default(*values)

    for name, schema, implementation, of_fakes, of_gradients in (
        (op.name, FUNCTIONAL, functional, fake, gradient),
        (op.name + "_in_place", IN_PLACE, in_place, fake_in_place, gradient_in_place),
    ):
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        _library.impl(name, implementation, "CPU")
        _library.impl(name, implementation, "CUDA")
        _library.impl(name, of_gradients, "Autograd")
        torch.library.register_fake(f"kda_tl::{name}", of_fakes, lib=_library)


def _nothing(a: DecodeArguments) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=a.q.device)
