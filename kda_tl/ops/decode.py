"""Dense recurrent decode, what its public ops share: check the call, plan it, launch one kernel.

Every rule of the family is the same kernel with other run-time flags (`kda_tl.kernels.recurrent_decode`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_tl.ops.checks import (
    check_cu_seqlens,
    check_decay,
    check_dense,
    check_dtype,
    check_null_index,
    check_number,
    check_shape,
    check_tensors,
    check_untraced,
    check_written,
    checks_values,
    mark_written,
    narrowed,
)
from kda_tl.ops.plan import Launch, Plan
from kda_tl.runtime import dispatcher
from kda_tl.specs.decode import DecodeFlag, RecurrentDecodeSpec, decode_specs
from kda_tl.specs.gates import BetaForm, GateForm, gate_form
from kda_tl.specs.sizes import problem_size

__all__ = ["DecodeCall", "bind", "plan", "refuse_unknown", "run"]

F = {flag.name: int(flag) for flag in DecodeFlag}  # plain numbers: an IntFlag takes a microsecond to combine
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAIN = (Tensor, torch.nn.Parameter)
V_MULTIPLE = 8
LARGEST_V = 1024


@dataclass
class DecodeCall:
    """The arguments of one call, by the names that its caller knows; g_axes: "" for no decay, "h" scalar, "hk" per key."""

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    g_axes: str = ""
    beta: Tensor | None = None
    bonus: Tensor | None = None
    delta: bool = True
    read_first: bool = False
    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    lower_bound: float | None = None
    state_v_first: bool = False
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    state_indices: Tensor | None = None
    null_index: int | None = None
    has_initial_state: Tensor | None = None
    inplace: bool = False
    q_name: str = "q"
    g_name: str = "g"
    bonus_name: str = "u"


@dataclass(frozen=True)
class _Problem:
    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    arch: str
    spec: RecurrentDecodeSpec
    gate_form: GateForm
    beta_form: BetaForm


def run(c: DecodeCall) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in the dtype of v, and the final state: the pool itself where `inplace`, else a new one, or None."""
    if torch.compiler.is_compiling():
        # Not registered with torch: a compiled function breaks its graph here, and traces nothing that is cached or launched.
        untraced: Callable[[DecodeCall], tuple[Tensor, Tensor | None]] = torch.compiler.disable(run)
        return untraced(c)
    p = _check(c)
    final = _final_state(c, p)
    o = torch.empty((p.B, p.T, p.HV, p.V), dtype=_torch_dtype(p.spec.dtype), device=c.v.device)
    if p.N == 0 or p.T == 0:
        if c.inplace and c.has_initial_state is not None and p.N:
            _clear_slots(c)
        elif final is not None and c.initial_state is not None and not c.inplace:
            final.copy_(_gathered(c, p.N)[0])
        return o.zero_().to(c.v.dtype), final
    with torch.no_grad(), torch.cuda.device(c.q.device) if c.q.device.type == "cuda" else nullcontext():
        if c.initial_state is not None and _name(c.initial_state.dtype) != p.spec.state_dtype:
            _launch_widened(c, p, o, c.initial_state, final)
        else:
            _launch(c, p, o, c.initial_state, final)
    if c.inplace and final is not None:
        mark_written(final)
    return o.to(c.v.dtype), final


def plan(c: DecodeCall) -> Plan:
    """What `run` will launch; raises what it would raise for types, sizes and names."""
    p = _check(c)
    sizes = {"N": p.N, "T": p.T, "H": p.H, "HV": p.HV, "K": p.K, "V": p.V, "gate": p.gate_form.name.lower()}
    return Plan(
        op=c.op,
        problem={**sizes, "dtype": p.spec.dtype, "state": p.spec.state_dtype},
        arch=p.arch,
        launches=(Launch(p.spec, f"{p.N + (c.cu_seqlens is not None)} requests x {p.HV} heads x V tiles", _size(p)),),
        workspace_bytes=0,
    )


# -- checks --------------------------------------------------------------------------------------------------------------


