"""Input checks and the token layout shared by the recurrent and the chunk form."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

CumulativeLengths = Sequence[int] | Tensor
DECAYS = ("none", "scalar", "per_key")


@dataclass(frozen=True, eq=False)
class Inputs:
    """Checked inputs in the compute dtype. Batch and time are flattened, so that a dense batch and a pack look alike.

    q, k [B * T, H, K]; v [B * T, HV, V]; g [B * T, HV, K] natural-log decay, zero for a rule without; beta [B * T, HV],
    read by delta rules only; bonus [HV, K], read by read_first rules only; state [N, HV, K, V]; sequence n owns the flat
    tokens starts[n] to starts[n] + lengths[n] - 1; offsets[n] is its first token in its batch row or pack.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    bonus: Tensor
    state: Tensor
    scale: float
    starts: list[int]
    offsets: list[int]
    lengths: list[int]

    @property
    def group(self) -> int:
        """Value heads per q/k head."""
        return self.v.shape[1] // self.q.shape[1]


def check_rule(decay: str, delta: bool, read_first: bool) -> None:
    """Raises ValueError for a rule that is not in the family."""
    if decay not in DECAYS:
        raise ValueError(f"decay must be one of {', '.join(DECAYS)}, got {decay!r}")
    if read_first and delta:
        raise ValueError("read_first=True needs delta=False: no rule reads before a delta-corrected write")


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    bonus: Tensor | None,
    decay: str,
    delta: bool,
    read_first: bool,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: CumulativeLengths | None,
    state_v_first: bool,
    dtype: torch.dtype,
) -> Inputs:
    """Check every argument of an op, convert to the compute dtype and flatten batch and time.

    Raises TypeError for an argument that is not a floating-point tensor, ValueError for any other wrong argument.
    """
    check_rule(decay, delta, read_first)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    for name, absent, needs in (
        ("g", decay == "none", "a rule with decay, decay is 'none'"),
        ("beta", not delta, "a rule with the delta correction, delta is False"),
        ("bonus", not read_first, "a rule that reads first, read_first is False"),
    ):
        if absent and {"g": g, "beta": beta, "bonus": bonus}[name] is not None:
            raise ValueError(f"{name} needs {needs}: leave it out")
    optional = {"g": g, "beta": beta, "bonus": bonus, "initial_state": initial_state}
    named = {"q": q, "k": k, "v": v, **{name: x for name, x in optional.items() if x is not None}}
    for name, x in named.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {kind}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but all tensors must share one device, and q is on {q.device}")

    if q.dim() != 4:
        raise ValueError(f"q must be [B, T, H, K], got {tuple(q.shape)}")
    B, T, H, K = q.shape
    if k.shape != q.shape:
        raise ValueError(f"k must have the shape of q {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v must be [B, T, HV, V] with B = {B} and T = {T} as in q, got {tuple(v.shape)}")
    HV, V = v.shape[2:]
    for name, size in {"H (heads of q)": H, "HV (heads of v)": HV, "K (last of q)": K, "V (last of v)": V}.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if HV % H:
        raise ValueError(f"v has HV = {HV} heads, which must be a multiple of the H = {H} heads of q and k")
    if g is None:
        g = torch.zeros((), dtype=dtype, device=q.device).expand(B, T, HV)
    if g.shape not in ((B, T, HV, K), (B, T, HV)) or (decay == "scalar" and g.dim() == 4):
        per_key = f"[B, T, HV, K] = {(B, T, HV, K)} or " if decay == "per_key" else ""
        raise ValueError(f"g must be {per_key}[B, T, HV] = {(B, T, HV)}, got {tuple(g.shape)}")
    if g.dim() == 3:
        g = g.unsqueeze(-1).expand(B, T, HV, K)
    if beta is None:
        beta = torch.ones((), dtype=dtype, device=q.device).expand(B, T, HV)
    if beta.shape != (B, T, HV):
        raise ValueError(f"beta must be [B, T, HV] = {(B, T, HV)}, got {tuple(beta.shape)}")
    if bonus is None:
        bonus = torch.zeros((), dtype=dtype, device=q.device).expand(H, K)
    if bonus.shape != (H, K):
        raise ValueError(f"bonus must be [H, K] = {(H, K)}, got {tuple(bonus.shape)}")
    bonus = bonus.to(dtype).repeat_interleave(HV // H, 0)

    if cu_seqlens is None:
        offsets, lengths = [0] * B, [T] * B
        starts = [row * T for row in range(B)]
    else:
        bounds = _check_cu_seqlens(cu_seqlens, B, T)
        starts = offsets = bounds[:-1]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]

    N = len(lengths)
    if initial_state is None:
        state = torch.zeros(N, HV, K, V, dtype=dtype, device=q.device)
    else:
        names, shape = ("[N, HV, V, K]", (N, HV, V, K)) if state_v_first else ("[N, HV, K, V]", (N, HV, K, V))
        if initial_state.shape != shape:
            raise ValueError(f"initial_state must be {names} = {shape}, got {tuple(initial_state.shape)}")
        state = initial_state.to(dtype)
        state = state.transpose(-1, -2) if state_v_first else state

    def flat(x: Tensor) -> Tensor:
        return x.to(dtype).flatten(0, 1)

    scale = K**-0.5 if scale is None else float(scale)
    return Inputs(flat(q), flat(k), flat(v), flat(g), flat(beta), bonus, state, scale, starts, offsets, lengths)


