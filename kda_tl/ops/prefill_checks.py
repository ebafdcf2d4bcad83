"""From arguments to a checked problem. Nothing waits for a device, unless KDA_TL_CHECK=1 asks for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_tl.ops.arguments import TENSORS, Arguments, Op
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
from kda_tl.ops.offered import CHUNK_SIZES, DTYPES, MAX_HEAD_DIM_K, MAX_HEAD_DIM_V
from kda_tl.runtime import dispatcher
from kda_tl.specs.rules import Rule

__all__ = ["CHUNK_SIZE", "Problem", "check", "check_names", "check_on_device", "check_options", "check_types"]

CHUNK_SIZE = CHUNK_SIZES[0]


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of one call, checked. packed: cu_seqlens was given. dtype: of q, k and v."""

    rule: Rule
    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    packed: bool
    dtype: torch.dtype
    arch: str

    @property
    def slots(self) -> int:
        """Chunks of the workspace, an upper bound where the device alone knows the lengths (kernels/tiles/chunks.py)."""
        return self.T // CHUNK_SIZE + self.N if self.packed else self.B * self.chunks

    @property
    def chunks(self) -> int:
        """Chunks of a batch row: of a dense one's sequence, or of a pack at most."""
        return self.T // CHUNK_SIZE + self.N if self.packed else -(-self.T // CHUNK_SIZE)

    @property
    def kernel_dtype(self) -> torch.dtype:
        """Of q, k, v and o in the kernels. The cpu computes everything in float32."""
        return torch.float32 if self.arch == "cpu" else self.dtype


def check_types(op: Op, a: Arguments) -> None:
    """Tensors where tensors are needed. Raises TypeError."""
    for name in op.required:
        if not isinstance(getattr(a, name), Tensor):
            _refuse_type(op, a, name)
    for name in TENSORS[3:]:
        value = getattr(a, name)
        if value is not None and not isinstance(value, Tensor):
            _refuse_type(op, a, name)


def _refuse_type(op: Op, a: Arguments, name: str) -> None:
    raise TypeError(f"{op.called(name)} must be a torch.Tensor, got {type(getattr(a, name)).__name__}")


def check_names(op: Op, unknown: Collection[str], chunk_size: object) -> None:
    """What a public function takes and no kernel sees. unknown: names of arguments that it does not have."""
    if unknown:
        if "head_first" in unknown:
            raise TypeError(f"{op.name} has no argument 'head_first': inputs are [B, T, H, ...]")
        raise TypeError(f"{op.name} has no argument {min(unknown)!r}")
    if chunk_size is not None and (isinstance(chunk_size, bool) or chunk_size not in CHUNK_SIZES):
        raise ValueError(f"chunk_size must be {' or '.join(map(str, CHUNK_SIZES))}, got {chunk_size!r}")


def check_options(op: Op, a: Arguments) -> None:
    """Everything else that is no tensor."""
    if a.intracard_segments is not None:
        _check_segments(a.intracard_segments)
    check_number("scale", a.scale, "a number, or None for K ** -0.5")
    check_number("lower_bound", a.lower_bound, "a number < 0")
    if a.use_gate_in_kernel and a.lower_bound is not None and not -float("inf") < a.lower_bound < 0:
        raise ValueError(f"lower_bound must be finite and below 0 (a natural-log decay per token), got {a.lower_bound}")
    if a.use_gate_in_kernel and a.A_log is None and a.lower_bound is None:
        raise ValueError("use_gate_in_kernel needs A_log, lower_bound or both: with neither the gate has no scale")
    if a.allow_neg_eigval and not a.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    if a.state_indices is None:
        if a.null_index is not None:
            raise ValueError("null_index needs state_indices: it marks those that are padding")
        if a.has_initial_state is not None and a.initial_state is None:
            raise ValueError("has_initial_state needs initial_state")
    elif a.initial_state is None:
        raise ValueError("state_indices needs initial_state, the pool [slots, HV, K, V] that they point into")
    else:
        check_null_index(a.null_index)


def _check_segments(segments: object) -> None:
    if isinstance(segments, bool) or not isinstance(segments, (int, torch.SymInt)):
        raise TypeError(f"intracard_segments must be an int, or None for the plan's choice, got {type(segments).__name__}")
    if segments < 1:
        raise ValueError(f"intracard_segments must be at least 1 (a sequence in one piece), got {segments}")


