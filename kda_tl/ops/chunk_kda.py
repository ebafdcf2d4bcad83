"""chunk_kda: Kimi Delta Attention over whole sequences, on the lean plan (chunk_wy, then chunk_scan)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_tl.ops.checks import check_cu_seqlens, check_dtype, check_shape, check_tensors
from kda_tl.ops.context import local_sequences, takes_context
from kda_tl.ops.plan import Launch, Plan
from kda_tl.reference import beta_sigmoid, kda_gate, l2norm
from kda_tl.runtime import dispatcher
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec

__all__ = ["CHUNK_SIZE", "HEAD_DIM", "Problem", "chunk_kda", "plan_chunk_kda", "plan_problem"]

CHUNK_SIZE = 64
HEAD_DIM = 128
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Problem:
    """The sizes of one call, checked. packed: cu_seqlens was given."""

    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    packed: bool
    arch: str

    @property
    def slots(self) -> int:
        """Chunks of the workspace, an upper bound where the device alone knows the lengths (kernels/tiles/chunks.py)."""
        return self.T // CHUNK_SIZE + self.N if self.packed else self.B * (-(-self.T // CHUNK_SIZE))

    @property
    def kernel_dtype(self) -> torch.dtype:
        return torch.float32 if self.arch == "cpu" else torch.bfloat16

    @property
    def operand_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.wy_spec.operand_dtype)
        return dtype

    @property
    def wy_spec(self) -> ChunkWySpec:
        return ChunkWySpec(self.K, CHUNK_SIZE, str(self.kernel_dtype).removeprefix("torch."))

    @property
    def scan_spec(self) -> ChunkScanSpec:
        return ChunkScanSpec(self.K, self.V, CHUNK_SIZE, str(self.kernel_dtype).removeprefix("torch."))


@takes_context
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention, forward. Per token: decay the state, form the residual against it, write, then read.

    Names, order, shapes and defaults are those of flash-linear-attention 0.6. The definition is
    `kda_tl.reference.recurrent_kda`; the source, Kimi Linear (arXiv 2510.26692).

    Args:
        q, k: [B, T, H, K], K = 128; bfloat16 on cuda, also float16 and float32 on cpu (computed in float32 there).
        v: [B, T, HV, V], V = 128, HV a multiple of H (grouped value attention); dtype of q.
        g: [B, T, HV, K], natural-log decay (<= 0, no lower limit), or with `use_gate_in_kernel` the raw gate input.
        beta: [B, T, HV], or with `use_beta_sigmoid_in_kernel` its logits.
        scale: of the output; default K ** -0.5.
        initial_state: [N, HV, K, V] float32, or [N, HV, V, K] with `state_v_first`. N is B, or the number of packed sequences.
        output_final_state: return the state after the last token; else None stands in its place.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: g becomes -exp(A_log) softplus(g + dt_bias), or with `lower_bound`
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)), without the factor where A_log is None.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: beta becomes sigmoid(beta), or 2 sigmoid(beta).
        lower_bound: of the gate, < 0, natural log per token. Used with `use_gate_in_kernel` only.
        state_v_first: both states are [N, HV, V, K].
        cu_seqlens: [N + 1] int32 or int64, offsets of N sequences packed along T, with B = 1. Output past the last is zero.
        cu_seqlens_cpu: the same values on the host, so that they can be checked without a sync.
        A_log: [HV]. dt_bias: [HV * K] or [HV, K].
        cp_context: a `kda_tl.ContextParallel` or a context of flash-linear-attention, where other processes hold parts of the
            sequences. Collective: every rank calls. cu_seqlens may be left out; states have a row per local sequence, and
            which of them count is said at `ContextParallel`.
        chunk_size: 64.
        safe_gate, disable_recompute, use_graph, max_num_seqs: accepted for flash-linear-attention's sake. They choose among
            its kernels; ours are right for any gate, keep nothing, and need no flag to be captured in a graph.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 or None.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        ArtifactMissing: the kernels are not built for this device; the message names the command.
        NotImplementedError: an input requires a gradient, or `return_intermediate_states` is asked for.
        ContextParallelError: another rank of cp_context failed; the message names it.
    """
    if "transpose_state_layout" in kwargs:
        warnings.warn("transpose_state_layout is now named state_v_first", DeprecationWarning, stacklevel=3)
        state_v_first = bool(kwargs.pop("transpose_state_layout"))
    _check_options(chunk_size, kwargs.keys())
    if return_intermediate_states:
        raise NotImplementedError("return_intermediate_states must be False: intermediate states are not stored yet")
    if cp_context is not None:
        cu_seqlens, cu_seqlens_cpu = cp_context.sequences(q, cu_seqlens, cu_seqlens_cpu)
    problem = _check(q, k, v, g, beta, initial_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
    gate_parameters = {"A_log": A_log, "dt_bias": dt_bias} if use_gate_in_kernel else {}
    for name, tensor in gate_parameters.items():
        if tensor is not None:
            check_tensors(**{name: tensor})
            if tensor.device != q.device:
                raise ValueError(f"{name} must be on {q.device} like q, got {tensor.device}")
    _refuse_gradients(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, **gate_parameters)

    if lower_bound is not None and not isinstance(lower_bound, (int, float)):
        raise TypeError(f"lower_bound must be a number < 0, got {type(lower_bound).__name__}")
    if use_gate_in_kernel:
        g = kda_gate(g.float(), A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = beta_sigmoid(beta.float(), allow_neg_eigval)
    elif allow_neg_eigval:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    if use_qk_l2norm_in_kernel:
        q, k = (l2norm(tensor.float()).to(problem.kernel_dtype) for tensor in (q, k))

    state_in = _as_k_first(initial_state, state_v_first)
    if cp_context is not None:
        state_in = cp_context.initial_state(k, v, g, beta, state_in)
    o = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=problem.kernel_dtype, device=v.device)
    shape = (problem.V, problem.K) if state_v_first else (problem.K, problem.V)
    state = torch.empty((problem.N, problem.HV, *shape), dtype=torch.float32, device=v.device) if output_final_state else None
    with torch.cuda.device(q.device) if q.device.type == "cuda" else nullcontext():
        _launch(problem, q, k, v, g, beta, problem.K**-0.5 if scale is None else float(scale), cu_seqlens, o,
                state_in, _as_k_first(state, state_v_first))  # fmt: skip
    return o.to(v.dtype), state


def plan_chunk_kda(*args: Any, **kwargs: Any) -> Plan:
    """What `chunk_kda` with these arguments will launch. Raises what it would raise for their types, sizes and names."""
    call = inspect.signature(chunk_kda).bind(*args, **kwargs)
    call.apply_defaults()
    a = call.arguments
    _check_options(a["chunk_size"], a["kwargs"].keys() - {"transpose_state_layout"})
    state_v_first = bool(a["kwargs"].get("transpose_state_layout", a["state_v_first"]))
    sequences = local_sequences("chunk_kda", a["cp_context"], a["q"], a["cu_seqlens"], a["cu_seqlens_cpu"])
    problem = _check(a["q"], a["k"], a["v"], a["g"], a["beta"], a["initial_state"], state_v_first, *sequences)
    return plan_problem(problem)


def plan_problem(problem: Problem) -> Plan:
    """The plan of a call of these sizes: it depends on nothing else."""
    sequences = f"{problem.N} packed sequences" if problem.packed else f"{problem.N} sequences of {problem.T} tokens"
    sizes = {"B": problem.B, "T": problem.T, "H": problem.H, "HV": problem.HV, "K": problem.K, "V": problem.V}
    return Plan(
        op="chunk_kda",
        problem={**sizes, "batch": sequences, "dtype": problem.wy_spec.dtype},
        arch=problem.arch,
        launches=(
            Launch(problem.wy_spec, f"{problem.slots} chunk slots x {problem.HV} heads"),
            Launch(problem.scan_spec, f"{problem.N + problem.packed} sequences x {problem.HV} heads x V tiles"),
        ),
        workspace_bytes=2 * problem.slots * problem.HV * CHUNK_SIZE**2 * problem.operand_dtype.itemsize,
    )


def _check_options(chunk_size: int, unknown: Collection[str]) -> None:
    if unknown:
        raise TypeError(f"chunk_kda has no argument {min(unknown)!r}")
    if chunk_size != CHUNK_SIZE:
        raise ValueError(f"chunk_size must be {CHUNK_SIZE}, got {chunk_size}")


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, state_v_first: bool,
    cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None,
) -> Problem:  # fmt: skip
    check_tensors(q=q, k=k, v=v, g=g, beta=beta)
    arch = dispatcher.device_arch(q.device)
    if q.dim() != 4:
        raise ValueError(f"q must have shape [B, T, H, K], got {list(q.shape)}")
    if v.dim() != 4:
        raise ValueError(f"v must have shape [B, T, HV, V], got {list(v.shape)}")
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    check_dtype("q", q, FLOAT_DTYPES if arch == "cpu" else (torch.bfloat16,))
    check_dtype("k", k, (q.dtype,))
    check_dtype("v", v, (q.dtype,))
    check_dtype("g", g, FLOAT_DTYPES)
    check_dtype("beta", beta, FLOAT_DTYPES)
    for name, value in (("K, the last size of q,", K), ("V, the last size of v,", V)):
        if value != HEAD_DIM:
            raise ValueError(f"{name} must be {HEAD_DIM}, got {value}")
    check_shape("k", k, "[B, T, H, K]", (B, T, H, K))
    check_shape("v", v, "[B, T, HV, V]", (B, T, HV, V))
    if H == 0 or HV == 0 or HV % H:
        raise ValueError(f"HV, the heads of v, must be a positive multiple of H, the heads of q: got HV = {HV}, H = {H}")
    check_shape("g", g, "[B, T, HV, K]", (B, T, HV, K))
    check_shape("beta", beta, "[B, T, HV]", (B, T, HV))
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, B, T, q.device)
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu needs cu_seqlens, the same values on the device of q")
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is not None:
        check_tensors(q=q, initial_state=initial_state)
        check_dtype("initial_state", initial_state, (torch.float32,))
        layout, shape = ("[N, HV, V, K]", (N, HV, V, K)) if state_v_first else ("[N, HV, K, V]", (N, HV, K, V))
        check_shape("initial_state", initial_state, layout, shape)
    return Problem(B, T, N, H, HV, K, V, cu_seqlens is not None, arch)