def _check_cu_seqlens(cu_seqlens: CumulativeLengths, B: int, T: int) -> list[int]:
    if isinstance(cu_seqlens, Tensor) and (cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64)):
        raise ValueError(
            f"cu_seqlens must be a one-dimensional int32 or int64 tensor, got {cu_seqlens.dtype} "
            f"of shape {tuple(cu_seqlens.shape)}"
        )
    values = cast(Iterable[int], cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)
    try:
        bounds = [operator.index(x) for x in values]
    except TypeError:
        raise ValueError(f"cu_seqlens must hold integers, got {cu_seqlens!r}") from None
    if B != 1:
        raise ValueError(f"cu_seqlens needs one packed batch row, B = 1, got B = {B}")
    if not bounds or bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {bounds[:1]}")
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end < start:
            raise ValueError(f"cu_seqlens must not decrease, got {start} then {end} at sequence {n}")
    if bounds[-1] > T:
        raise ValueError(f"cu_seqlens must end at or before T = {T}, got {bounds[-1]}")
    return bounds


@dataclass(frozen=True, eq=False)
class Lockstep:
    """A schedule that walks N sequences of items together: step i takes item i of every sequence that has one.

    Sequences go longest first, so that those still running are always a prefix: no padding, no masks.
    order [sequences with items]: sequence ids, longest first; counts[i]: sequences running at step i;
    index [sum of lengths]: flat item ids, step by step, in `order` within a step.
    """

    order: Tensor
    counts: list[int]
    index: Tensor

    @staticmethod
    def of(starts: list[int], lengths: list[int], device: torch.device) -> Lockstep:
        """Sequence n owns the items starts[n] to starts[n] + lengths[n] - 1."""
        ids = sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n])
        first = torch.tensor([starts[n] for n in ids], dtype=torch.int64)
        length = torch.tensor([lengths[n] for n in ids], dtype=torch.int64)
        step = torch.arange(lengths[ids[0]] if ids else 0).unsqueeze(-1)
        running = step < length
        return Lockstep(
            order=torch.tensor(ids, dtype=torch.int64, device=device),
            counts=running.sum(-1).tolist(),
            index=(first + step)[running].to(device),
        )

    def split(self, items: Tensor) -> tuple[Tensor, ...]:
        """[items, ...] -> one tensor [counts[i], ...] per step."""
        return torch.split(items.index_select(0, self.index), self.counts)

    def join(self, steps: list[Tensor], into: Tensor) -> Tensor:
        """The inverse of `split`, on top of `into` [items, ...] where no sequence owns an item."""
        return into.index_copy(0, self.index, torch.cat(steps)) if steps else into

    def scan(self, state: Tensor, step: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Run state[:count] = step(state[:count], i) for every step i, from state [N, ...], one per sequence.

        Returns the final states [N, ...] in a new tensor; a sequence without items keeps its state.
        """
        running = state.index_select(0, self.order)
        finished: list[Tensor] = []
        for i, count in enumerate(self.counts):
            if count < running.shape[0]:
                finished.append(running[count:])
                running = running[:count]
            running = step(running, i)
        finished.append(running)
        return state.index_copy(0, self.order, torch.cat(finished[::-1]))
