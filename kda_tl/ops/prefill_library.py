"""From the public function to the registered op: torch.ops.kda_tl.NAME, and NAME_in_place, which writes the slots of a pool.

Library.define and impl, not custom_op, which costs 10 microseconds a call. What is not asked for comes back as an empty tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_tl.ops import gradients
from kda_tl.ops.arguments import TENSORS, Arguments, Op
from kda_tl.ops.checks import host_offsets, refuse_gradients
from kda_tl.ops.context import Turn, context_place, has_context
from kda_tl.ops.known import any_mode, is_plain
from kda_tl.ops.prefill import Results, allocate, carry_out, decided
from kda_tl.ops.prefill_checks import CHUNK_SIZE, check, check_options, check_types
from kda_tl.ops.prefill_context import receive
from kda_tl.ops.prefill_decision import Decision, key_of, known, once
from kda_tl.ops.repeated import Candidate, recognising

__all__ = ["public", "register", "run"]

P = ParamSpec("P")
NAMESPACE = "kda_tl"
ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? bonus, Tensor? A_log, Tensor? dt_bias, "
    "Tensor{mutated}? initial_state, Tensor? has_initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, float? scale, "
    "float? lower_bound, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, "
    "bool allow_neg_eigval, bool state_v_first, bool output_final_state, bool return_intermediate_states, "
    "int? intracard_segments"
)
FUNCTIONAL = f"({ARGUMENTS.format(mutated='')}) -> (Tensor, Tensor, Tensor)"
IN_PLACE = f"({ARGUMENTS.format(mutated='(a!)')}, Tensor state_indices, int? null_index) -> (Tensor, Tensor)"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def public(op: Op) -> Callable[[Callable[P, Arguments]], Callable[P, tuple[Tensor, Tensor | None]]]:
    """Registers `op`, and makes the public function out of one that makes its arguments: `recognising`."""
    register(op)

    def decorate(arguments: Callable[P, Arguments]) -> Callable[P, tuple[Tensor, Tensor | None]]:
        place = context_place(arguments)
        made: Callable[..., Arguments] = arguments

        def compute(args: tuple[Any, ...], kwargs: dict[str, Any], watch: Candidate | None) -> Any:
            if place is None or not has_context(place, args, kwargs):
                return run(op, made(*args, **kwargs), watch)
            with Turn.of(op.name, place, args, kwargs) as turn:
                a = made(*turn.args, **turn.kwargs)
                check_options(op, a)
                check_types(op, a)
                _refuse_gradients(op, a, "with cp_context has no backward")
                return run(op, receive(op, a, turn))

        return recognising(op, arguments, compute)

    return decorate


def run(op: Op, a: Arguments, watch: Candidate | None = None) -> Any:
    """(o, final state or None), and the states before every chunk where they are asked for.

    An eager call on plain tensors goes straight to the kernels, and without a check or a plan where an equal one has gone
    before; everything else (a compiler, a gradient, a mode, a subclass) through torch's dispatcher, where the op is registered.
    """
    traced = torch.compiler.is_compiling() or any_mode()
    key = None if traced else key_of(op, a)
    decision = None if key is None else known(key)
    if decision is None:
        check_options(op, a)
        check_types(op, a)
        if traced or not is_plain((*a[:12], a.state_indices)):
            return _results(a, *_call(op, a))
        decision = once(key, lambda: decided(op, a))
    if forward_ad._current_level >= 0:
        _refuse_gradients(op, a, "has no forward-mode derivative")
    o, final, states = carry_out(decision, a, watch)
    if states is not None and a.cu_seqlens is not None:
        states = _without_spare(a.cu_seqlens, a.cu_seqlens_cpu, states)
    return _results(a, o, final, states)


def _results(a: Arguments, o: Tensor, final: Tensor | None, states: Tensor | None) -> Any:
    if a.state_indices is not None:
        final = a.initial_state
    found = (o, final if a.output_final_state else None)
    return (*found, states) if a.return_intermediate_states else found


def _without_spare(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, states: Tensor) -> Tensor:
    """Exactly one row a chunk, where the host knows how many there are."""
    offsets = host_offsets(cu_seqlens, cu_seqlens_cpu)
    if offsets is None:
        return states
    return states[:, : sum(-(-(last - first) // CHUNK_SIZE) for first, last in itertools.pairwise(offsets))]


def _call(op: Op, a: Arguments) -> Results:
    """Through torch's dispatcher."""
    namespace = torch.ops.kda_tl
    if a.state_indices is not None:
        o, states = getattr(namespace, op.name + "_in_place").default(*a)
        return o, None, states
    o, final, states = getattr(namespace, op.name).default(*a[:-2])
    return o, final, states


