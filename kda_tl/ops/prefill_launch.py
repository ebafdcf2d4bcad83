"""From a checked problem to the kernels that it takes: which specs, what is padded or converted, and the launches."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from kda_tl.ops.arguments import Arguments
from kda_tl.ops.checks import host_offsets, narrowed
from kda_tl.ops.intracard import SplitInfo, Work, device_of, multiprocessors, plan_split
from kda_tl.ops.offered import shipped_k, v_runs
from kda_tl.ops.plan import Launch, counted
from kda_tl.ops.prefill_checks import CHUNK_SIZE, Problem
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
from kda_tl.specs.gates import BetaForm, gate_form
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec, ships
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec
from kda_tl.specs.prefill import POOL_DTYPES, gate_dtypes
from kda_tl.specs.rules import Rule
from kda_tl.specs.sizes import problem_size

__all__ = [
    "intracard_specs_of",
    "launch",
    "launches",
    "only_scan",
    "readable",
    "run_chunk_wy",
    "split_of",
    "takes_pool",
    "workspace_bytes",
]

Scans = tuple[tuple[int, int, ChunkScanSpec], ...]


@functools.lru_cache(maxsize=256)
def _specs(
    rule: Rule, K: int, V: int, dtype: torch.dtype, gate_dtype: torch.dtype, state_dtype: torch.dtype
) -> tuple[ChunkWySpec, Scans, torch.dtype]:
    """chunk_wy; (first column, columns, chunk_scan) of every run over V; the dtype of the workspace."""
    name, state = _name(dtype), _name(state_dtype)
    K = shipped_k(rule, name, K)
    wy = ChunkWySpec(K, CHUNK_SIZE, name, _name(gate_dtype), rule.decay, rule.delta, rule.read_first)
    runs = v_runs(rule, name, V)
    scans = tuple(
        (first, columns, ChunkScanSpec(K, size, CHUNK_SIZE, name, state, rule.delta)) for first, columns, size in runs
    )
    return wy, scans, getattr(torch, wy.operand_dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gate_dtype(problem: Problem, a: Arguments | None) -> torch.dtype:
    """Of g and beta in the kernel: their own where both have one that ships, else float32."""
    given = () if a is None else tuple(x.dtype for x in (a.g, a.beta) if x is not None)
    shipped = gate_dtypes(problem.rule, _name(problem.kernel_dtype))
    return given[0] if given and len(set(given)) == 1 and _name(given[0]) in shipped else torch.float32


@functools.lru_cache(maxsize=256)
def intracard_specs_of(scan: ChunkScanSpec) -> tuple[IntracardPreScanSpec, IntracardMergeSpec]:
    """What cuts the sequences that `scan` walks."""
    K, V, C = scan.head_dim_k, scan.head_dim_v, scan.chunk_size
    return IntracardPreScanSpec(K, V, C, scan.dtype, scan.delta), IntracardMergeSpec(K, V, C, delta=scan.delta)


def split_of(problem: Problem, a: Arguments | None = None) -> SplitInfo:
    """How the sequences of a call are cut: `kda_tl.ops.intracard`.

    Raises:
        ValueError: intracard_segments asks for more than 1 where no kernels for that ship.
    """
    if not problem.arch:  # fake tensors: nothing will be launched
        return SplitInfo(1, 1, "there is no device")
    forced = None if a is None or a.intracard_segments is None else int(a.intracard_segments)
    whole = -(-problem.T // CHUNK_SIZE)
    if forced == 1 or problem.N == 0 or problem.T == 0:
        return SplitInfo(1, max(whole, 1), "intracard_segments=1" if forced == 1 else "there is nothing to cut")
    is_cpu = problem.arch == "cpu"
    if is_cpu and forced is None:
        return SplitInfo(1, whole, "the cpu runs one block after another")
    _, scans, _ = _specs(problem.rule, problem.K, problem.V, problem.kernel_dtype, torch.float32, torch.float32)
    for _, _, scan in scans:
        if not ships(*intracard_specs_of(scan), is_cpu):
            missing = f"no kernels that cut K = {scan.head_dim_k}, V = {scan.head_dim_v} in {scan.dtype}"
            missing += " with the delta correction" if scan.delta else " without the delta correction"
            if forced is not None:
                raise ValueError(f"intracard_segments must be None or 1 here, there are {missing}, got {forced}")
            return SplitInfo(1, whole, f"there are {missing}")
    if not problem.packed:
        work = Work(problem.N, problem.HV, whole, whole * problem.N, (whole,))
    else:
        offsets = None if a is None or a.cu_seqlens is None else host_offsets(a.cu_seqlens, a.cu_seqlens_cpu)
        if offsets is None:
            work = Work(problem.N, problem.HV, whole, problem.slots, None, dense=False)
        else:
            chunks = tuple(-(-(last - first) // CHUNK_SIZE) for first, last in itertools.pairwise(offsets))
            work = Work(problem.N, problem.HV, max(chunks), sum(chunks), chunks, dense=False)
    scan = scans[0][2]
    device = torch.device("cpu") if a is None else a.q.device
    count = multiprocessors(device, problem.arch)
    return plan_split(work, device_of(scan, *intracard_specs_of(scan), problem.arch, count), forced)


def only_scan(problem: Problem) -> ChunkScanSpec | None:
    """The scan of a call whose K and V are its own, and whose sequences may be cut; else None."""
    _, scans, _ = _specs(problem.rule, problem.K, problem.V, problem.kernel_dtype, torch.float32, torch.float32)
    scan = scans[0][2]
    same = len(scans) == 1 and (scan.head_dim_k, scan.head_dim_v) == (problem.K, problem.V)
    return scan if same and ships(*intracard_specs_of(scan), problem.arch == "cpu") else None


def readable(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, heads, D] as the kernels read it."""
    return _readable(_as(tensor, dtype))


