"""What a prefill call does, decided once and kept: which kernels, how sequences are cut, what has to be copied.

A decision depends on values alone: shapes, strides, dtypes, alignment, options, and offsets where the host knows them. `key_of`
names them all, so that a later call with an equal key is neither checked nor planned again. Addresses are no part of it.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.checks import host_offsets
from kda_tl.ops.intracard import SplitInfo, Work, device_of, multiprocessors, plan_split
from kda_tl.ops.known import Known, offsets_known, traits
from kda_tl.ops.offered import shipped_k, v_runs
from kda_tl.ops.prefill_checks import CHUNK_SIZE, Problem
from kda_tl.runtime import dispatcher
from kda_tl.runtime.environment import UNCHECKED, check_setting, registry_setting
from kda_tl.runtime.errors import UnsupportedDevice
from kda_tl.runtime.fused import Fused
from kda_tl.specs.gates import BetaForm, GateForm, gate_form
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec, ships
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec
from kda_tl.specs.prefill import POOL_DTYPES, gate_dtypes
from kda_tl.specs.rules import Rule
from kda_tl.specs.sizes import problem_size

__all__ = ["Decision", "Scan", "as_they_are", "decide", "intracard_specs_of", "key_of", "known", "once"]


class Scan(NamedTuple):
    """One run of chunk_scan over columns of V, and what cuts its sequences."""

    first: int
    columns: int
    spec: ChunkScanSpec
    pre_scan: IntracardPreScanSpec
    merge: IntracardMergeSpec


class Sizes(NamedTuple):
    """Of the problem that each kernel gets (`kda_tl.specs.sizes`): it picks the artifact."""

    chunk_wy: int
    chunk_scan: int
    intracard_pre_scan: int
    intracard_merge: int


@dataclass(slots=True)
class Decision:
    """Of a call, all but its tensors. Nothing but how it is launched changes after it was made.

    Attributes:
        split: how sequences are cut.
        sizes: of the problems that follow from it.
        pooled: kernels read and write the slots of the caller's pool; else states are gathered and scattered.
        state_dtype: of states as the kernels read and write them.
        as_is: of q, k, v, g and beta: the kernels read the caller's memory; else a copy.
        padding: columns that K lacks to that of the kernels.
        whole_v: one scan has all columns of V.
        fused, to_fuse: the launches as one native call, and whether the next call shall make it.
    """

    problem: Problem
    split: SplitInfo
    sizes: Sizes
    pooled: bool
    wy: ChunkWySpec
    scans: tuple[Scan, ...]
    operand_dtype: torch.dtype
    gate_dtype: torch.dtype
    state_dtype: torch.dtype
    padding: int
    as_is: tuple[bool, bool, bool, bool, bool]
    scale: float
    lower_bound: float
    gate: GateForm
    beta: BetaForm
    null_index: int
    normalize: bool
    whole_v: bool
    fused: Fused | None = None
    to_fuse: bool = False


NOTHING_GIVEN = (False,) * 5


def decide(problem: Problem, a: Arguments | None = None) -> Decision:
    """`a` None: float32 gates and states, and no options: what plans from sizes alone assume.

    Raises:
        ValueError: intracard_segments asks for more than 1 where no kernels for that ship.
    """
    pool = None if a is None else _pool_dtype(problem, a)
    only_whole = pool not in (None, torch.float32)  # intracard_merge reads float32 pools alone
    split = _split(problem, a, pool, only_whole)
    if only_whole and split.segments > 1:
        pool = None
    pooled, state_dtype = pool is not None, pool or torch.float32
    gate_dtype = _gate_dtype(problem, a)
    wy, scans, operand_dtype = _specs(problem.rule, problem.K, problem.V, problem.kernel_dtype, gate_dtype, state_dtype)
    gate, beta = GateForm.IDENTITY, BetaForm.IDENTITY
    if a is not None:
        gate = gate_form(a.use_gate_in_kernel, a.A_log is not None, a.lower_bound)
        if a.use_beta_sigmoid_in_kernel:
            beta = BetaForm.TWICE_SIGMOID if a.allow_neg_eigval else BetaForm.SIGMOID
    return Decision(
        problem, split, _sizes(problem, split), pooled, wy, scans, operand_dtype, gate_dtype, state_dtype,
        padding=wy.head_dim_k - problem.K,
        as_is=_as_is(problem, a, scans, gate_dtype, wy.head_dim_k) if a is not None and problem.arch else NOTHING_GIVEN,
        scale=problem.K**-0.5 if a is None or a.scale is None else float(a.scale),
        lower_bound=0.0 if a is None or a.lower_bound is None else float(a.lower_bound),
        gate=gate, beta=beta, null_index=-1 if a is None or a.null_index is None else int(a.null_index),
        normalize=a is not None and a.use_qk_l2norm_in_kernel,
        whole_v=len(scans) == 1 and scans[0].spec.head_dim_v == problem.V,
    )  # fmt: skip


# -- what is kept --------------------------------------------------------------------------------------------------------

_known: Known[Decision] = Known()


def key_of(op: Op, a: Arguments) -> object:
    """All that checks and decisions of an eager call depend on; None where they depend on more, or the call is not plain.

    Not plain: a subclass of Tensor, a gradient to record, or values to check on the device (KDA_TL_CHECK).
    """
    if check_setting() not in UNCHECKED:
        return None
    key: list[object] = [op.name]
    if a.q is None or not traits(key, (*a[:11], a.state_indices), aligned=4):
        return None
    scale, lower_bound, segments, null_index = a.scale, a.lower_bound, a.intracard_segments, a.null_index
    key += a[14:21]
    try:
        key += (
            scale, lower_bound, segments, null_index, type(scale), type(lower_bound), type(segments), type(null_index),
            dispatcher.device_arch(a.q.device), registry_setting(),
        )  # fmt: skip
    except UnsupportedDevice:
        return None
    if a.cu_seqlens is not None or a.cu_seqlens_cpu is not None:
        return tuple(key) if offsets_known(key, a.cu_seqlens, a.cu_seqlens_cpu) else None
    return tuple(key)


known, once = _known.get, _known.once


# -- decisions -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _specs(
    rule: Rule, K: int, V: int, dtype: torch.dtype, gate_dtype: torch.dtype, state_dtype: torch.dtype
) -> tuple[ChunkWySpec, tuple[Scan, ...], torch.dtype]:
    """chunk_wy, the scans, and the dtype of the workspace."""
    name, state = _name(dtype), _name(state_dtype)
    K = shipped_k(rule, name, K)
    wy = ChunkWySpec(K, CHUNK_SIZE, name, _name(gate_dtype), rule.decay, rule.delta, rule.read_first)
    scans = []
    for first, columns, size in v_runs(rule, name, V):
        spec = ChunkScanSpec(K, size, CHUNK_SIZE, name, state, rule.delta)
        scans.append(Scan(first, columns, spec, *intracard_specs_of(spec)))
    return wy, tuple(scans), getattr(torch, wy.operand_dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=256)
def intracard_specs_of(scan: ChunkScanSpec) -> tuple[IntracardPreScanSpec, IntracardMergeSpec]:
    """What cuts the sequences that `scan` walks."""
    K, V, C = scan.head_dim_k, scan.head_dim_v, scan.chunk_size
    return IntracardPreScanSpec(K, V, C, scan.dtype, scan.delta), IntracardMergeSpec(K, V, C, delta=scan.delta)


def _gate_dtype(problem: Problem, a: Arguments | None) -> torch.dtype:
    """Of g and beta in the kernel: their own where both have one that ships, else float32."""
    given = () if a is None else tuple(x.dtype for x in (a.g, a.beta) if x is not None)
    shipped = gate_dtypes(problem.rule, _name(problem.kernel_dtype))
    return given[0] if given and len(set(given)) == 1 and _name(given[0]) in shipped else torch.float32


def _split(problem: Problem, a: Arguments | None, pool: torch.dtype | None, only_whole: bool) -> SplitInfo:
    """How the sequences of a call are cut: `kda_tl.ops.intracard`. only_whole: kernels take the pool only if nothing is cut."""
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
    for scan in scans:
        if not ships(scan.pre_scan, scan.merge, is_cpu):
            spec = scan.spec
            missing = f"no kernels that cut K = {spec.head_dim_k}, V = {spec.head_dim_v} in {spec.dtype}"
            missing += " with the delta correction" if spec.delta else " without the delta correction"
            if forced is not None:
                raise ValueError(f"intracard_segments must be None or 1 here, there are {missing}, got {forced}")
            return SplitInfo(1, whole, f"there are {missing}")
    longest, total = whole, whole * problem.N
    chunks: tuple[int, ...] | None = (whole,)
    if problem.packed:
        offsets = None if a is None or a.cu_seqlens is None else host_offsets(a.cu_seqlens, a.cu_seqlens_cpu)
        if offsets is None:
            total, chunks = problem.slots, None
        else:
            chunks = tuple(-(-(last - first) // CHUNK_SIZE) for first, last in itertools.pairwise(offsets))
            longest, total = max(chunks), sum(chunks)
    scan = scans[0]
    K, V = scan.spec.head_dim_k, scan.spec.head_dim_v
    segment_bytes = 4 * K * (2 * V + (K if scan.spec.delta else 1))
    work = Work(problem.N, problem.HV, longest, total, chunks, not problem.packed, segment_bytes, only_whole)
    count = multiprocessors(torch.device("cpu") if a is None else a.q.device, problem.arch)
    of_pool = replace(scan.spec, state_dtype=_name(pool or torch.float32))
    return plan_split(work, device_of(scan.spec, of_pool, scan.pre_scan, scan.merge, problem.arch, count), forced)


def _sizes(problem: Problem, split: SplitInfo) -> Sizes:
    scans = split.scans(problem.N)
    counts = {"chunk_wy": problem.slots, "chunk_scan": scans, "intracard_pre_scan": scans, "intracard_merge": problem.N}
    return Sizes(**{kernel: problem_size(kernel, count, problem.HV) for kernel, count in counts.items()})


def _pool_dtype(problem: Problem, a: Arguments) -> torch.dtype | None:
    """Of the caller's pool, where kernels read and write its slots, sequences being whole; else None."""
    pool = a.initial_state
    if a.state_indices is None or pool is None or pool.is_neg() or problem.N == 0 or problem.T == 0:
        return None
    taken = problem.K == problem.V == 128 and _name(pool.dtype) in POOL_DTYPES[_name(problem.kernel_dtype)]
    return pool.dtype if taken else None


def as_they_are(tensor: Tensor) -> bool:
    """Whether kernels can read [B, T, heads, D] where it lies: contiguous rows at multiples of 16 bytes, any other strides."""
    batch, token, head, last = tensor.stride()
    aligned = ((batch | token | head) * tensor.itemsize | tensor.data_ptr()) % 16 == 0
    return last == 1 and aligned and not tensor.is_neg()


def _as_is(
    problem: Problem, a: Arguments, scans: tuple[Scan, ...], gate_dtype: torch.dtype, K: int
) -> tuple[bool, bool, bool, bool, bool]:
    dtype, whole_k = problem.kernel_dtype, problem.K == K
    whole_v = len(scans) == 1 and scans[0].spec.head_dim_v == problem.V
    q, k = (whole_k and x.dtype == dtype and as_they_are(x) for x in (a.q, a.k))
    v = whole_v and a.v.dtype == dtype and as_they_are(a.v)
    g = a.g is not None and a.g.dtype == gate_dtype and not a.g.is_neg()
    if g and a.g is not None and problem.rule.decay == "per_key":
        g = whole_k and as_they_are(a.g)
    beta = a.beta is not None and a.beta.dtype == gate_dtype and not a.beta.is_neg()
    return q, k, v, g, beta
