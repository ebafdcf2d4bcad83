"""From a checked dense decode call to one launch: what the kernel's flags are, what is converted, and where states go.

Every rule of the family is the same kernel with other run-time flags (`kda_tl.kernels.recurrent_decode`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kda_tl.ops.arguments import Op
from kda_tl.ops.checks import mark_written, narrowed
from kda_tl.ops.decode_checks import DecodeArguments, DecodeProblem, dtype_name
from kda_tl.ops.repeated import Candidate
from kda_tl.runtime import dispatcher
from kda_tl.runtime.fused import derived, stand_in
from kda_tl.specs.decode import DecodeFlag, RecurrentDecodeSpec
from kda_tl.specs.gates import BetaForm, GateForm

__all__ = ["Decision", "allocate", "carry_out", "decide"]

F = {flag.name: int(flag) for flag in DecodeFlag}  # plain numbers: an IntFlag takes a microsecond to combine
INDEXED = F["INDEXED_IN"] | F["INDEXED_OUT"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Of a call, all but its tensors: it depends on shapes, strides, dtypes, alignment and options alone.

    Attributes:
        dtype, state_dtype: of the kernel.
        flags: `DecodeFlag`s, but for those of the pools, which `_pool` finds out.
        plain: activations, gates and parameters go to the kernel as they are; else some are converted first.
        widened: the cpu's kernels take no states as narrow as these.
    """

    problem: DecodeProblem
    spec: RecurrentDecodeSpec
    dtype: torch.dtype
    state_dtype: torch.dtype
    flags: int
    gate: int
    beta: int
    scale: float
    lower_bound: float
    null_index: int
    plain: bool
    widened: bool
    absent: _Absent


def decide(op: Op, p: DecodeProblem, a: DecodeArguments) -> Decision:
    assert p.spec is not None
    dtype: torch.dtype = getattr(torch, p.spec.dtype)
    state_dtype: torch.dtype = getattr(torch, p.spec.state_dtype)
    flags = F["UNIFORM"] * (a.cu_seqlens is None) | F["DELTA"] * op.rule.delta | F["READ_FIRST"] * op.rule.read_first
    flags |= F["L2NORM"] * a.use_qk_l2norm_in_kernel | INDEXED * (a.state_indices is not None)
    if not a.inplace:
        flags &= ~F["INDEXED_OUT"]
    if a.g is not None:
        flags |= F["DECAY"] | F["WIDE_GATE"] * (a.g.dtype != dtype or dtype == torch.float32)
        flags |= F["HAS_A_LOG"] * (p.gate in (GateForm.SOFTPLUS, GateForm.BOUNDED) and a.A_log is not None)
        flags |= F["HAS_DT_BIAS"] * (p.gate != GateForm.IDENTITY and a.dt_bias is not None)
    if a.beta is not None:
        flags |= F["HAS_BETA"] | F["WIDE_BETA"] * (a.beta.dtype != dtype or dtype == torch.float32)
    if a.initial_state is not None:
        flags |= F["LOAD_STATE"] | F["LOAD_FLAGS"] * (a.has_initial_state is not None)
    strength = BetaForm.TWICE_SIGMOID if a.allow_neg_eigval else BetaForm.SIGMOID
    return Decision(
        p, p.spec, dtype, state_dtype, flags,
        gate=int(p.gate),
        beta=int(strength if a.use_beta_sigmoid_in_kernel else BetaForm.IDENTITY),
        scale=p.K**-0.5 if a.scale is None else float(a.scale),
        lower_bound=0.0 if a.lower_bound is None else float(a.lower_bound),
        null_index=-1 if a.null_index is None else int(a.null_index),
        plain=_plain(a, dtype),
        widened=a.initial_state is not None and a.initial_state.dtype != state_dtype,
        absent=_absent(a.q.device, dtype, state_dtype),
    )  # fmt: skip


def _plain(a: DecodeArguments, dtype: torch.dtype) -> bool:
    gates = (dtype, torch.float32)
    for tensors, dtypes in (
        ((a.q, a.k, a.v), (dtype,)),
        ((a.g, a.beta), gates),
        ((a.A_log, a.dt_bias, a.bonus), (torch.float32,)),
    ):
        if any(x is not None and (x.dtype not in dtypes or x.is_neg()) for x in tensors):
            return False
    return True