def launches(problem: Problem, a: Arguments | None = None) -> tuple[Launch, ...]:
    """What `launch` launches, in order."""
    state_dtype = a.initial_state.dtype if a is not None and a.initial_state is not None and takes_pool(problem, a) else None
    wy, scans, _ = _specs(
        problem.rule, problem.K, problem.V, problem.kernel_dtype, _gate_dtype(problem, a), state_dtype or torch.float32
    )
    heads = counted(problem.HV, "head")
    sequences = counted(problem.N + problem.packed, "sequence")
    HV, split = problem.HV, split_of(problem, a)
    found = [Launch(wy, f"{counted(problem.slots, 'chunk slot')} x {heads}", problem_size("chunk_wy", problem.slots, HV))]
    segments, scans_size = split.segments, problem_size("chunk_scan", split.scans(problem.N), HV)
    for _, _, scan in scans:
        if segments > 1:
            pre_scan, merge = intracard_specs_of(scan)
            own = counted(problem.N, "sequence")
            cuts = counted(segments - 1, "segment")
            size = problem_size("intracard_pre_scan", split.scans(problem.N), HV)
            found.append(Launch(pre_scan, f"{own} x {cuts} x {heads} x tiles of {'K + V' if scan.delta else 'V'}", size))
            found.append(Launch(merge, f"{own} x {heads} x V tiles", problem_size("intracard_merge", problem.N, HV)))
            found.append(Launch(scan, f"{sequences} x {counted(segments, 'segment')} x {heads} x V tiles", scans_size))
        else:
            found.append(Launch(scan, f"{sequences} x {heads} x V tiles", scans_size))
    return tuple(found)


def workspace_bytes(problem: Problem, a: Arguments | None = None) -> int:
    """Of chunk_wy's results, and of one run over V what lies between its segments."""
    wy, scans, operand_dtype = _specs(problem.rule, problem.K, problem.V, problem.kernel_dtype, torch.float32, torch.float32)
    per_head = Workspace.bytes_per_slot_and_head(wy.head_dim_k, operand_dtype.itemsize, problem.rule.delta)
    segments, own = split_of(problem, a).segments, 0
    if segments > 1:
        K, V = wy.head_dim_k, max(scan.head_dim_v for _, _, scan in scans)
        own = 4 * problem.N * problem.HV * K * ((segments - 1) * (V + (K if problem.rule.delta else 1)) + segments * V)
    return problem.slots * problem.HV * per_head + own