def _check(c: DecodeCall) -> _Problem:
    offsets = {"cu_seqlens": c.cu_seqlens, "cu_seqlens_cpu": c.cu_seqlens_cpu}
    check_untraced(**{c.q_name: c.q}, k=c.k, v=c.v, initial_state=c.initial_state, **offsets)
    check_tensors(**{c.q_name: c.q}, k=c.k, v=c.v)
    q, k, v, device = c.q, c.k, c.v, c.q.device
    arch = dispatcher.device_arch(device)
    if q.dim() != 4:
        raise ValueError(f"{c.q_name} must have shape [B, T, H, K], got {list(q.shape)}")
    if v.dim() != 4:
        raise ValueError(f"v must have shape [B, T, HV, V], got {list(v.shape)}")
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    check_dtype(c.q_name, q, FLOAT_DTYPES)
    check_dtype("k", k, (q.dtype,))
    check_dtype("v", v, (q.dtype,))
    check_shape("k", k, "[B, T, H, K]", (B, T, H, K))
    check_shape("v", v, "[B, T, HV, V]", (B, T, HV, V))
    if H == 0 or HV == 0 or HV % H:
        raise ValueError(
            f"HV, the heads of v, must be a positive multiple of H, the heads of {c.q_name}: got HV = {HV}, H = {H}"
        )
    if V == 0 or V % V_MULTIPLE or V > LARGEST_V:
        raise ValueError(f"V, the last size of v, must be a multiple of {V_MULTIPLE} up to {LARGEST_V}, got {V}")
    if c.cu_seqlens is not None:
        check_cu_seqlens(c.cu_seqlens, c.cu_seqlens_cpu, B, T, device)
    elif c.cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu needs cu_seqlens, the same values on the device of q")
    N = B if c.cu_seqlens is None else c.cu_seqlens.numel() - 1
    check_number("scale", c.scale, "a number, or None for K ** -0.5")
    if c.g_axes:
        _check_gate(c, B, T, HV, K, device)
    if c.beta is not None:
        _check_optional("beta", c.beta, device, FLOAT_DTYPES, "[B, T, HV]", [(B, T, HV)])
    elif c.use_beta_sigmoid_in_kernel:
        raise ValueError("use_beta_sigmoid_in_kernel=True needs beta")
    if c.allow_neg_eigval and not c.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    if c.read_first:
        _check_optional(c.bonus_name, c.bonus, device, FLOAT_DTYPES, "[HV, K]", [(HV, K)])
    _check_states(c, N, HV, K, V, device)
    _refuse_gradients(c)
    if checks_values(q):
        _check_values(c, T)
    state_dtype = c.initial_state.dtype if c.initial_state is not None else torch.float32
    spec = _spec(arch, c.q_name, K, q.dtype, state_dtype)
    strength = BetaForm.TWICE_SIGMOID if c.allow_neg_eigval else BetaForm.SIGMOID
    return _Problem(
        B, T, N, H, HV, K, V, arch, spec,
        gate_form(c.use_gate_in_kernel, c.A_log is not None, c.lower_bound),
        strength if c.use_beta_sigmoid_in_kernel else BetaForm.IDENTITY,
    )  # fmt: skip


def _check_gate(c: DecodeCall, B: int, T: int, HV: int, K: int, device: torch.device) -> None:
    per_key = c.g_axes == "hk"
    layout, shape = ("[B, T, HV, K]", (B, T, HV, K)) if per_key else ("[B, T, HV]", (B, T, HV))
    if c.g is None:
        raise TypeError(f"{c.g_name} must be a torch.Tensor {layout}, got None")
    _check_optional(c.g_name, c.g, device, FLOAT_DTYPES, layout, [shape])
    check_number("lower_bound", c.lower_bound, "a number < 0")
    if not c.use_gate_in_kernel:
        return
    if c.lower_bound is not None and not -float("inf") < c.lower_bound < 0:
        raise ValueError(f"lower_bound must be finite and below 0 (a natural-log decay per token), got {c.lower_bound}")
    if c.A_log is not None:
        _check_optional("A_log", c.A_log, device, FLOAT_DTYPES, "[HV]", [(HV,)])
    if c.dt_bias is not None:
        shapes: list[tuple[int, ...]] = [(HV * K,), (HV, K)] if per_key else [(HV,)]
        layout = "[HV * K] or [HV, K]" if per_key else "[HV]"
        _check_optional("dt_bias", c.dt_bias, device, FLOAT_DTYPES, layout, shapes)


