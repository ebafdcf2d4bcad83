"""The only place that knows the prefill kernels: which ones a problem takes, what they read, and how they are called.

Gate, l2 norm and sigmoid run here as torch operations, and a scalar or absent decay is written out per key, because the kernels
of today take none of them.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch
from torch import Tensor

from kda_tl.ops.arguments import Arguments
from kda_tl.ops.offered import shipped_k, v_runs
from kda_tl.ops.plan import Launch, counted
from kda_tl.ops.prefill_checks import CHUNK_SIZE, Problem
from kda_tl.reference import beta_sigmoid, kda_gate, l2norm
from kda_tl.runtime import dispatcher
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec

__all__ = ["launch", "launches", "workspace_bytes"]


@functools.lru_cache(maxsize=256)
def _specs(K: int, V: int, dtype: torch.dtype) -> tuple[ChunkWySpec, tuple[tuple[int, int, ChunkScanSpec], ...], torch.dtype]:
    """chunk_wy; (first column, columns, chunk_scan) of every run over V; the dtype of the workspace."""
    K, name = shipped_k(K), str(dtype).removeprefix("torch.")
    wy = ChunkWySpec(K, CHUNK_SIZE, name)
    scans = tuple((first, columns, ChunkScanSpec(K, size, CHUNK_SIZE, name)) for first, columns, size in v_runs(V))
    return wy, scans, getattr(torch, wy.operand_dtype)


def _check_rule(problem: Problem) -> None:
    if not problem.rule.delta:
        raise NotImplementedError(f"there are no kernels for a rule without the delta correction yet, got {problem.rule}")


def launches(problem: Problem) -> tuple[Launch, ...]:
    """What `launch` launches, in order."""
    _check_rule(problem)
    wy, scans, _ = _specs(problem.K, problem.V, problem.kernel_dtype)
    heads = counted(problem.HV, "head")
    sequences = counted(problem.N + problem.packed, "sequence")
    return (
        Launch(wy, f"{counted(problem.slots, 'chunk slot')} x {heads}"),
        *(Launch(scan, f"{sequences} x {heads} x V tiles") for _, _, scan in scans),
    )


def workspace_bytes(problem: Problem) -> int:
    operand_dtype = _specs(problem.K, problem.V, problem.kernel_dtype)[2]
    return 2 * problem.slots * problem.HV * CHUNK_SIZE**2 * operand_dtype.itemsize


def launch(problem: Problem, a: Arguments, o: Tensor, initial_state: Tensor | None, final_state: Tensor | None) -> None:
    """All kernels of a problem with at least one token and one sequence, on the current stream.

    o [B, T, HV, V] kernel_dtype, out; final_state [N, HV, K, V] float32, out; initial_state likewise; states of any strides.
    """
    _check_rule(problem)
    q, k, g, beta = _activated(problem, a)
    v = _as(a.v, problem.kernel_dtype)
    scale = problem.K**-0.5 if a.scale is None else float(a.scale)
    wy_spec, scans, operand_dtype = _specs(problem.K, problem.V, problem.kernel_dtype)
    K = wy_spec.head_dim_k
    if K != problem.K:
        q, k, g = (_padded(x, K - problem.K) for x in (q, k, g))
    q, k, g = _readable(q), _readable(k), _readable(g)
    device = q.device
    offsets = _no_offsets(device) if a.cu_seqlens is None else a.cu_seqlens.to(torch.int32).contiguous()
    workspace = (problem.slots, problem.HV, CHUNK_SIZE, CHUNK_SIZE)
    A_inv = torch.empty(workspace, dtype=operand_dtype, device=device)
    P = torch.empty(workspace, dtype=operand_dtype, device=device)
    uniform = 0 if problem.packed else 1
    with torch.cuda.device(device) if device.type == "cuda" else _NOTHING:
        dispatcher.kernel(wy_spec, problem.arch, device)(q, k, g, beta, offsets, A_inv, P, uniform)
        for first, columns, spec in scans:
            own = (x if columns == problem.V else _columns(x, first, columns) for x in (v, o, initial_state, final_state))
            v_run, o_run, state_in, state_out = own
            assert v_run is not None and o_run is not None
            o_kernel, out_kernel = o_run, state_out
            padded = columns != spec.head_dim_v or K != problem.K
            if padded:
                v_run = _padded(v_run, spec.head_dim_v - columns)
                o_kernel = torch.empty(v_run.shape, dtype=o.dtype, device=device)
                if state_in is not None:
                    state_in = torch.nn.functional.pad(state_in, (0, spec.head_dim_v - columns, 0, K - problem.K))
                if state_out is not None:
                    shape = (problem.N, problem.HV, K, spec.head_dim_v)
                    out_kernel = torch.empty(shape, dtype=torch.float32, device=device)
            absent = None
            if state_in is None or out_kernel is None:
                absent = _no_state(device).expand(problem.N, problem.HV, K, spec.head_dim_v)
            dispatcher.kernel(spec, problem.arch, device)(
                q, k, _readable(v_run), g, offsets, A_inv, P, o_kernel, absent if state_in is None else state_in,
                absent if out_kernel is None else out_kernel, scale, uniform, int(state_in is not None),
                int(out_kernel is not None),
            )  # fmt: skip
            if padded:
                o_run.copy_(o_kernel[..., :columns])
                if state_out is not None and out_kernel is not None:
                    state_out.copy_(out_kernel[..., : problem.K, :columns])


_NOTHING = nullcontext()


@functools.cache
def _no_offsets(device: torch.device) -> Tensor:
    """What a kernel gets in place of offsets that it does not read."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@functools.cache