def takes_pool(problem: Problem, a: Arguments) -> bool:
    """Whether chunk_scan itself reads and writes the slots of the caller's pool; else states are gathered and scattered.

    Not where sequences are cut: the block that ends one could overwrite a slot before the block that begins it has read it.
    """
    pool = a.initial_state
    if a.state_indices is None or pool is None or pool.is_neg() or problem.N == 0 or problem.T == 0:
        return False
    if problem.K != 128 or problem.V != 128 or _name(pool.dtype) not in POOL_DTYPES[_name(problem.kernel_dtype)]:
        return False
    return split_of(problem, a).segments == 1


def run_chunk_wy(problem: Problem, a: Arguments) -> tuple[Workspace, Tensor | None]:
    """All that does not depend on a state: chunk_wy's results, and cu_seqlens as the kernels read them."""
    rule, dtype, gate_dtype = problem.rule, problem.kernel_dtype, _gate_dtype(problem, a)
    spec, _, operand_dtype = _specs(rule, problem.K, problem.V, dtype, gate_dtype, torch.float32)
    K = spec.head_dim_k
    missing = K - problem.K
    q, k = (_readable(_padded(_as(x, dtype), missing)) for x in (a.q, a.k))
    g = None if a.g is None else _as(a.g, gate_dtype)
    if g is not None:
        g = _readable(_padded(g, missing)) if rule.decay == "per_key" else _plain(g)
    beta = None if a.beta is None else _plain(_as(a.beta, gate_dtype))
    device = q.device
    offsets = None if a.cu_seqlens is None else _as(a.cu_seqlens, torch.int32).contiguous()
    workspace = Workspace.empty(problem.slots, problem.HV, K, operand_dtype, rule.delta, device)
    options = _options(problem, a, missing)
    with dispatcher.device_guard(device):
        kernel = dispatcher.kernel(spec, problem.arch, device, problem_size("chunk_wy", problem.slots, problem.HV))
        launch_chunk_wy(kernel, q, k, g, beta, options, offsets, workspace)
    return workspace, offsets


def launch(
    problem: Problem, a: Arguments, o: Tensor, initial_state: Tensor | None, final_state: Tensor | None,
    states: Tensor | None = None,
) -> None:  # fmt: skip
    """All kernels of a problem with at least one token and one sequence, on the current stream.

    o [B, T, HV, V] kernel_dtype, out; final_state [N, HV, K, V] float32, out; initial_state likewise; states of any strides.
    Where `takes_pool` says so, both are the caller's pool. states [slots, HV, K, V] float32, out: before every chunk.
    """
    pooled = takes_pool(problem, a)
    state_dtype = initial_state.dtype if pooled and initial_state is not None else torch.float32
    # The scans are the same for every gate dtype.
    spec, scans, _ = _specs(problem.rule, problem.K, problem.V, problem.kernel_dtype, torch.float32, state_dtype)
    K = spec.head_dim_k
    missing = K - problem.K
    v = _as(a.v, problem.kernel_dtype)
    scale = problem.K**-0.5 if a.scale is None else float(a.scale)
    device = v.device
    split = split_of(problem, a)
    pool = None
    if pooled and a.state_indices is not None:
        pool = Pool(
            narrowed(a.state_indices).contiguous(),
            -1 if a.null_index is None else int(a.null_index),
            None if a.has_initial_state is None else a.has_initial_state.contiguous().view(torch.uint8),
        )
    workspace, offsets = run_chunk_wy(problem, a)
    size = problem_size("chunk_scan", split.scans(problem.N), problem.HV)
    with dispatcher.device_guard(device):
        for first, columns, scan in scans:
            own = (
                x if columns == problem.V else _columns(x, first, columns) for x in (v, o, initial_state, final_state, states)
            )
            v_run, o_run, state_in, state_out, states_run = own
            assert v_run is not None and o_run is not None
            o_kernel, out_kernel, states_kernel = o_run, state_out, states_run
            added = scan.head_dim_v - columns
            if added or missing:
                o_kernel = torch.empty((*v_run.shape[:-1], scan.head_dim_v), dtype=o.dtype, device=device)
                if state_in is not None:
                    state_in = torch.nn.functional.pad(state_in, (0, added, 0, missing))
                if state_out is not None:
                    out_kernel = state_out.new_empty((*state_out.shape[:2], K, scan.head_dim_v))
            if states_run is not None and not (states_run.is_contiguous() and added == missing == 0):
                states_kernel = states_run.new_empty((*states_run.shape[:2], K, scan.head_dim_v))
            v_kernel = _readable(_padded(v_run, added))
            segments = None
            if split.segments > 1:
                segments = _segments(problem, scan, split, v_kernel, workspace, offsets, state_in)
            launch_chunk_scan(
                dispatcher.kernel(scan, problem.arch, device, size), v_kernel, workspace, o_kernel, scale, offsets, state_in,
                out_kernel, state_dtype=state_dtype, pool=pool, segments=segments, states=states_kernel,
            )  # fmt: skip
            if o_kernel is not o_run:
                o_run.copy_(o_kernel[..., :columns])
            if state_out is not None and out_kernel is not None and out_kernel is not state_out:
                state_out.copy_(out_kernel[..., : problem.K, :columns])
            if states_run is not None and states_kernel is not None and states_kernel is not states_run:
                states_run.copy_(states_kernel[..., : problem.K, :columns])


