"""From a decision to the kernels that it takes: what is padded or converted, and the launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kda_tl.ops.arguments import Arguments
from kda_tl.ops.checks import narrowed
from kda_tl.ops.plan import Launch, counted
from kda_tl.ops.prefill_checks import Problem
from kda_tl.ops.prefill_decision import Decision, Scan, as_they_are, decide
from kda_tl.ops.prefill_kernels import (
    GateOptions,
    Maps,
    Pool,
    Segments,
    Workspace,
    launch_chunk_scan,
    launch_chunk_wy,
    launch_intracard_merge,
    launch_intracard_pre_scan,
)
from kda_tl.runtime import dispatcher
from kda_tl.runtime.fused import Watch, all_distinct, derived
from kda_tl.runtime.loader import KernelFunction
from kda_tl.specs.intracard import ships

__all__ = ["launch", "launches", "only_scan", "readable", "run_chunk_wy", "workspace_bytes"]

Watched = Callable[[KernelFunction], KernelFunction]


def only_scan(d: Decision) -> Scan | None:
    """The scan of a call whose K and V are its own, and whose sequences may be cut; else None."""
    problem, scan = d.problem, d.scans[0]
    same = len(d.scans) == 1 and (scan.spec.head_dim_k, scan.spec.head_dim_v) == (problem.K, problem.V)
    return scan if same and ships(scan.pre_scan, scan.merge, problem.arch == "cpu") else None


def readable(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, heads, D] as the kernels read it."""
    return _readable(_as(tensor, dtype))


def launches(problem: Problem, decision: Decision | None = None) -> tuple[Launch, ...]:
    """What `launch` launches, in order."""
    d = decision or decide(problem)
    heads = counted(problem.HV, "head")
    sequences = counted(problem.N + problem.packed, "sequence")
    segments, sizes = d.split.segments, d.sizes
    found = [Launch(d.wy, f"{counted(problem.slots, 'chunk slot')} x {heads}", sizes.chunk_wy)]
    for scan in d.scans:
        if segments > 1:
            own = counted(problem.N, "sequence")
            cuts = counted(segments - 1, "segment")
            tiles = f"tiles of {'K + V' if scan.spec.delta else 'V'}"
            found.append(Launch(scan.pre_scan, f"{own} x {cuts} x {heads} x {tiles}", sizes.intracard_pre_scan))
            found.append(Launch(scan.merge, f"{own} x {heads} x V tiles", sizes.intracard_merge))
            grid = f"{sequences} x {counted(segments, 'segment')} x {heads} x V tiles"
            found.append(Launch(scan.spec, grid, sizes.chunk_scan))
        else:
            found.append(Launch(scan.spec, f"{sequences} x {heads} x V tiles", sizes.chunk_scan))
    return tuple(found)


def workspace_bytes(d: Decision) -> int:
    """Of chunk_wy's results, and of one run over V what lies between its segments."""
    problem, segments, own = d.problem, d.split.segments, 0
    per_head = Workspace.bytes_per_slot_and_head(d.wy.head_dim_k, d.operand_dtype.itemsize, problem.rule.delta)
    if segments > 1:
        K, V = d.wy.head_dim_k, max(scan.spec.head_dim_v for scan in d.scans)
        own = 4 * problem.N * problem.HV * K * ((segments - 1) * (V + (K if problem.rule.delta else 1)) + segments * V)
    return problem.slots * problem.HV * per_head + own


