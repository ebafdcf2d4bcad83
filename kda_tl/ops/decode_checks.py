"""From the arguments of a dense decode call to a checked problem. Nothing waits for a device, unless KDA_TL_CHECK=1 asks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kda_tl.ops.arguments import Op
from kda_tl.ops.checks import (
    check_cu_seqlens,
    check_decays,
    check_dense,
    check_dtype,
    check_null_index,
    check_number,
    check_shape,
    check_tensors,
    check_written,
    checks_values,
    live_rows,
)
from kda_tl.runtime import dispatcher
from kda_tl.specs.decode import RecurrentDecodeSpec, decode_specs
from kda_tl.specs.gates import GateForm, gate_form
from kda_tl.specs.sizes import problem_size

__all__ = ["FLOAT_DTYPES", "DecodeArguments", "DecodeProblem", "check", "check_options", "dtype_name"]

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
V_MULTIPLE = 8
LARGEST_V = 1024
GATED = {"recurrent_gdn"}  # ops whose g may be left out, for no decay


class DecodeArguments(NamedTuple):
    """The arguments of a call in the order of the registered op's schema; shapes and dtypes as in `recurrent_kda`.

    bonus: [H, K], of the current token, where the rule reads first. inplace comes last: it is no argument of a registered op,
    but which of the two is called.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    bonus: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    has_initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    state_indices: Tensor | None = None
    null_index: int | None = None
    scale: float | None = None
    lower_bound: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    output_final_state: bool = False
    inplace: bool = False


TENSORS = DecodeArguments._fields[: DecodeArguments._fields.index("null_index")]


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """The sizes of one call, checked. spec: None for fake tensors, which no kernel will see."""

    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    arch: str
    spec: RecurrentDecodeSpec | None
    gate: GateForm

    @property
    def size(self) -> int:
        """It picks the artifact (`kda_tl.specs.sizes`)."""
        return problem_size("recurrent_decode", self.N, self.HV)


def check_options(op: Op, a: DecodeArguments) -> None:
    """Everything that is no tensor, and tensors where tensors are needed."""
    for name in ("q", "k", "v"):
        if not isinstance(getattr(a, name), Tensor):
            check_tensors(**{op.called(name): getattr(a, name)})
    for name in TENSORS[3:]:
        value = getattr(a, name)
        if value is not None and not isinstance(value, Tensor):
            check_tensors(**{op.called(name): value})
    per_key = op.rule.decay == "per_key"
    if a.g is None and op.rule.decay != "none" and op.name not in GATED:
        layout = "[B, T, HV, K]" if per_key else "[B, T, HV]"
        raise TypeError(f"{op.called('g')} must be a torch.Tensor {layout}, got None")
    if a.g is None and a.use_gate_in_kernel:
        raise ValueError(f"use_gate_in_kernel=True needs {op.called('g')}")
    if op.rule.read_first and a.bonus is None:
        raise TypeError(f"{op.called('bonus')} must be a torch.Tensor, got NoneType")
    check_number("scale", a.scale, "a number, or None for K ** -0.5")
    check_number("lower_bound", a.lower_bound, "a number < 0")
    if a.use_gate_in_kernel and a.lower_bound is not None and not -float("inf") < a.lower_bound < 0:
        raise ValueError(f"lower_bound must be finite and below 0 (a natural-log decay per token), got {a.lower_bound}")
    gate_form(a.use_gate_in_kernel, a.A_log is not None, a.lower_bound)
    if a.beta is None and a.use_beta_sigmoid_in_kernel:
        raise ValueError("use_beta_sigmoid_in_kernel=True needs beta")
    if a.allow_neg_eigval and not a.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    if a.cu_seqlens is None and a.cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu needs cu_seqlens, the same values on the device of q")
    if a.initial_state is None:
        if a.inplace:
            raise ValueError("inplace=True needs initial_state, the states that are updated")
        if a.state_indices is not None:
            raise ValueError("state_indices needs initial_state, the pool whose slots they name")
        if a.has_initial_state is not None:
            raise ValueError("has_initial_state needs initial_state")
    if a.null_index is not None:
        if a.state_indices is None:
            raise ValueError("null_index needs state_indices")
        check_null_index(a.null_index)