def _segments(
    problem: Problem, scan: ChunkScanSpec, split: SplitInfo, v: Tensor, workspace: Workspace, offsets: Tensor | None,
    initial_state: Tensor | None,
) -> Segments:  # fmt: skip
    """The state before every segment, by two launches."""
    pre_scan, merge = intracard_specs_of(scan)
    N, HV, K, V, device = problem.N, problem.HV, scan.head_dim_k, scan.head_dim_v, v.device
    maps = Maps.empty(N, split.segments - 1, HV, K, V, scan.delta, device)
    segments = Segments.empty(N, split.segments, split.segment_chunks, HV, K, V, device)
    kernel = dispatcher.kernel(pre_scan, problem.arch, device, problem_size("intracard_pre_scan", split.scans(N), HV))
    launch_intracard_pre_scan(kernel, v, workspace, offsets, split.segment_chunks, maps)
    kernel = dispatcher.kernel(merge, problem.arch, device, problem_size("intracard_merge", N, HV))
    launch_intracard_merge(kernel, maps, problem.T, offsets, initial_state, segments)
    return segments


def _options(problem: Problem, a: Arguments, missing: int) -> GateOptions:
    beta_form = BetaForm.IDENTITY
    if a.use_beta_sigmoid_in_kernel:
        beta_form = BetaForm.TWICE_SIGMOID if a.allow_neg_eigval else BetaForm.SIGMOID
    dt_bias = None
    form = gate_form(a.use_gate_in_kernel, a.A_log is not None, a.lower_bound)
    if form:
        dt_bias = a.dt_bias
        per_key = problem.rule.decay == "per_key"
        if dt_bias is None:
            dt_bias = torch.zeros(problem.HV * (problem.K + missing if per_key else 1), device=a.q.device)
        elif per_key and missing:
            dt_bias = _padded(dt_bias.reshape(problem.HV, problem.K), missing)
    return GateOptions(
        form=form,
        A_log=None if a.A_log is None else _row(a.A_log),
        dt_bias=None if dt_bias is None else _row(dt_bias),
        lower_bound=0.0 if a.lower_bound is None else float(a.lower_bound),
        beta_form=beta_form,
        normalize=a.use_qk_l2norm_in_kernel,
        bonus=None if a.bonus is None else _row(_padded(a.bonus, missing)),
    )


def _row(tensor: Tensor) -> Tensor:
    """A parameter as the kernels read it: float32, contiguous, one dimension."""
    return _as(_plain(tensor), torch.float32).reshape(-1).contiguous()


def _columns(tensor: Tensor | None, first: int, columns: int) -> Tensor | None:
    return None if tensor is None else tensor[..., first : first + columns]


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