class _Inputs(NamedTuple):
    """The tensors of a call as the kernels read them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    bonus: Tensor | None
    offsets: Tensor | None
    indices: Tensor | None
    mask: Tensor | None


def _inputs(d: Decision, a: Arguments, watch: Watch | None = None) -> _Inputs:
    dtype, gate_dtype, padding = d.problem.kernel_dtype, d.gate_dtype, d.padding
    q, k, v, g, beta, bonus, A_log, dt_bias = a[:8]
    q_as_is, k_as_is, v_as_is, g_as_is, beta_as_is = d.as_is
    if not q_as_is:
        q = derived(watch, q, lambda q: _readable(_padded(_as(q, dtype), padding)))
    if not k_as_is:
        k = derived(watch, k, lambda k: _readable(_padded(_as(k, dtype), padding)))
    if not v_as_is:
        v = derived(watch, v, lambda v: _readable(_as(v, dtype)) if d.whole_v else _as(v, dtype))
    if g is not None and not g_as_is:
        if d.problem.rule.decay == "per_key":
            g = derived(watch, g, lambda g: _readable(_padded(_as(g, gate_dtype), padding)))
        else:
            g = derived(watch, g, lambda g: _as(g, gate_dtype).resolve_neg())
    if beta is not None and not beta_as_is:
        beta = derived(watch, beta, lambda beta: _as(beta, gate_dtype).resolve_neg())
    if d.gate:
        per_key = d.problem.rule.decay == "per_key"
        if dt_bias is None:
            dt_bias = torch.zeros(d.problem.HV * (d.wy.head_dim_k if per_key else 1), device=q.device)
        elif per_key and padding:
            dt_bias = _padded(dt_bias.reshape(d.problem.HV, d.problem.K), padding)
    offsets, indices, mask = a.cu_seqlens, None, None
    if offsets is not None and not (offsets.dtype == torch.int32 and offsets.is_contiguous()):
        offsets = derived(watch, offsets, lambda offsets: offsets.to(torch.int32).contiguous())
    if d.pooled and a.state_indices is not None:
        indices = derived(watch, a.state_indices, lambda indices: narrowed(indices).contiguous())
        mask = None if a.has_initial_state is None else a.has_initial_state.contiguous().view(torch.uint8)
    return _Inputs(
        q, k, v, g, beta, None if A_log is None else derived(watch, A_log, _row),
        None if dt_bias is None else derived(watch, dt_bias, _row),
        None if bonus is None else _row(_padded(bonus, padding)), offsets, indices, mask,
    )  # fmt: skip


def run_chunk_wy(d: Decision, a: Arguments) -> tuple[Workspace, Tensor | None]:
    """All that does not depend on a state: chunk_wy's results, and cu_seqlens as the kernels read them."""
    x = _inputs(d, a)
    with dispatcher.device_guard(x.q.device):
        return _chunk_wy(d, x, _same), x.offsets


def _same(kernel: KernelFunction) -> KernelFunction:
    return kernel


def _chunk_wy(d: Decision, x: _Inputs, watched: Watched) -> Workspace:
    problem, device = d.problem, x.q.device
    workspace = Workspace.empty(problem.slots, problem.HV, d.wy.head_dim_k, d.operand_dtype, problem.rule.delta, device)
    kernel = watched(dispatcher.kernel(d.wy, problem.arch, device, d.sizes.chunk_wy))
    options = GateOptions(d.gate, x.A_log, x.dt_bias, d.lower_bound, d.beta, d.normalize, x.bonus)
    launch_chunk_wy(kernel, x.q, x.k, x.g, x.beta, options, x.offsets, workspace)
    return workspace


def launch(
    d: Decision, a: Arguments, o: Tensor, initial_state: Tensor | None, final_state: Tensor | None,
    states: Tensor | None = None, candidate: Watch | None = None,
) -> None:  # fmt: skip
    """All kernels of a problem with at least one token and one sequence, on the current stream.

    o [B, T, HV, V] kernel_dtype, out; final_state [N, HV, K, V] float32, out; initial_state likewise; states of any strides.
    Where the decision says `pooled`, both are the caller's pool. states [slots, HV, K, V] float32, out: before every chunk.
    candidate: sees every launch, and the tensors between them.
    """
    x = _inputs(d, a, candidate)
    tensors = (*x, o, initial_state, None if d.pooled else final_state, states)  # a pool is one tensor
    with dispatcher.device_guard(o.device):
        if d.fused is not None and candidate is None:
            d.fused(*tensors)
            return
        fuse = candidate is None and d.to_fuse and all_distinct(tensors)
        watch = Watch() if fuse else candidate
        watched = _same if watch is None else watch.of
        workspace = _chunk_wy(d, x, watched)
        scratch = [] if watch is None else watch.scratch
        scratch += [part for part in workspace if part.numel() > 0]
        pool = None if x.indices is None else Pool(x.indices, d.null_index, x.mask)
        for scan in d.scans:
            run = _run if d.whole_v and not d.padding else _run_columns
            run(d, scan, workspace, x.offsets, x.v, o, initial_state, final_state, states, pool, watched, scratch)
        if watch is not None and fuse:
            d.fused, d.to_fuse = watch.fused(tensors), False
        elif d.whole_v and not d.padding and d.problem.arch != "cpu":
            d.to_fuse = True  # a call that comes a second time will come again