def check(op: Op, a: DecodeArguments, fake: bool = False) -> DecodeProblem:
    """Devices, dtypes and shapes. fake: the tensors have no values and may be of a device that is not there.

    Raises:
        TypeError, ValueError: a wrong argument.
        UnsupportedDevice: no arch serves the device.
    """
    q, k, v, device, q_name = a.q, a.k, a.v, a.q.device, op.called("q")
    check_tensors(**{q_name: q}, k=k, v=v)
    arch = "" if fake else dispatcher.device_arch(device)
    if q.dim() != 4:
        raise ValueError(f"{q_name} must have shape [B, T, H, K], got {list(q.shape)}")
    if v.dim() != 4:
        raise ValueError(f"v must have shape [B, T, HV, V], got {list(v.shape)}")
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    check_dtype(q_name, q, FLOAT_DTYPES)
    check_dtype("k", k, (q.dtype,))
    check_dtype("v", v, (q.dtype,))
    check_shape("k", k, "[B, T, H, K]", (B, T, H, K))
    check_shape("v", v, "[B, T, HV, V]", (B, T, HV, V))
    if H == 0 or HV == 0 or HV % H:
        raise ValueError(f"HV, the heads of v, must be a positive multiple of H, the heads of {q_name}: got HV = {HV}, H = {H}")
    if V == 0 or V % V_MULTIPLE or V > LARGEST_V:
        raise ValueError(f"V, the last size of v, must be a multiple of {V_MULTIPLE} up to {LARGEST_V}, got {V}")
    if a.cu_seqlens is not None:
        check_cu_seqlens(a.cu_seqlens, a.cu_seqlens_cpu, B, T, device, values=not fake)
    N = B if a.cu_seqlens is None else a.cu_seqlens.numel() - 1

    def optional(name: str, dtypes: tuple[torch.dtype, ...], layout: str, *shapes: tuple[int, ...]) -> None:
        tensor = getattr(a, name)
        if tensor is not None:
            _check_optional(op.called(name), tensor, device, dtypes, layout, shapes)

    per_key = op.rule.decay == "per_key"
    optional("g", FLOAT_DTYPES, *(("[B, T, HV, K]", (B, T, HV, K)) if per_key else ("[B, T, HV]", (B, T, HV))))
    if a.use_gate_in_kernel:
        optional("A_log", FLOAT_DTYPES, "[HV]", (HV,))
        if per_key:
            optional("dt_bias", FLOAT_DTYPES, "[HV * K] or [HV, K]", (HV * K,), (HV, K))
        else:
            optional("dt_bias", FLOAT_DTYPES, "[HV]", (HV,))
    optional("beta", FLOAT_DTYPES, "[B, T, HV]", (B, T, HV))
    optional("bonus", FLOAT_DTYPES, "[H, K]", (H, K))
    optional("state_indices", (torch.int32, torch.int64), "[N]", (N,))
    optional("has_initial_state", (torch.bool, torch.uint8), "[N]", (N,))
    state = a.initial_state
    if state is not None:
        check_dense("initial_state", state)
        slots = state.shape[0] if a.state_indices is not None and state.dim() == 4 else N
        leading = "N" if a.state_indices is None else "slots"
        layout, shape = ("HV, V, K", (slots, HV, V, K)) if a.state_v_first else ("HV, K, V", (slots, HV, K, V))
        optional("initial_state", FLOAT_DTYPES, f"[{leading}, {layout}]", shape)
        if a.inplace:
            check_written("initial_state", state)
    spec = None if fake else _spec(arch, q_name, K, q.dtype, torch.float32 if state is None else state.dtype)
    if not fake and checks_values(q):
        _check_values(op, a, T)
    return DecodeProblem(B, T, N, H, HV, K, V, arch, spec, gate_form(a.use_gate_in_kernel, a.A_log is not None, a.lower_bound))


def _check_optional(
    name: str, tensor: Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...], layout: str,
    shapes: tuple[tuple[int, ...], ...],
) -> None:  # fmt: skip
    check_dense(name, tensor)
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {tensor.device}")
    check_dtype(name, tensor, dtypes)
    if tensor.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {layout} = {allowed}, got {list(tensor.shape)}")


def _check_values(op: Op, a: DecodeArguments, T: int) -> None:
    """What a device alone knows. A slot that is out of range is a null slot, so only names given twice are wrong."""
    live = None
    if a.state_indices is not None and a.initial_state is not None:
        live = live_rows(a.state_indices, a.initial_state.shape[0], a.null_index)
    offsets = None
    if a.cu_seqlens is not None:
        offsets = a.cu_seqlens.cpu()
        check_cu_seqlens(offsets, a.cu_seqlens_cpu, 1, T, offsets.device)
    if a.g is not None and not a.use_gate_in_kernel:
        check_decays(op.called("g"), a.g, offsets, live)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=256)
def _spec(arch: str, q_name: str, K: int, dtype: torch.dtype, state_dtype: torch.dtype) -> RecurrentDecodeSpec:
    """The shipped spec that serves the call: narrow activations as they are where one takes them, else in float32."""
    name, state = dtype_name(dtype), "float32" if arch == "cpu" else dtype_name(state_dtype)
    wanted = [("float32", state)] if arch == "cpu" else [(name, state), ("float32", state)]
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
        f"got {name} with {dtype_name(state_dtype)} states"
    )
