"""What an op knows of a context: hand over the affine maps of what goes on elsewhere, receive the states it enters with.

The state after a run of tokens is transition @ S + bias for the state S before it, whatever the gate (derivation:
`kda_tl.reference.chunk`, step 4). So a process that holds the middle of a sequence needs no token of what comes before, only
the maps of it. An op takes part in three lines:

    @takes_context                                                                       # on the public function
    cu_seqlens, cu_seqlens_cpu = local_sequences(cp_context, q, cu_seqlens, cu_seqlens_cpu)  # before its checks
    initial_state = cp_context.initial_state(k, v, g, beta, initial_state)               # after gating, before its scan

where `cp_context` has become the `Turn` of this call (the prefill ops do this in `prefill_library.public` and
`prefill_context.receive`). Whatever the op raises before it has handed over is told to the others, so that they raise too
instead of waiting. The final state needs no line: what the scan leaves is the state after the last token held here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from kda_tl.ops.checks import check_shape, check_tensors, refuse_gradients
from kda_tl.reference import segment_affine

__all__ = [
    "ContextProtocol",
    "Turn",
    "as_context",
    "context_place",
    "has_context",
    "local_sequences",
    "register_adapter",
    "segment_maps",
    "takes_context",
]

P = ParamSpec("P")
R = TypeVar("R")
Span = tuple[int, int, int]  # batch row, first token, last token + 1
SegmentMaps = Callable[[Tensor, Tensor, Tensor, Tensor, Sequence[Span]], tuple[Tensor, Tensor]]


@runtime_checkable
class ContextProtocol(Protocol):
    """A process's share of sequences that several processes hold. A local sequence may be a piece of a longer one."""

    @property
    def num_local(self) -> int:
        """Local sequences: batch rows of a dense share, or packed sequences."""

    @property
    def num_tokens(self) -> int:
        """Tokens of each batch row of a dense share, or of the whole pack."""

    @property
    def is_packed(self) -> bool: ...

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of a packed share: [num_local + 1] first tokens, and the end."""

    @property
    def handed_over(self) -> tuple[int, ...]:
        """Local sequences whose map (transition, bias) others need."""

    @property
    def received(self) -> tuple[int, ...]:
        """Local sequences that began elsewhere: what enters them is received."""

    def cu_seqlens(self, given: Tensor | None, device: torch.device) -> Tensor | None:
        """[num_local + 1] on `device`, None of a dense share. given: the caller's own; ValueError where it is another."""

    def exchange(
        self, op: str, sizes: tuple[int, int, int], device: torch.device, maps: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Collective. sizes: (HV, K, V). maps: transition [len(handed_over), HV, K, K] and bias [.., K, V] in float32, in that
        order; the bias of a sequence that begins here holds its initial state already; None where nothing is handed over.
        Returns [len(received), HV, K, V] float32. Raises where another process has failed, or disagrees about sizes."""

    def withdraw(self, op: str, error: Exception, device: torch.device | None) -> None:
        """Collective, in the place of `exchange`: this process has failed with `error`, the others shall raise."""


_ADAPTERS: list[Callable[[object], ContextProtocol | None]] = []


def register_adapter(adapter: Callable[[object], ContextProtocol | None]) -> None:
    """adapter(x): x, a context of another library, as a ContextProtocol, or None where it is something else."""
    _ADAPTERS.append(adapter)


def as_context(given: object) -> ContextProtocol:
    """What the caller gave as cp_context; TypeError where it is nothing of the kind."""
    if isinstance(given, ContextProtocol):
        return given
    for adapter in _ADAPTERS:
        if (context := adapter(given)) is not None:
            return context
    raise TypeError(
        "cp_context must be a kda_tl.ContextParallel, or a context of flash-linear-attention, "
        f"got {type(given).__name__}; as this process knows no group, the others cannot be told"
    )


class Turn:
    """One op call of a context. Leaving it with an exception before the exchange takes part in the exchange as a failure."""

    def __init__(
        self, op: str, context: ContextProtocol, device: torch.device | None = None, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """device: of the op's tensors, if known. args, kwargs: of the op, with this turn as its cp_context."""
        self.op, self.context, self.device, self.args, self.kwargs = op, context, device, args, kwargs or {}
        self._done = False

    @staticmethod
    def of(op: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Turn:
        """Of a call op(*args, **kwargs) that has a context. Raises TypeError where that is none."""
        context = as_context(args[place] if len(args) > place else kwargs["cp_context"])
        device = next((x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        turn = Turn(op, context, device)
        positional = len(args) > place
        turn.args = (*args[:place], turn, *args[place + 1 :]) if positional else args
        turn.kwargs = kwargs if positional else {**kwargs, "cp_context": turn}
        return turn

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None and not self._done:
            error = RuntimeError(f"{self.op} returned before it had handed anything over")
            self._withdraw(error)
            raise error
        if isinstance(error, Exception):
            self._withdraw(error)

    def _withdraw(self, error: Exception) -> None:
        if not self._done:
            self._done = True
            with suppress(Exception):  # the op's own error is the one to see
                self.context.withdraw(self.op, error, self.device)

    def initial_state(
        self, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, maps: SegmentMaps | None = None
    ) -> Tensor | None:
        """The states that the local sequences enter with; collective.

        k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K] or [B, T, HV], natural-log decay; beta [B, T, HV]: as the scan will see
        them, gate, norm and sigmoid applied. initial_state [N, HV, K, V] or None for zero: the rows of sequences that
        began elsewhere are not read. maps: computes (transition, bias) as `segment_maps` does, which it stands in for.

        Returns [N, HV, K, V] float32, or None where all are zero. initial_state itself is never written to.
        """
        given = {"k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
        refuse_gradients(given.items(), f"{self.op} with cp_context has no backward")
        context = self.context
        sizes = (v.shape[2], k.shape[3], v.shape[3])
        with torch.no_grad():
            handed = self._maps(k, v, g, beta, initial_state, maps or segment_maps) if context.handed_over else None
            self._done = True
            received = context.exchange(self.op, sizes, v.device, handed)
            if not context.received:
                return initial_state
            shape = (context.num_local, *sizes)
            states = torch.zeros(shape, device=v.device) if initial_state is None else initial_state.detach().clone()
            for row, n in enumerate(context.received):
                states[n] = received[row]
        return states

    def _maps(
        self, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, maps: SegmentMaps
    ) -> tuple[Tensor, Tensor]:
        context = self.context
        if context.is_packed:
            spans = [(0, context.offsets[n], context.offsets[n + 1]) for n in context.handed_over]
        else:
            spans = [(n, 0, context.num_tokens) for n in context.handed_over]
        transition, bias = maps(k, v, g, beta, spans)
        HV, K, V = v.shape[2], k.shape[3], v.shape[3]
        check_shape("transition", transition, "[S, HV, K, K]", (len(spans), HV, K, K))
        check_shape("bias", bias, "[S, HV, K, V]", (len(spans), HV, K, V))
        if initial_state is not None:
            for row, n in enumerate(context.handed_over):
                if n not in context.received:
                    state = transition[row].double() @ initial_state[n].double() + bias[row].double()
                    bias[row] = state.to(bias.dtype)
        return transition, bias


def context_place(op: Callable[..., Any]) -> int | None:
    """Which argument cp_context is; None where the op has none."""
    names = list(inspect.signature(op).parameters)
    return names.index("cp_context") if "cp_context" in names else None


def has_context(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (args[place] if len(args) > place else kwargs.get("cp_context")) is not None


def takes_context(op: Callable[P, R]) -> Callable[P, R]:
    """The op with a `Turn` in the place of its argument cp_context; where that is None, the op as it is."""
    place = context_place(op)
    if place is None:
        raise TypeError(f"{op.__name__} must have an argument cp_context")
    untyped: Callable[..., R] = op  # a Turn is no value for cp_context in the op's own signature

    @functools.wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not has_context(place, args, kwargs):
            return op(*args, **kwargs)
        with Turn.of(op.__name__, place, args, kwargs) as turn:
            return untyped(*turn.args, **turn.kwargs)

    return call


def local_sequences(
    cp_context: object, q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The local (cu_seqlens, cu_seqlens_cpu): the caller may leave them out. Without a context, what the caller gave.

    q [B, T, ..] must be as many tokens as the context says. No communication, so that a plan can be made by one rank.
    """
    if cp_context is None:
        return cu_seqlens, cu_seqlens_cpu
    context = cp_context.context if isinstance(cp_context, Turn) else as_context(cp_context)
    check_tensors(q=q)
    if q.dim() < 2:
        raise ValueError(f"q must have shape [B, T, H, K], got {list(q.shape)}")
    B, T = q.shape[:2]
    if not context.is_packed:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens must be None: cp_context is one of a dense batch")
        if context.num_local != B or context.num_tokens != T:
            raise ValueError(
                f"q must have B = {context.num_local} and T = {context.num_tokens} on this rank of cp_context, "
                f"got B = {B} and T = {T}"
            )
        return None, cu_seqlens_cpu
    if B != 1 or context.num_tokens > T:
        raise ValueError(
            f"q must have B = 1 and T of at least {context.num_tokens} on this rank of cp_context, got B = {B} and T = {T}"
        )
    resolved = context.cu_seqlens(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu, q.device)
    return resolved, context.cu_seqlens(None, torch.device("cpu"))


def segment_maps(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """(transition [S, HV, K, K], bias [S, HV, K, V]) of each span in float32: the state after it is transition @ S + bias.

    Inputs as in `Turn.initial_state`. Plain torch in float64, so that no TF32 setting of the process can round a product.
    """
    HV, K, V = v.shape[2], k.shape[3], v.shape[3]
    g = g.unsqueeze(-1) if g.dim() == 3 else g
    transitions = torch.empty((len(spans), HV, K, K), dtype=torch.float32, device=v.device)
    biases = torch.empty((len(spans), HV, K, V), dtype=torch.float32, device=v.device)
    for n, (row, first, last) in enumerate(spans):
        k_n, v_n, g_n, beta_n = (x[row, first:last].double().transpose(0, 1) for x in (k, v, g, beta))
        transitions[n], biases[n] = segment_affine(k_n.repeat_interleave(HV // len(k_n), 0), v_n, g_n, beta_n)
    return transitions, biases