def _run(
    d: Decision, scan: Scan, workspace: Workspace, offsets: Tensor | None, v: Tensor, o: Tensor, initial_state: Tensor | None,
    final_state: Tensor | None, states: Tensor | None, pool: Pool | None, watched: Watched, scratch: list[Tensor],
) -> None:  # fmt: skip
    """The columns of V that a kernel has, in the caller's memory. scratch: gets the tensors between the launches."""
    segments = None
    if d.split.segments > 1:
        segments = _segments(d, scan, v, workspace, offsets, initial_state, pool, watched, scratch)
    kernel = watched(dispatcher.kernel(scan.spec, d.problem.arch, v.device, d.sizes.chunk_scan))
    launch_chunk_scan(
        kernel, v, workspace, o, d.scale, offsets, initial_state, final_state, state_dtype=d.state_dtype, pool=pool,
        segments=segments, states=states,
    )  # fmt: skip


def _run_columns(
    d: Decision, scan: Scan, workspace: Workspace, offsets: Tensor | None, v: Tensor, o: Tensor, initial_state: Tensor | None,
    final_state: Tensor | None, states: Tensor | None, pool: Pool | None, watched: Watched, scratch: list[Tensor],
) -> None:  # fmt: skip
    """Columns of v, o and the states, by way of padded copies where they or the rows of K are fewer than the kernel's."""
    K, V, rows, columns = scan.spec.head_dim_k, scan.spec.head_dim_v, d.problem.K, scan.columns
    v, o = _columns(v, scan), _columns(o, scan)
    if initial_state is not None:
        initial_state = _columns(initial_state, scan)
    added, missing = V - columns, d.padding
    o_kernel, final_kernel, states_kernel = o, None, None
    if final_state is not None:
        final_kernel = final_state = _columns(final_state, scan)
    if added or missing:
        o_kernel = torch.empty((*v.shape[:-1], V), dtype=o.dtype, device=v.device)
        if initial_state is not None:
            initial_state = torch.nn.functional.pad(initial_state, (0, added, 0, missing))
        if final_state is not None:
            final_kernel = final_state.new_empty((*final_state.shape[:2], K, V))
    if states is not None:
        states_kernel = states.new_empty((*states.shape[:2], K, V))
    v = _readable(_padded(v, added))
    _run(d, scan, workspace, offsets, v, o_kernel, initial_state, final_kernel, states_kernel, pool, watched, scratch)
    if o_kernel is not o:
        o.copy_(o_kernel[..., :columns])
    if final_state is not None and final_kernel is not None and final_kernel is not final_state:
        final_state.copy_(final_kernel[..., :rows, :columns])
    if states is not None and states_kernel is not None:
        _columns(states, scan).copy_(states_kernel[..., :rows, :columns])


def _segments(
    d: Decision, scan: Scan, v: Tensor, workspace: Workspace, offsets: Tensor | None, initial_state: Tensor | None,
    pool: Pool | None, watched: Watched, scratch: list[Tensor],
) -> Segments:  # fmt: skip
    """The state before every segment, by two launches."""
    problem, split, spec = d.problem, d.split, scan.spec
    N, HV, K, V, device = problem.N, problem.HV, spec.head_dim_k, spec.head_dim_v, v.device
    maps = Maps.empty(N, split.segments - 1, HV, K, V, spec.delta, device)
    segments = Segments.empty(N, split.segments, split.segment_chunks, HV, K, V, device)
    scratch += (*maps, segments.states)
    kernel = watched(dispatcher.kernel(scan.pre_scan, problem.arch, device, d.sizes.intracard_pre_scan))
    launch_intracard_pre_scan(kernel, v, workspace, offsets, split.segment_chunks, maps)
    kernel = watched(dispatcher.kernel(scan.merge, problem.arch, device, d.sizes.intracard_merge))
    launch_intracard_merge(kernel, maps, problem.T, offsets, initial_state, segments, pool=pool)
    return segments


def _row(tensor: Tensor) -> Tensor:
    """A parameter as the kernels read it: float32, contiguous, one dimension."""
    if tensor.dim() == 1 and tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return _as(tensor.resolve_neg(), torch.float32).reshape(-1).contiguous()


def _columns(tensor: Tensor, scan: Scan) -> Tensor:
    return tensor[..., scan.first : scan.first + scan.columns]


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor.to(dtype), without the microsecond that it takes where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _padded(tensor: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, columns)) if columns else tensor


def _readable(tensor: Tensor) -> Tensor:
    """[B, T, heads, D] as the kernels read it: contiguous rows at multiples of 16 bytes, any other strides. Else one copy."""
    if as_they_are(tensor):
        return tensor
    # clone, not contiguous(): that keeps an odd stride where the size is 1.
    return tensor.resolve_neg().clone(memory_format=torch.contiguous_format)