def _check_optional(
    name: str, tensor: object, device: torch.device, dtypes: tuple[torch.dtype, ...], layout: str, shapes: list[tuple[int, ...]]
) -> None:
    if type(tensor) not in PLAIN:
        check_untraced(**{name: tensor})
        check_tensors(**{name: tensor})
    assert isinstance(tensor, Tensor)
    check_dense(name, tensor)
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {tensor.device}")
    check_dtype(name, tensor, dtypes)
    if tuple(tensor.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {layout} = {allowed}, got {list(tensor.shape)}")


def _check_states(c: DecodeCall, N: int, HV: int, K: int, V: int, device: torch.device) -> None:
    if c.inplace and c.initial_state is None:
        raise ValueError("inplace=True needs initial_state, the states that are updated")
    if c.state_indices is not None:
        if c.initial_state is None:
            raise ValueError("state_indices needs initial_state, the pool whose slots they name")
        _check_optional("state_indices", c.state_indices, device, (torch.int32, torch.int64), "[N]", [(N,)])
    if c.null_index is not None:
        if c.state_indices is None:
            raise ValueError("null_index needs state_indices")
        check_null_index(c.null_index)
    if c.has_initial_state is not None:
        if c.initial_state is None:
            raise ValueError("has_initial_state needs initial_state")
        _check_optional("has_initial_state", c.has_initial_state, device, (torch.bool, torch.uint8), "[N]", [(N,)])
    if c.initial_state is None:
        return
    check_tensors(initial_state=c.initial_state)
    slots = N
    if c.state_indices is not None and c.initial_state.dim() == 4:
        slots = c.initial_state.shape[0]
    leading = "N" if c.state_indices is None else "slots"
    layout, shape = ("HV, V, K", (slots, HV, V, K)) if c.state_v_first else ("HV, K, V", (slots, HV, K, V))
    _check_optional("initial_state", c.initial_state, device, FLOAT_DTYPES, f"[{leading}, {layout}]", [shape])
    if c.inplace:
        check_written("initial_state", c.initial_state)


def _check_values(c: DecodeCall, T: int) -> None:
    """What a device alone knows. A slot that is out of range is a null slot, so only names given twice are wrong."""
    last = T
    if c.cu_seqlens is not None:
        offsets = c.cu_seqlens.cpu()
        check_cu_seqlens(offsets, c.cu_seqlens_cpu, 1, T, offsets.device)
        last = int(offsets[-1])
    live: list[int] | slice = slice(None)
    if c.state_indices is not None and c.initial_state is not None:
        slots, named = range(c.initial_state.shape[0]), c.state_indices.tolist()
        live = [row for row, slot in enumerate(named) if slot in slots and slot != c.null_index]
        if len({named[row] for row in live}) != len(live):
            raise ValueError(f"state_indices must not name a slot twice, got {[named[row] for row in live]}")
    if c.g is not None and c.g_axes and not c.use_gate_in_kernel:
        check_decay(c.g_name, c.g[live] if c.cu_seqlens is None else c.g[:, :last])


@functools.lru_cache(maxsize=256)
def _spec(arch: str, q_name: str, K: int, dtype: torch.dtype, state_dtype: torch.dtype) -> RecurrentDecodeSpec:
    """The shipped spec that serves the call: narrow activations as they are where one takes them, else in float32."""
    state = "float32" if arch == "cpu" else _name(state_dtype)
    wanted = [("float32", state)] if arch == "cpu" else [(_name(dtype), state), ("float32", state)]
    shipped = [s for s in decode_specs(arch) if isinstance(s, RecurrentDecodeSpec)]
    for pair in wanted:
        for spec in shipped:
            if spec.head_dim_k == K and (spec.dtype, spec.state_dtype) == pair:
                return spec
    sizes = sorted({s.head_dim_k for s in shipped})
    if K not in sizes:
        raise ValueError(f"K, the last size of {q_name}, must be {' or '.join(map(str, sizes))}, got {K}")
    served = ", ".join(f"{s.dtype} with {s.state_dtype} states" for s in shipped if s.head_dim_k == K)
    raise TypeError(
        f"{q_name} must have a dtype that is served together with that of initial_state: for K = {K}, {served}; "
        f"got {_name(dtype)} with {_name(state_dtype)} states"
    )


def _refuse_gradients(c: DecodeCall) -> None:
    """Neither mode of differentiation may lose an input in silence."""
    names = {c.q_name: c.q, "k": c.k, "v": c.v, c.g_name: c.g, "beta": c.beta, c.bonus_name: c.bonus, "A_log": c.A_log,
             "dt_bias": c.dt_bias, "initial_state": c.initial_state}  # fmt: skip
    grad_mode, forward_mode = torch.is_grad_enabled(), forward_ad._current_level >= 0
    for name, tensor in names.items():
        if tensor is None:
            continue
        if (grad_mode and tensor.requires_grad) or (forward_mode and forward_ad.unpack_dual(tensor).tangent is not None):
            raise NotImplementedError(
                f"{name} requires a gradient and {c.op} has no backward: call it under torch.no_grad(), or detach {name}"
            )


# -- launch --------------------------------------------------------------------------------------------------------------


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _final_state(c: DecodeCall, p: _Problem) -> Tensor | None:
    if c.inplace:
        return c.initial_state
    if not c.output_final_state:
        return None
    shape = (p.N, p.HV, p.V, p.K) if c.state_v_first else (p.N, p.HV, p.K, p.V)
    dtype = c.initial_state.dtype if c.initial_state is not None else torch.float32
    # A null slot leaves its row as it is, and so does a call without tokens.
    zeroed = c.state_indices is not None or p.T == 0
    return (torch.zeros if zeroed else torch.empty)(shape, dtype=dtype, device=c.v.device)


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
        return tuple(one.view((1,) * rank) for rank in range(1, 5))

    integer = torch.empty(1, dtype=torch.int32, device=device)
    state = torch.empty(8, dtype=state_dtype, device=device).as_strided((1, 1, 1, 1), (8, 8, 8, 1))
    return _Absent(ranks(dtype), ranks(torch.float32), state, integer, integer.view(torch.uint8)[:1])


def _size(p: _Problem) -> int:
    return problem_size("recurrent_decode", p.N, p.HV)


def _launch(c: DecodeCall, p: _Problem, o: Tensor, state: Tensor | None, final: Tensor | None) -> None:
    """One kernel on the current stream. It reads and writes the caller's own memory, whatever the strides."""
    dtype, device = _torch_dtype(p.spec.dtype), c.q.device
    none = _absent(device, dtype, _torch_dtype(p.spec.state_dtype))
    q, k, v = _values(c.q, dtype), _values(c.k, dtype), _values(c.v, dtype)
    flags = F["UNIFORM"] * (c.cu_seqlens is None) | F["DELTA"] * c.delta | F["READ_FIRST"] * c.read_first
    flags |= F["L2NORM"] * bool(c.use_qk_l2norm_in_kernel)
    g, beta, g_wide, beta_wide = none.rank[3], none.rank[2], none.wide[3], none.wide[2]
    A_log, dt_bias, bonus = none.wide[0], none.wide[1], none.wide[1]
    if c.g is not None and c.g_axes:
        flags |= F["DECAY"]
        decay = _values(c.g) if c.g_axes == "hk" else _values(c.g).unsqueeze(-1).expand(p.B, p.T, p.HV, p.K)
        if decay.dtype == dtype and dtype != torch.float32:
            g = decay
        else:
            flags, g_wide = flags | F["WIDE_GATE"], decay.to(torch.float32)
        if p.gate_form in (GateForm.SOFTPLUS, GateForm.BOUNDED) and c.A_log is not None:
            flags, A_log = flags | F["HAS_A_LOG"], _values(c.A_log, torch.float32)
        if p.gate_form != GateForm.IDENTITY and c.dt_bias is not None:
            flags, bias = flags | F["HAS_DT_BIAS"], _values(c.dt_bias, torch.float32)
            dt_bias = bias.unsqueeze(-1).expand(p.HV, p.K) if c.g_axes == "h" else bias.reshape(p.HV, p.K)
    if c.beta is not None:
        flags |= F["HAS_BETA"]
        if c.beta.dtype == dtype and dtype != torch.float32:
            beta = _values(c.beta)
        else:
            flags, beta_wide = flags | F["WIDE_BETA"], _values(c.beta, torch.float32)
    if c.bonus is not None:
        bonus = _values(c.bonus, torch.float32)
    offsets = none.integer if c.cu_seqlens is None else c.cu_seqlens.to(torch.int32).contiguous()
    indices, starts, state_in, state_out = none.integer, none.byte, none.state, none.state
    if c.state_indices is not None:
        indices = narrowed(c.state_indices)
        flags |= F["INDEXED_IN"] | F["INDEXED_OUT"] * bool(c.inplace)
    if state is not None:
        state_in, v_first = _pool("initial_state", _values(state), c.state_v_first, may_copy=not c.inplace)
        flags |= F["LOAD_STATE"] | F["V_FIRST_IN"] * v_first
        if c.has_initial_state is not None:
            flags, starts = flags | F["LOAD_FLAGS"], c.has_initial_state.view(torch.uint8)
    if final is not None:
        state_out, v_first = _pool("initial_state", _values(final), c.state_v_first, may_copy=False)
        flags |= F["STORE_STATE"] | F["V_FIRST_OUT"] * v_first
    dispatcher.kernel(p.spec, p.arch, device, _size(p))(
        q, k, v, g, g_wide, beta, beta_wide, A_log, dt_bias, bonus, offsets, indices, starts, o, state_in, state_out,
        p.N, p.K**-0.5 if c.scale is None else float(c.scale), 0.0 if c.lower_bound is None else float(c.lower_bound),
        flags, int(p.gate_form), int(p.beta_form), -1 if c.null_index is None else c.null_index,
    )  # fmt: skip


def _values(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Without what only autograd and lazy negation know of, which a kernel cannot read."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)


def _pool(name: str, state: Tensor, v_first: bool, may_copy: bool) -> tuple[Tensor, bool]:
    """The states as the kernel takes them, [slots, HV, outer, inner] with a contiguous inner axis, and whether that is K."""
    if state.stride(-1) != 1 and state.stride(-2) == 1:
        state, v_first = state.transpose(-1, -2), not v_first
    # The kernel's launcher holds the strides of axes of size 1 to the same rule, though nothing is ever reached by them.
    strides = [8 if size == 1 else stride for size, stride in zip(state.shape, state.stride(), strict=True)][:3]
    if state.stride(-1) == 1 and list(state.stride()[:3]) != strides:
        state = state.as_strided(state.shape, (*strides, 1))
    aligned = state.data_ptr() % 16 == 0 and all(stride * state.itemsize % 16 == 0 for stride in strides)
    if state.stride(-1) == 1 and aligned:
        return state, v_first
    if not may_copy:
        # A copy would be updated in its place, and the caller's states never move on.
        raise ValueError(
            f"{name} must have a contiguous K or V axis and its other strides and its start at multiples of 16 bytes to be "
            f"updated in place, got strides {list(state.stride())} of {_name(state.dtype)} at address % 16 = "
            f"{state.data_ptr() % 16}"
        )
    return state.clone(memory_format=torch.contiguous_format), v_first


def _gathered(c: DecodeCall, N: int) -> tuple[Tensor, Tensor]:
    """The N states that a call starts from, zero for null slots, and which slots are not null; no sync with a device."""
    state = c.initial_state
    assert state is not None
    rows = torch.arange(N, device=state.device) if c.state_indices is None else c.state_indices.long()
    live = (rows >= 0) & (rows < state.shape[0])
    if c.null_index is not None:
        live = live & (rows != c.null_index)
    starts = live if c.has_initial_state is None else live & (c.has_initial_state != 0)
    if state.shape[0] == 0:
        return state.new_zeros((N, *state.shape[1:])), live
    states = state.index_select(0, rows.clamp(0, state.shape[0] - 1))
    return torch.where(starts[:, None, None, None], states, 0), live


def _clear_slots(c: DecodeCall) -> None:
    """What a call without tokens leaves in the slots of requests that start from nothing; no sync with a device."""
    pool, starts = c.initial_state, c.has_initial_state
    assert pool is not None and starts is not None
    rows = torch.arange(starts.numel(), device=pool.device) if c.state_indices is None else c.state_indices.long()
    cleared = (rows >= 0) & (rows < pool.shape[0]) & (starts == 0)
    if c.null_index is not None:
        cleared = cleared & (rows != c.null_index)
    mask = torch.zeros(pool.shape[0] + 1, dtype=torch.bool, device=pool.device)
    mask.index_fill_(0, torch.where(cleared, rows, pool.shape[0]), True)
    pool.detach().masked_fill_(mask[:-1, None, None, None], 0.0)


def _launch_widened(c: DecodeCall, p: _Problem, o: Tensor, state: Tensor, final: Tensor | None) -> None:
    """The cpu has kernels for float32 states only: narrow ones are copied out, and rounded back into the caller's memory."""
    gathered, live = _gathered(c, p.N)
    indices = torch.where(live, torch.arange(p.N), -1).to(torch.int32)
    wide = gathered.float()
    updated = torch.zeros_like(wide) if final is not None else None
    rows = replace(c, initial_state=wide, state_indices=indices, null_index=None, has_initial_state=None, inplace=False)
    _launch(rows, p, o, wide, updated)
    if final is None or updated is None:
        return
    slots = torch.arange(p.N) if c.state_indices is None or not c.inplace else c.state_indices.long()
    final[slots[live]] = updated[live].to(final.dtype)


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return dict(call.arguments)


def refuse_unknown(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Takes `kwargs` out of an op's arguments; what flash-linear-attention takes there and changes nothing may pass."""
    unknown = arguments.pop("kwargs").keys() - {"safe_gate"}
    if unknown:
        raise TypeError(f"{op} has no argument {min(unknown)!r}")
    return arguments