def _refuse_gradients(op: Op, a: Arguments, why: str) -> None:
    refuse_gradients(op.tensors(a, TENSORS), f"{op.name} {why}")


def _forward_of(op: Op, a: Arguments) -> Callable[..., tuple[Tensor, Tensor]]:
    def run_forward(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        o, final, _ = getattr(torch.ops.kda_tl, op.name).default(*a._replace(**tensors)[:-2])  # type: ignore[arg-type]
        return o, final

    return run_forward


def _recomputation(op: Op, a: Arguments) -> gradients.Recomputation:
    return gradients.Recomputation(
        op.rule, a.scale, a.lower_bound, a.use_qk_l2norm_in_kernel, a.use_gate_in_kernel, a.use_beta_sigmoid_in_kernel,
        a.allow_neg_eigval, a.state_v_first,
    )  # fmt: skip


def _decision(op: Op, a: Arguments) -> Decision:
    """Of a call that comes through torch's dispatcher, as compiled code makes them: checked and planned once, too."""

    def make() -> Decision:
        check_options(op, a)
        return decided(op, a)

    return once(key_of(op, a), make)


def register(op: Op) -> None:
    """Defines both variants, with what they do on a device, under a fake mode and for a gradient."""

    def absent(found: Tensor | None, a: Arguments) -> Tensor:
        return torch.empty(0, dtype=torch.float32, device=a.q.device) if found is None else found

    def functional(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
        a = Arguments(*values)
        o, final, states = carry_out(_decision(op, a), a)
        return o, absent(final, a), absent(states, a)

    def in_place(*values: Any) -> tuple[Tensor, Tensor]:
        a = Arguments(*values)
        o, _, states = carry_out(_decision(op, a), a)
        return o, absent(states, a)

    def fake(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
        a = Arguments(*values)
        problem = check(op, a, fake=True)
        o, final = allocate(problem, a, pooled=a.state_indices is not None)
        states = None
        if a.return_intermediate_states:
            sizes = (problem.V, problem.K) if a.state_v_first else (problem.K, problem.V)
            states = torch.empty((problem.B, problem.chunks, problem.HV, *sizes), dtype=torch.float32, device=a.q.device)
        return o, absent(final, a), absent(states, a)

    def fake_in_place(*values: Any) -> tuple[Tensor, Tensor]:
        o, _, states = fake(*values)
        return o, states

    def gradient(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
        a = Arguments(*values)
        tensors = {name: getattr(a, name) for name in gradients.TENSORS}
        if gradients.needs_gradient(tensors):
            if torch._C._functorch.peek_interpreter_stack() is not None:
                raise NotImplementedError(
                    f"{op.name} has no derivatives in transforms of torch.func: use torch.autograd.grad or backward()"
                )
            if a.return_intermediate_states:
                _refuse_gradients(op, a, "with return_intermediate_states has no backward")
            o, final = gradients.differentiable(_forward_of(op, a), tensors, _recomputation(op, a))
            return o, absent(final, a), absent(None, a)
        _refuse_gradients(op, a, "has no forward-mode derivative")
        with torch._C._AutoDispatchBelowAutograd():
            found: tuple[Tensor, Tensor, Tensor] = getattr(torch.ops.kda_tl, op.name).default(*values)
        return found

    def gradient_in_place(*values: Any) -> tuple[Tensor, Tensor]:
        _refuse_gradients(op, Arguments(*values), "writes its states in place, which has no backward")
        with torch._C._AutoDispatchBelowAutograd():
            found: tuple[Tensor, Tensor] = getattr(torch.ops.kda_tl, op.name + "_in_place").default(*values)
        return found

    for name, schema, implementation, of_fakes, of_gradients in (
        (op.name, FUNCTIONAL, functional, fake, gradient),
        (op.name + "_in_place", IN_PLACE, in_place, fake_in_place, gradient_in_place),
    ):
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        _library.impl(name, implementation, "CPU")
        _library.impl(name, implementation, "CUDA")
        _library.impl(name, of_gradients, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", of_fakes, lib=_library)