def check(op: Op, a: Arguments, fake: bool = False) -> Problem:
    """Devices, dtypes and shapes. fake: the tensors have no values and may be of a device that is not there.

    Raises:
        TypeError: a dtype that is not in `kda_tl.ops.offered.DTYPES`.
        ValueError: any other wrong argument.
        UnsupportedDevice: no arch serves the device.
    """
    q, k, v = a.q, a.k, a.v
    device = q.device
    for name, tensor in zip(TENSORS, (*a[:12], a.state_indices)):
        if tensor is None:
            continue
        if tensor.device != device and name not in ("cu_seqlens", "cu_seqlens_cpu"):
            _refuse_device(op, a, name)
        if tensor.layout is not torch.strided or tensor.is_nested:
            check_dense(op.called(name), tensor)
        if tensor.dtype not in DTYPES[name]:
            check_dtype(op.called(name), tensor, DTYPES[name])
    arch = "" if fake else dispatcher.device_arch(device)
    if q.dim() != 4:
        raise ValueError(f"{op.called('q')} must have shape [B, T, H, K], got {list(q.shape)}")
    if v.dim() != 4:
        raise ValueError(f"v must have shape [B, T, HV, V], got {list(v.shape)}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        check_dtype("k", k, (q.dtype,))
        check_dtype("v", v, (q.dtype,))
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    if not 0 < K <= MAX_HEAD_DIM_K:
        raise ValueError(f"K, the last size of {op.called('q')}, must be from 1 to {MAX_HEAD_DIM_K}, got {K}")
    if not 0 < V <= MAX_HEAD_DIM_V:
        raise ValueError(f"V, the last size of v, must be from 1 to {MAX_HEAD_DIM_V}, got {V}")
    if k.shape != q.shape:
        check_shape("k", k, "[B, T, H, K]", (B, T, H, K))
    if v.shape[:2] != q.shape[:2]:
        check_shape("v", v, "[B, T, HV, V]", (B, T, HV, V))
    if H == 0 or HV == 0 or HV % H:
        raise ValueError(
            f"HV, the heads of v, must be a positive multiple of H, the heads of {op.called('q')}: got HV = {HV}, H = {H}"
        )
    if a.g is not None:
        per_key = op.rule.decay == "per_key"
        layout, shape = ("[B, T, HV, K]", (B, T, HV, K)) if per_key else ("[B, T, HV]", (B, T, HV))
        if a.g.shape != shape:
            check_shape(op.called("g"), a.g, layout, shape)
    if a.beta is not None and a.beta.shape != (B, T, HV):
        check_shape("beta", a.beta, "[B, T, HV]", (B, T, HV))
    if a.bonus is not None and a.bonus.shape != (H, K):
        check_shape(op.called("bonus"), a.bonus, "[H, K]", (H, K))
    if a.use_gate_in_kernel:
        _check_gate(op, a, HV, K)
    if a.cu_seqlens is not None:
        check_cu_seqlens(a.cu_seqlens, a.cu_seqlens_cpu, B, T, device, values=not fake)
    elif a.cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu needs cu_seqlens, the same values on the device of q")
    N = B if a.cu_seqlens is None else a.cu_seqlens.numel() - 1
    if a.initial_state is not None:
        _check_state(a, a.initial_state, N, HV, K, V)
    return Problem(op.rule, B, T, N, H, HV, K, V, a.cu_seqlens is not None, q.dtype, arch)


def _refuse_device(op: Op, a: Arguments, wrong: str) -> None:
    main = ("q", "k", "v", "g", "beta", "bonus", "initial_state")
    if wrong in main:
        check_tensors(**{op.called(name): getattr(a, name) for name in main if getattr(a, name) is not None})
    raise ValueError(f"{op.called(wrong)} must be on {a.q.device} like {op.called('q')}, got {getattr(a, wrong).device}")


def _check_gate(op: Op, a: Arguments, HV: int, K: int) -> None:
    if a.A_log is not None and a.A_log.shape != (HV,):
        check_shape("A_log", a.A_log, "[HV]", (HV,))
    if a.dt_bias is None:
        return
    if op.rule.decay == "scalar":
        check_shape("dt_bias", a.dt_bias, "[HV]", (HV,))
    elif a.dt_bias.shape not in ((HV * K,), (HV, K)):
        raise ValueError(f"dt_bias must have shape [HV * K] = {[HV * K]} or [HV, K] = {[HV, K]}, got {list(a.dt_bias.shape)}")


def _check_state(a: Arguments, state: Tensor, N: int, HV: int, K: int, V: int) -> None:
    matrix, sizes = ("HV, V, K", (HV, V, K)) if a.state_v_first else ("HV, K, V", (HV, K, V))
    if a.state_indices is None:
        if state.shape != (N, *sizes):
            check_shape("initial_state", state, f"[N, {matrix}]", (N, *sizes))
    else:
        if state.dim() != 4 or state.shape[1:] != sizes:
            raise ValueError(
                f"initial_state must have shape [slots, {matrix}] = [slots, {', '.join(map(str, sizes))}] where state_indices "
                f"is given, got {list(state.shape)}"
            )
        check_shape("state_indices", a.state_indices, "[N]", (N,))
        check_written("initial_state", state, negated=True)
    if a.has_initial_state is not None:
        check_shape("has_initial_state", a.has_initial_state, "[N]", (N,))


def check_on_device(op: Op, a: Arguments, problem: Problem) -> None:
    """The values that a device alone knows, where KDA_TL_CHECK=1: waits for it, so not while a CUDA graph is captured.

    Raises ValueError for a decay above 0, wrong offsets, or a slot that is named twice. Padding may hold any decays.
    """
    if not checks_values(a.q):
        return
    live = None
    if a.state_indices is not None and a.initial_state is not None:
        live = live_rows(a.state_indices, a.initial_state.shape[0], a.null_index)
    offsets = None
    if a.cu_seqlens is not None:
        offsets = a.cu_seqlens.cpu()
        check_cu_seqlens(offsets, a.cu_seqlens_cpu, problem.B, problem.T, offsets.device)
    if a.g is not None and not a.use_gate_in_kernel:
        check_decays(op.called("g"), a.g, offsets, live)