def _refuse_gradients(**tensors: Tensor | None) -> None:
    """Neither mode of differentiation may lose an input in silence."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        tangent = forward_ad.unpack_dual(tensor).tangent if forward_ad._current_level >= 0 else None
        if tangent is not None or (torch.is_grad_enabled() and tensor.requires_grad):
            raise NotImplementedError(
                f"{name} requires a gradient and chunk_kda has no backward: call it under torch.no_grad(), or detach {name}"
            )


def _as_k_first(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    return state.transpose(-1, -2) if state is not None and state_v_first else state


def _launch(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, cu_seqlens: Tensor | None,
    o: Tensor, initial_state: Tensor | None, final_state: Tensor | None,
) -> None:  # fmt: skip
    """Both kernels on the current stream. States are [N, HV, K, V] here, whatever their strides."""
    if problem.N == 0 or problem.T == 0:
        o.zero_()
        if final_state is not None:
            final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
        return
    dtype = problem.kernel_dtype
    q, k, v = (_readable(tensor.to(dtype)) for tensor in (q, k, v))
    g, beta = _readable(g.to(torch.float32)), beta.detach().resolve_neg().to(torch.float32)
    offsets = _offsets(problem, cu_seqlens, q.device)
    workspace = (2, problem.slots, problem.HV, CHUNK_SIZE, CHUNK_SIZE)
    A_inv, P = torch.empty(workspace, dtype=problem.operand_dtype, device=q.device)
    absent = torch.empty((), dtype=torch.float32, device=q.device).expand(problem.N, problem.HV, problem.K, problem.V)
    state_in = absent if initial_state is None else initial_state.detach().resolve_neg()
    state_out = absent if final_state is None else final_state
    uniform = 0 if problem.packed else 1
    dispatcher.kernel(problem.wy_spec, problem.arch, q.device)(q, k, g, beta, offsets, A_inv, P, uniform)
    dispatcher.kernel(problem.scan_spec, problem.arch, q.device)(
        q, k, v, g, offsets, A_inv, P, o, state_in, state_out,
        scale, uniform, int(initial_state is not None), int(final_state is not None),
    )  # fmt: skip


def _readable(tensor: Tensor) -> Tensor:
    """As the kernels read it: contiguous rows that start at multiples of 16 bytes, any other strides. Else one copy."""
    tensor = tensor.detach().resolve_neg()
    aligned = tensor.data_ptr() % 16 == 0 and all(stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1])
    # clone, not contiguous(): that keeps an odd stride where the size is 1.
    return tensor if aligned and tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def _offsets(problem: Problem, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    if cu_seqlens is None:
        return torch.empty(1, dtype=torch.int32, device=device)
    return cu_seqlens.to(torch.int32).contiguous()