def _no_state(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=device)


def _columns(tensor: Tensor | None, first: int, columns: int) -> Tensor | None:
    return None if tensor is None else tensor[..., first : first + columns]


def _activated(problem: Problem, a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k in kernel_dtype, g [B, T, HV, K] and beta [B, T, HV] in float32, with norm, gate and sigmoid applied."""
    q, k, g, beta = a.q, a.k, a.g, a.beta
    if a.use_qk_l2norm_in_kernel:
        q, k = l2norm(q.float()), l2norm(k.float())
    if g is None:
        g = torch.zeros((1, 1, 1, problem.K), dtype=torch.float32, device=q.device)
    elif problem.rule.decay == "scalar":
        g = g.unsqueeze(-1)
    if a.use_gate_in_kernel:
        bias = a.dt_bias
        if bias is not None and problem.rule.decay == "scalar":
            bias = bias.unsqueeze(-1)
        g = kda_gate(g.float(), a.A_log, bias, a.lower_bound)
    if problem.rule.decay != "per_key":
        g = g.expand(problem.B, problem.T, problem.HV, problem.K)
    assert beta is not None
    if a.use_beta_sigmoid_in_kernel:
        beta = beta_sigmoid(beta.float(), a.allow_neg_eigval)
    dtype = problem.kernel_dtype
    return _as(q, dtype), _as(k, dtype), _as(g, torch.float32), _plain(_as(beta, torch.float32))


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor.to(dtype), without the microsecond that it takes where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _plain(tensor: Tensor) -> Tensor:
    """As a kernel may take it: no gradient, no negative bit."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _padded(tensor: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, columns)) if columns else tensor


def _readable(tensor: Tensor) -> Tensor:
    """[B, T, heads, D] as the kernels read it: contiguous rows at multiples of 16 bytes, any other strides. Else one copy."""
    tensor = _plain(tensor)
    batch, token, head, last = tensor.stride()
    if last == 1 and ((batch | token | head) * tensor.itemsize | tensor.data_ptr()) % 16 == 0:
        return tensor
    # clone, not contiguous(): that keeps an odd stride where the size is 1.
    return tensor.clone(memory_format=torch.contiguous_format)