def allocate(p: DecodeProblem, a: DecodeArguments, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """o in the kernel's dtype, and the final state: the pool itself where `inplace`, else a new one, or None."""
    o = torch.empty((p.B, p.T, p.HV, p.V), dtype=dtype, device=a.v.device)
    if a.inplace or not a.output_final_state:
        return o, a.initial_state if a.inplace else None
    shape = (p.N, p.HV, p.V, p.K) if a.state_v_first else (p.N, p.HV, p.K, p.V)
    # A null slot leaves its row as it is, and so does a call without tokens.
    zeroed = a.state_indices is not None or p.T == 0
    state_dtype = torch.float32 if a.initial_state is None else a.initial_state.dtype
    return o, (torch.zeros if zeroed else torch.empty)(shape, dtype=state_dtype, device=a.v.device)


def carry_out(d: Decision, a: DecodeArguments, watch: Candidate | None = None) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in the dtype of v, and the final state: the pool itself where `inplace`, else a new one, or None."""
    p = d.problem
    o, final = allocate(p, a, d.dtype)
    if p.N == 0 or p.T == 0:
        if a.inplace and a.has_initial_state is not None and p.N:
            _clear_slots(a)
        elif final is not None and a.initial_state is not None and not a.inplace:
            final.copy_(_gathered(a, p.N)[0])
        o.zero_()
    else:
        with dispatcher.device_guard(o.device):
            if d.widened:
                _launch_widened(d, a, o, a.initial_state, final)
            else:
                _launch(d, a, o, a.initial_state, final, watch)
        if a.inplace and final is not None:
            mark_written(final)
        if watch is not None and (a.inplace or final is None or a.state_indices is None):  # else final was zeroed
            watch.whole(o, None if a.inplace else final, final if a.inplace else None)
    return o if o.dtype == a.v.dtype else o.to(a.v.dtype), final


@dataclass(frozen=True)
class _Absent:
    """Stand-ins for what a call lacks, one per rank. The kernel never reads them, so they may outlive any memory pool."""

    rank: tuple[Tensor, ...]  # of the activations
    wide: tuple[Tensor, ...]  # float32
    state: Tensor
    integer: Tensor
    byte: Tensor


@functools.lru_cache(maxsize=64)
def _absent(device: torch.device, dtype: torch.dtype, state_dtype: torch.dtype) -> _Absent:
    def ranks(of: torch.dtype) -> tuple[Tensor, ...]:
        one = torch.empty(8, dtype=of, device=device)[:1]
        return tuple(stand_in(one.view((1,) * rank)) for rank in range(1, 5))

    integer = stand_in(torch.empty(1, dtype=torch.int32, device=device))
    state = torch.empty(8, dtype=state_dtype, device=device).as_strided((1, 1, 1, 1), (8, 8, 8, 1))
    return _Absent(ranks(dtype), ranks(torch.float32), stand_in(state), integer, stand_in(integer.view(torch.uint8)[:1]))


def _launch(
    d: Decision, a: DecodeArguments, o: Tensor, state: Tensor | None, final: Tensor | None, watch: Candidate | None = None
) -> None:
    """One kernel on the current stream. It reads and writes the caller's own memory, whatever the strides."""
    p, none, flags, device = d.problem, d.absent, d.flags, o.device
    q, k, v, decay, strength, bonus, A_log, dt_bias = a[:8]
    if not d.plain:

        def values(tensor: Tensor | None, dtype: torch.dtype | None) -> Any:
            return None if tensor is None else derived(watch, tensor, lambda x: _values(x, dtype))

        q, k, v = values(q, d.dtype), values(k, d.dtype), values(v, d.dtype)
        decay = values(decay, torch.float32 if flags & F["WIDE_GATE"] else None)
        strength = values(strength, torch.float32 if flags & F["WIDE_BETA"] else None)
        bonus, A_log, dt_bias = (values(x, torch.float32) for x in (bonus, A_log, dt_bias))
    g, beta, g_wide, beta_wide = none.rank[3], none.rank[2], none.wide[3], none.wide[2]
    if decay is not None:
        if decay.dim() == 3:  # one for all keys
            decay = decay.as_strided((p.B, p.T, p.HV, p.K), (*decay.stride(), 0))
        if flags & F["WIDE_GATE"]:
            g_wide = decay
        else:
            g = decay
    if strength is not None:
        if flags & F["WIDE_BETA"]:
            beta_wide = strength
        else:
            beta = strength
    if A_log is None or not flags & F["HAS_A_LOG"]:
        A_log = none.wide[0]
    if dt_bias is None or not flags & F["HAS_DT_BIAS"]:
        dt_bias = none.wide[1]
    elif dt_bias.dim() == 1:
        scalar = dt_bias.shape[0] != p.HV * p.K
        dt_bias = dt_bias.as_strided((p.HV, p.K), (dt_bias.stride(0), 0)) if scalar else dt_bias.reshape(p.HV, p.K)
    if bonus is None:
        bonus = none.wide[1]
    elif p.H != p.HV:
        bonus = bonus.unsqueeze(1).expand(p.H, p.HV // p.H, p.K).reshape(p.HV, p.K)
    offsets, indices = none.integer, none.integer
    if a.cu_seqlens is not None:
        offsets = derived(watch, a.cu_seqlens, lambda offsets: offsets.to(torch.int32).contiguous())
    if a.state_indices is not None:
        indices = derived(watch, a.state_indices, narrowed)
    starts, state_in, state_out = none.byte, none.state, none.state
    if state is not None:
        state_in, v_first = _pool("initial_state", state, a.state_v_first, may_copy=not a.inplace)
        flags |= F["V_FIRST_IN"] * v_first
        if a.has_initial_state is not None:
            starts = a.has_initial_state.view(torch.uint8)
    if final is not None and final is state:
        state_out = state_in
        flags |= F["STORE_STATE"] | F["V_FIRST_OUT"] * v_first
    elif final is not None:
        state_out, v_first = _pool("initial_state", final, a.state_v_first, may_copy=False)
        flags |= F["STORE_STATE"] | F["V_FIRST_OUT"] * v_first
    kernel = dispatcher.kernel(d.spec, p.arch, device, p.size)
    (kernel if watch is None else watch.of(kernel))(
        q, k, v, g, g_wide, beta, beta_wide, A_log, dt_bias, bonus, offsets, indices, starts, o, state_in, state_out,
        p.N, d.scale, d.lower_bound, flags, d.gate, d.beta, d.null_index,
    )  # fmt: skip


def _values(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Without a lazy negation, which a kernel cannot see."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)


def _pool(name: str, state: Tensor, v_first: bool, may_copy: bool) -> tuple[Tensor, bool]:
    """The states as the kernel takes them, [slots, HV, outer, inner] with a contiguous inner axis, and whether that is K."""
    if state.is_neg():
        state = state.resolve_neg()
    strides = state.stride()
    if strides[3] != 1 and strides[2] == 1:
        state, v_first = state.transpose(-1, -2), not v_first
        strides = state.stride()
    if strides[3] == 1 and (strides[0] | strides[1] | strides[2]) % 8 == 0 and state.data_ptr() % 16 == 0:
        return state, v_first
    # The kernel's launcher holds the strides of axes of size 1 to the same rule, though nothing is ever reached by them.
    kept = [8 if size == 1 else stride for size, stride in zip(state.shape, strides, strict=True)][:3]
    if strides[3] == 1 and list(strides[:3]) != kept:
        state = state.as_strided(state.shape, (*kept, 1))
    aligned = state.data_ptr() % 16 == 0 and all(stride * state.itemsize % 16 == 0 for stride in kept)
    if state.stride(-1) == 1 and aligned:
        return state, v_first
    if not may_copy:
        # A copy would be updated in its place, and the caller's states never move on.
        raise ValueError(
            f"{name} must have a contiguous K or V axis and its other strides and its start at multiples of 16 bytes to be "
            f"updated in place, got strides {list(state.stride())} of {dtype_name(state.dtype)} at address % 16 = "
            f"{state.data_ptr() % 16}"
        )
    return state.clone(memory_format=torch.contiguous_format), v_first


def _gathered(a: DecodeArguments, N: int) -> tuple[Tensor, Tensor]:
    """The N states that a call starts from, zero for null slots, and which slots are not null; no sync with a device."""
    state = a.initial_state
    assert state is not None
    rows = torch.arange(N, device=state.device) if a.state_indices is None else a.state_indices.long()
    live = (rows >= 0) & (rows < state.shape[0])
    if a.null_index is not None:
        live = live & (rows != a.null_index)
    starts = live if a.has_initial_state is None else live & (a.has_initial_state != 0)
    if state.shape[0] == 0:
        return state.new_zeros((N, *state.shape[1:])), live
    states = state.index_select(0, rows.clamp(0, state.shape[0] - 1))
    return torch.where(starts[:, None, None, None], states, 0), live


def _clear_slots(a: DecodeArguments) -> None:
    """What a call without tokens leaves in the slots of requests that start from nothing; no sync with a device."""
    pool, starts = a.initial_state, a.has_initial_state
    assert pool is not None and starts is not None
    rows = torch.arange(starts.numel(), device=pool.device) if a.state_indices is None else a.state_indices.long()
    cleared = (rows >= 0) & (rows < pool.shape[0]) & (starts == 0)
    if a.null_index is not None:
        cleared = cleared & (rows != a.null_index)
    mask = torch.zeros(pool.shape[0] + 1, dtype=torch.bool, device=pool.device)
    mask.index_fill_(0, torch.where(cleared, rows, pool.shape[0]), True)
    pool.detach().masked_fill_(mask[:-1, None, None, None], 0.0)


def _launch_widened(d: Decision, a: DecodeArguments, o: Tensor, state: Tensor | None, final: Tensor | None) -> None:
    """The cpu has kernels for float32 states only: narrow ones are copied out, and rounded back into the caller's memory."""
    N = d.problem.N
    gathered, live = _gathered(a, N)
    indices = torch.where(live, torch.arange(N, device=live.device), -1).to(torch.int32)
    wide = gathered.float()
    updated = torch.zeros_like(wide) if final is not None else None
    rows = a._replace(initial_state=wide, state_indices=indices, null_index=None, has_initial_state=None, inplace=False)
    flags = (d.flags | F["INDEXED_IN"]) & ~(F["INDEXED_OUT"] | F["LOAD_FLAGS"])
    _launch(replace(d, flags=flags, null_index=-1), rows, o, wide, updated)
    if final is None or updated is None:
        return
    slots = torch.arange(N, device=live.device) if a.state_indices is None or not a.inplace else a.state_indices.long()
    final.detach()[slots[live]] = updated[live].to(final.dtype)
