"""Gradients of every prefill op, by recomputing the chunk form of `kda_tl.reference` under autograd: right, and slow.

`differentiable` runs the kernels forward and keeps nothing but the inputs. Backward, a sequence is cut into pieces of a few
chunks. A first pass without gradients finds the state before each piece; a second one, last piece first, recomputes a piece
with autograd and hands the gradient of its incoming state to the piece before. So memory beyond inputs and gradients is one
piece's intermediates and a state per piece: what autograd keeps per token never exists for more than a piece.

The chunk form is safe backward for any gate (docstring of `kda_tl.reference.chunk`). All is computed in float32, or in
float64 where an input is float64; gradients have the dtype of their input. Sequences are laid out on the host, so a backward
cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_tl.reference import beta_sigmoid, chunk_rule, kda_gate, l2norm
from kda_tl.specs.rules import Rule

__all__ = ["DIFFERENTIABLE", "TENSORS", "Recomputation", "differentiable", "needs_gradient", "recompute_gradients"]

DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "bonus", "A_log", "dt_bias", "initial_state")
TENSORS = (*DIFFERENTIABLE, "has_initial_state", "cu_seqlens", "cu_seqlens_cpu")
PER_TOKEN = ("q", "k", "v", "g", "beta")
PARAMETERS = ("bonus", "A_log", "dt_bias")

CHUNK_SIZE = 64
SHORT_CHUNK_SIZE = 16  # of sequences that are no longer: a chunk is padded to its size
CHUNKS_PER_PIECE = 16
PIECE_ELEMENTS = 2**22  # of one [tokens, HV, max(K, V)] tensor; backward holds about 100 of them at once, 1.6 GiB in float32


@dataclass(frozen=True)
class Recomputation:
    """What the recomputation has to know of a call besides its tensors; names and meaning as in `kda_tl.ops`."""

    rule: Rule
    scale: float | None = None
    lower_bound: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False

    @property
    def used(self) -> frozenset[str]:
        """The differentiable tensors that the outputs depend on."""
        absent = {
            "g": self.rule.decay == "none",
            "beta": not self.rule.delta,
            "bonus": not self.rule.read_first,
            "A_log": not self.use_gate_in_kernel,
            "dt_bias": not self.use_gate_in_kernel,
        }
        return frozenset(name for name in DIFFERENTIABLE if not absent.get(name, False))


def needs_gradient(tensors: Mapping[str, Tensor | None]) -> bool:
    """Whether a call on these has to go through `differentiable`: grad mode is on and one of them requires a gradient."""
    return torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for name, x in tensors.items() if name in DIFFERENTIABLE
    )


def differentiable(
    launch: Callable[..., tuple[Tensor, Tensor | None]], tensors: Mapping[str, Tensor | None], options: Recomputation
) -> tuple[Tensor, Tensor | None]:
    """launch(**tensors), with gradients for every input that requires one.

    Args:
        launch: the forward call. Takes `tensors` by name, without gradients; returns new tensors: o [B, T, HV, V], and the
            final state [N, HV, K, V] ([N, HV, V, K] with state_v_first), or None or an empty tensor in its place.
        tensors: names are those of `TENSORS`, shapes those of the ops; None or left out where the call has none. q, k, v and
            what the rule needs must be there, already checked. Without cu_seqlens_cpu, backward waits once for cu_seqlens.
        options: rule, scale and activations of the call.

    Returns:
        What launch returned, connected to the inputs. Gradients are those of the unrounded chunk form; tokens past
        cu_seqlens[-1] get zero. They are for one backward: differentiating them again raises
        NotImplementedError.

    Raises:
        ValueError: a name that is not in `TENSORS`.
        NotImplementedError: an input carries a forward-mode tangent.
    """
    if unknown := tensors.keys() - set(TENSORS):
        raise ValueError(f"tensors must have names among {', '.join(TENSORS)}, got {min(unknown)!r}")
    if forward_ad._current_level >= 0:
        for name, x in tensors.items():
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(f"{name} has a forward-mode tangent, and only reverse-mode gradients are available")
    given = {name: x for name, x in tensors.items() if x is not None}
    results: tuple[Tensor, Tensor | None] = _Recomputed.apply(launch, options, tuple(given), *given.values())
    return results


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        launch: Callable[..., tuple[Tensor, Tensor | None]], options: Recomputation, names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        o, final_state = launch(**dict(zip(names, tensors)))
        return o, final_state

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.options, ctx.names, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them once
        tensors = dict(zip(ctx.names, saved))
        options: Recomputation = ctx.options
        wanted = [name for name, needed in zip(ctx.names, ctx.needs_input_grad[3:]) if needed and name in options.used]
        with torch.no_grad():
            gradients = torch.ops.kda_tl.recompute_gradients(
                *(tensors.get(name) for name in TENSORS), grad_o, grad_final_state, wanted, *options.rule.as_dict().values(),
                options.scale, options.lower_bound, options.use_qk_l2norm_in_kernel, options.use_gate_in_kernel,
                options.use_beta_sigmoid_in_kernel, options.allow_neg_eigval, options.state_v_first,
            )  # fmt: skip
        if torch.is_grad_enabled():  # create_graph: a second derivative may follow, by the inputs or by grad_o
            behind = [x for x in (*saved, grad_o, grad_final_state) if x is not None and x.requires_grad]
            gradients = _Once.apply(len(gradients), *gradients, *behind)
        found = dict(zip(wanted, gradients))
        return (None, None, None, *(found.get(name) for name in ctx.names))


class _Once(torch.autograd.Function):
    """The first `count` tensors, which depend on the others in a way that has no derivative."""

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_dirty(*inputs[1 : 1 + inputs[0]])  # the same tensors, not views of them, which nobody could write to

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("kda_tl's gradients have no derivatives of their own: detach them, or leave out create_graph")


def recompute_gradients(
    tensors: Mapping[str, Tensor | None],
    options: Recomputation,
    grad_o: Tensor | None,
    grad_final_state: Tensor | None,
    wanted: Collection[str],
) -> dict[str, Tensor]:
    """The gradients of the inputs named in `wanted`, from those of o and of the final state (None or empty for zero).

    Shapes and dtypes of the gradients are those of the inputs. tensors and options as in `differentiable`.
    """
    with torch.no_grad(), torch.autocast(tensors["q"].device.type, enabled=False):  # type: ignore[union-attr]
        return _Backward(tensors, options, grad_o, grad_final_state, frozenset(wanted)).gradients()


@dataclass(frozen=True)
class _Piece:
    """Piece `level` of a sequence: flat tokens start to start + length - 1. last: no piece follows."""

    sequence: int
    level: int
    start: int
    length: int
    last: bool


class _Backward:
    """One backward of one call. States are K first and in the compute dtype throughout, batch and time are flattened."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor | None],
        options: Recomputation,
        grad_o: Tensor | None,
        grad_final_state: Tensor | None,
        wanted: frozenset[str],
    ) -> None:
        self.options = options
        self.wanted = wanted
        self.inputs = {name: x.detach() for name in sorted(options.used) if (x := tensors.get(name)) is not None}
        self.q, self.v = self.inputs["q"], self.inputs["v"]
        is_double = any(x.dtype == torch.float64 for x in self.inputs.values())
        self.dtype = torch.float64 if is_double else torch.float32
        self.flat = {name: self.inputs[name].flatten(0, 1) for name in PER_TOKEN if name in self.inputs}
        self.grad_o = None if grad_o is None else grad_o.flatten(0, 1)

        B, T = self.q.shape[:2]
        cu_seqlens = tensors.get("cu_seqlens")
        if cu_seqlens is None:
            self.bounds = [(row * T, row * T + T) for row in range(B)]
        else:
            known = tensors.get("cu_seqlens_cpu")
            self.bounds = list(itertools.pairwise((cu_seqlens if known is None else known).tolist()))
        self.fresh = None if (used := tensors.get("has_initial_state")) is None else ~used
        if grad_final_state is not None and grad_final_state.numel() == 0:
            grad_final_state = None
        self.grad_final_state = None if grad_final_state is None else self._k_first(grad_final_state)
        self.HV, self.K, self.V = self.v.shape[2], self.q.shape[3], self.v.shape[3]
        fitting = PIECE_ELEMENTS // (self.HV * max(self.K, self.V) * CHUNK_SIZE)
        self.piece_tokens = CHUNK_SIZE * min(max(fitting, 1), CHUNKS_PER_PIECE)

    def gradients(self) -> dict[str, Tensor]:
        found = {name: torch.zeros(x.shape, dtype=x.dtype, device=x.device) for name, x in self.inputs.items()
                 if name in self.wanted}  # fmt: skip
        sums = {name: x.to(self.dtype) for name, x in found.items() if name in PARAMETERS}
        if "initial_state" in found and self.grad_final_state is not None:
            self._store_state(found["initial_state"], None, self.grad_final_state)  # stays, where a sequence is empty

        levels = self._levels()
        states = self._states(levels)
        incoming: dict[int, Tensor] = {}  # sequence -> gradient of the state after the piece at hand
        for pieces in reversed(levels):
            for batch in self._batches(pieces):
                of_leaves = self._backward(batch, states, incoming)
                tokens = self._tokens(batch)
                for name, gradient in of_leaves.items():
                    if name in PER_TOKEN:
                        buffer = found[name].flatten(0, 1)
                        buffer.index_copy_(0, tokens, gradient.squeeze(0).to(buffer.dtype))
                    elif name in PARAMETERS:
                        sums[name] += gradient
                if "initial_state" in of_leaves:
                    gradient = of_leaves["initial_state"]
                    if batch[0].level:
                        incoming.update((piece.sequence, gradient[i]) for i, piece in enumerate(batch))
                    elif "initial_state" in found:
                        self._store_state(found["initial_state"], self._sequences(batch), gradient)
        for name, total in sums.items():
            found[name] = total.to(found[name].dtype)
        if "initial_state" in found and self.fresh is not None:
            found["initial_state"].masked_fill_(self.fresh[:, None, None, None], 0.0)
        return found

    def _levels(self) -> list[list[_Piece]]:
        """All first pieces, all second ones, and so on."""
        levels: list[list[_Piece]] = []
        for n, (start, end) in enumerate(self.bounds):
            for level, first in enumerate(range(start, end, self.piece_tokens)):
                if level == len(levels):
                    levels.append([])
                length = min(self.piece_tokens, end - first)
                levels[level].append(_Piece(n, level, first, length, last=first + length == end))
        return levels

    def _batches(self, pieces: list[_Piece]) -> Iterator[list[_Piece]]:
        """Pieces of one level that are computed together, of like lengths and within PIECE_ELEMENTS."""
        batch: list[_Piece] = []
        elements = 0
        for piece in sorted(pieces, key=lambda piece: piece.length):
            chunk = _chunk_size([piece])
            own = self.HV * (-(-piece.length // chunk) * chunk * max(self.K, self.V) + self.K * self.V)
            if batch and elements + own > PIECE_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append(piece)
            elements += own
        if batch:
            yield batch

    def _states(self, levels: list[list[_Piece]]) -> dict[tuple[int, int], Tensor]:
        """(sequence, level) -> the state before that piece, of all pieces but first ones."""
        states: dict[tuple[int, int], Tensor] = {}
        for pieces in levels:
            for batch in self._batches([piece for piece in pieces if not piece.last]):
                _, after = self._forward(self._leaves(batch, states), batch)
                states.update(((piece.sequence, piece.level + 1), after[i]) for i, piece in enumerate(batch))
        return states

    def _backward(
        self, batch: list[_Piece], states: dict[tuple[int, int], Tensor], incoming: dict[int, Tensor]
    ) -> dict[str, Tensor]:
        """Gradients of the leaves that need one: tokens [1, tokens, ...], parameters, and the state [batch, HV, K, V]."""
        leaves = self._leaves(batch, states)
        needed = [name for name in leaves if name in self.wanted or (name == "initial_state" and batch[0].level)]
        for name in needed:
            leaves[name].requires_grad_()
        with torch.enable_grad():
            o, after = self._forward(leaves, batch)
        roots = []
        if self.grad_o is not None:
            roots.append((o, self._gather(self.grad_o, batch).unsqueeze(0)))
        from_next = [incoming.get(piece.sequence) for piece in batch]
        if self.grad_final_state is not None or any(x is not None for x in from_next):
            if self.grad_final_state is None:
                gradient = torch.zeros_like(after)
            else:
                gradient = self.grad_final_state.index_select(0, self._sequences(batch)).to(self.dtype)
            for i, (piece, own) in enumerate(zip(batch, from_next)):
                if not piece.last:
                    gradient[i] = 0.0 if own is None else own
            roots.append((after, gradient))
        roots = [(root, gradient) for root, gradient in roots if root.requires_grad]
        if not roots or not needed:
            return {}
        outputs, grad_outputs = zip(*roots)
        found = torch.autograd.grad(outputs, [leaves[name] for name in needed], grad_outputs, allow_unused=True)
        return {name: x for name, x in zip(needed, found) if x is not None}

    def _leaves(self, batch: list[_Piece], states: dict[tuple[int, int], Tensor]) -> dict[str, Tensor]:
        leaves = {name: self._gather(x, batch).unsqueeze(0) for name, x in self.flat.items()}
        # New tensors, so that one that requires a gradient is not the caller's.
        leaves.update({name: self.inputs[name].to(self.dtype, copy=True) for name in PARAMETERS if name in self.inputs})
        if batch[0].level:
            leaves["initial_state"] = torch.stack([states[piece.sequence, piece.level] for piece in batch])
        elif "initial_state" in self.inputs:
            sequences = self._sequences(batch)
            state = self._k_first(self.inputs["initial_state"]).index_select(0, sequences).to(self.dtype)
            if self.fresh is not None:
                state = state.masked_fill(self.fresh.index_select(0, sequences)[:, None, None, None], 0.0)
            leaves["initial_state"] = state
        return leaves

    def _forward(self, leaves: Mapping[str, Tensor], batch: list[_Piece]) -> tuple[Tensor, Tensor]:
        """o [1, tokens, HV, V] and the state after each piece."""
        options, rule = self.options, self.options.rule
        q, k, v, g, beta = (leaves.get(name) for name in PER_TOKEN)
        assert q is not None and k is not None and v is not None
        if options.use_qk_l2norm_in_kernel:
            q, k = l2norm(q), l2norm(k)
        if options.use_gate_in_kernel and g is not None:
            g = self._gate(g, leaves.get("A_log"), leaves.get("dt_bias"))
        if options.use_beta_sigmoid_in_kernel and beta is not None:
            beta = beta_sigmoid(beta, options.allow_neg_eigval)
        pack = [0, *itertools.accumulate(piece.length for piece in batch)]
        o, after, _ = chunk_rule(
            q, k, v, g, beta, leaves.get("bonus"), options.scale, leaves.get("initial_state"), pack, False,
            _chunk_size(batch), self.dtype, decay=rule.decay, delta=rule.delta, read_first=rule.read_first,
        )  # fmt: skip
        return o, after

    def _gate(self, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
        if self.options.rule.decay == "per_key":
            return kda_gate(g, A_log, dt_bias, self.options.lower_bound)
        bias = None if dt_bias is None else dt_bias.unsqueeze(-1)
        return kda_gate(g.unsqueeze(-1), A_log, bias, self.options.lower_bound).squeeze(-1)

    def _tokens(self, batch: list[_Piece]) -> Tensor:
        ranges = [torch.arange(piece.start, piece.start + piece.length) for piece in batch]
        return torch.cat(ranges).to(self.q.device)

    def _gather(self, flat: Tensor, batch: list[_Piece]) -> Tensor:
        """[B * T, ...] -> [tokens of the batch, ...], a new tensor in the compute dtype."""
        return flat.index_select(0, self._tokens(batch)).to(self.dtype)

    def _sequences(self, batch: list[_Piece]) -> Tensor:
        return torch.tensor([piece.sequence for piece in batch], device=self.q.device)

    def _k_first(self, state: Tensor) -> Tensor:
        return state.transpose(-1, -2) if self.options.state_v_first else state

    def _store_state(self, buffer: Tensor, sequences: Tensor | None, gradient: Tensor) -> None:
        rows = self._k_first(gradient).to(buffer.dtype)  # a transpose either way
        if sequences is None:
            buffer.copy_(rows)
        else:
            buffer.index_copy_(0, sequences, rows)


def _chunk_size(batch: list[_Piece]) -> int:
    return SHORT_CHUNK_SIZE if max(piece.length for piece in batch) <= SHORT_CHUNK_SIZE else CHUNK_SIZE


def _recompute_gradients_op(*values: Any) -> list[Tensor]:
    tensors = dict(zip(TENSORS, values))
    grad_o, grad_final_state, wanted, decay, delta, read_first, *rest = values[len(TENSORS) :]
    options = Recomputation(Rule(decay, delta, read_first), *rest)
    gradients = recompute_gradients(tensors, options, grad_o, grad_final_state, wanted)
    return [gradients[name] for name in wanted]


def _recompute_gradients_fake(*values: Any) -> list[Tensor]:
    tensors = dict(zip(TENSORS, values))
    return [torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device=tensors[name].device)
            for name in values[len(TENSORS) + 2]]  # fmt: skip


# An op of its own, so that a compiler that traces a backward sees one node, not a loop whose length is data.
_library = torch.library.Library("kda_tl", "FRAGMENT")
_library.define(
    "recompute_gradients(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? bonus, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? initial_state, Tensor? has_initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, Tensor? grad_o, "
    "Tensor? grad_final_state, str[] wanted, str decay, bool delta, bool read_first, float? scale, float? lower_bound, "
    "bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, "
    "bool state_v_first) -> Tensor[]"
)
for _key in ("CPU", "CUDA"):
    _library.impl("recompute_gradients", _recompute_gradients_op, _key)
# It differentiates inside: the usual fallback of this key would leave autograd switched off there.
_library.impl("recompute_gradients", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("kda_tl::recompute_gradients", _recompute_gradients_fake, lib=_library)
