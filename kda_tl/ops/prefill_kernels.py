"""The prefill kernels as Python calls: what they leave unread is filled in here, and nowhere else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_tl.runtime.fused import stand_in
from kda_tl.specs.gates import BetaForm, GateForm

__all__ = [
    "GateOptions",
    "Maps",
    "Pool",
    "Segments",
    "Workspace",
    "launch_chunk_scan",
    "launch_chunk_wy",
    "launch_intracard_merge",
    "launch_intracard_pre_scan",
]

CHUNK = 64
NO_INDEX = -1


class GateOptions(NamedTuple):
    """How chunk_wy reads g, beta, q and k. A_log, dt_bias and bonus are float32 and contiguous."""

    form: GateForm = GateForm.IDENTITY
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float = 0.0
    beta_form: BetaForm = BetaForm.IDENTITY
    normalize: bool = False
    bonus: Tensor | None = None


class Workspace(NamedTuple):
    """What chunk_wy writes and chunk_scan reads. k_decayed and A_inv have no slots where the rule has no delta correction."""

    q_decayed: Tensor  # [slots, HV, C, K] operand dtype
    k_decayed: Tensor
    k_to_end: Tensor
    chunk_decay: Tensor  # [slots, HV, K] float32
    A_inv: Tensor  # [slots, HV, C, C] operand dtype
    P: Tensor

    @classmethod
    def empty(cls, slots: int, HV: int, K: int, dtype: torch.dtype, delta: bool, device: torch.device) -> Workspace:
        """Three allocations: tensors of one shape are slices of one."""
        decay = torch.empty((slots, HV, K), dtype=torch.float32, device=device)
        if not delta:
            q_decayed, k_to_end = torch.empty((2, slots, HV, CHUNK, K), dtype=dtype, device=device).unbind()
            P = torch.empty((slots, HV, CHUNK, CHUNK), dtype=dtype, device=device)
            return cls(q_decayed, q_decayed[:0], k_to_end, decay, P[:0], P)
        q_decayed, k_decayed, k_to_end = torch.empty((3, slots, HV, CHUNK, K), dtype=dtype, device=device).unbind()
        A_inv, P = torch.empty((2, slots, HV, CHUNK, CHUNK), dtype=dtype, device=device).unbind()
        return cls(q_decayed, k_decayed, k_to_end, decay, A_inv, P)

    @staticmethod
    def bytes_per_slot_and_head(K: int, itemsize: int, delta: bool) -> int:
        return (3 if delta else 2) * CHUNK * K * itemsize + 4 * K + (2 if delta else 1) * CHUNK * CHUNK * itemsize


class Pool(NamedTuple):
    """Which slots of a pool the sequences have. null_index, or an index outside the pool: none."""

    indices: Tensor  # [N] int32
    null_index: int = NO_INDEX
    has_initial_state: Tensor | None = None  # [N] uint8


class Segments(NamedTuple):
    """How sequences are cut: `number` segments of `chunks` chunks each at most, and the state before each."""

    number: int
    chunks: int
    states: Tensor  # [N, number, HV, K, V] float32

    @classmethod
    def empty(cls, N: int, number: int, chunks: int, HV: int, K: int, V: int, device: torch.device) -> Segments:
        return cls(number, chunks, torch.empty((N, number, HV, K, V), dtype=torch.float32, device=device))


class Maps(NamedTuple):
    """What intracard_pre_scan writes: of segments, M transposed (or its diagonal) and B of the map S -> M S + B."""

    transitions: Tensor  # [N, cuts, HV, K, K], or [N, cuts, HV, 1, K] without the delta correction; float32
    biases: Tensor  # [N, cuts, HV, K, V] float32

    @classmethod
    def empty(cls, N: int, cuts: int, HV: int, K: int, V: int, delta: bool, device: torch.device) -> Maps:
        if delta and K == V:
            return cls(*torch.empty((2, N, cuts, HV, K, K), dtype=torch.float32, device=device).unbind())
        transitions = torch.empty((N, cuts, HV, K if delta else 1, K), dtype=torch.float32, device=device)
        return cls(transitions, torch.empty((N, cuts, HV, K, V), dtype=torch.float32, device=device))


class _Absent(NamedTuple):
    """Stand-ins for what a launch lacks. No kernel reads them, so they may outlive any memory pool."""

    numbers: Tensor  # [1] float32
    indices: Tensor  # [1] int32
    flags: Tensor  # [1] uint8
    gates: Mapping[torch.dtype, Tensor]  # [1, 1, 1]


@functools.cache
def _absent(device: torch.device) -> _Absent:
    def one(dtype: torch.dtype) -> Tensor:
        return stand_in(torch.zeros(1, dtype=dtype, device=device))

    gates = {dtype: stand_in(one(dtype).view(1, 1, 1)) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    return _Absent(one(torch.float32), one(torch.int32), one(torch.uint8), gates)


@functools.lru_cache(maxsize=256)
def _no_rows(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def launch_chunk_wy(
    kernel: Callable[..., Any], q: Tensor, k: Tensor, g: Tensor | None, beta: Tensor | None, options: GateOptions,
    cu_seqlens: Tensor | None, workspace: Workspace,
) -> None:  # fmt: skip
    """q, k, g, beta as the spec has them; g and beta None where the rule has no decay or no delta correction."""
    absent = _absent(q.device)
    form, A_log, dt_bias, lower_bound, beta_form, normalize, bonus = options
    given = g if g is not None else beta
    no_gate = absent.gates[torch.float32 if given is None else given.dtype]
    kernel(
        q, k, no_gate if g is None else g, no_gate if beta is None else beta,
        absent.numbers if A_log is None else A_log, absent.numbers if dt_bias is None else dt_bias,
        absent.numbers if bonus is None else bonus, absent.indices if cu_seqlens is None else cu_seqlens,
        *workspace,
        lower_bound, int(form), int(beta_form), int(normalize), int(cu_seqlens is None),
    )  # fmt: skip


def launch_chunk_scan(
    kernel: Callable[..., Any], v: Tensor, workspace: Workspace, o: Tensor, scale: float, cu_seqlens: Tensor | None,
    initial_state: Tensor | None, final_state: Tensor | None, *, state_dtype: torch.dtype = torch.float32,
    pool: Pool | None = None, segments: Segments | None = None, states: Tensor | None = None,
) -> None:  # fmt: skip
    """States are [N or slots of the pool, HV, K, V], whatever their strides."""
    B, T, HV, V = v.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K, device = workspace.q_decayed.shape[-1], v.device
    absent = _absent(device)
    if initial_state is None or final_state is None:
        no_state = _no_rows(device, (0, HV, K, V), state_dtype)
    indices, null_index, mask = (absent.indices, NO_INDEX, None) if pool is None else pool
    count, chunks, before = (1, max(1, -(-T // CHUNK)), None) if segments is None else segments
    q_decayed, k_decayed, k_to_end, chunk_decay, A_inv, P = workspace
    kernel(
        v, absent.indices if cu_seqlens is None else cu_seqlens, q_decayed, k_decayed, k_to_end, chunk_decay, A_inv, P, o,
        no_state if initial_state is None else initial_state, no_state if final_state is None else final_state,
        indices, absent.flags if mask is None else mask,
        _no_rows(device, (0, 1, HV, K, V)) if before is None else before,
        _no_rows(device, (0, HV, K, V)) if states is None else states,
        scale, N, int(cu_seqlens is None), int(initial_state is not None), int(mask is not None),
        int(final_state is not None), int(pool is not None), int(states is not None), null_index, count, chunks,
    )  # fmt: skip


def launch_intracard_pre_scan(
    kernel: Callable[..., Any], v: Tensor, workspace: Workspace, cu_seqlens: Tensor | None, segment_chunks: int, maps: Maps,
    every: bool = False,
) -> None:  # fmt: skip
    """Maps of all segments but the last of every sequence; with `every`, of that too."""
    N, cuts = maps.biases.shape[:2]
    kernel(
        v, _absent(v.device).indices if cu_seqlens is None else cu_seqlens, workspace.k_decayed, workspace.k_to_end,
        workspace.chunk_decay, workspace.A_inv, maps.transitions, maps.biases, N, int(cu_seqlens is None), cuts,
        segment_chunks, int(every),
    )  # fmt: skip


def launch_intracard_merge(
    kernel: Callable[..., Any], maps: Maps, T: int, cu_seqlens: Tensor | None, initial_state: Tensor | None,
    segments: Segments, *, state_dtype: torch.dtype = torch.float32, pool: Pool | None = None,
) -> None:  # fmt: skip
    """Fills segments.states. T: tokens of a batch row; the initial state as in `launch_chunk_scan`."""
    N, _, HV, K, V = segments.states.shape
    device = segments.states.device
    absent = _absent(device)
    indices, null_index, mask = (absent.indices, NO_INDEX, None) if pool is None else pool
    kernel(
        maps.transitions, maps.biases, absent.indices if cu_seqlens is None else cu_seqlens,
        _no_rows(device, (0, HV, K, V), state_dtype) if initial_state is None else initial_state,
        indices, absent.flags if mask is None else mask,
        segments.states, T, N, int(cu_seqlens is None), int(initial_state is not None), int(mask is not None),
        int(pool is not None), null_index, segments.chunks,
    )  # fmt: skip
