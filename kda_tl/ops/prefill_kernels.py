"""The prefill kernels as Python calls: what they leave unread is filled in here, and nowhere else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class GateOptions:
    """How chunk_wy reads g, beta, q and k. A_log, dt_bias and bonus are float32 and contiguous."""

    form: GateForm = GateForm.IDENTITY
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float = 0.0
    beta_form: BetaForm = BetaForm.IDENTITY
    normalize: bool = False
    bonus: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Workspace:
    """What chunk_wy writes and chunk_scan reads. k_decayed and A_inv have no slots where the rule has no delta correction."""

    q_decayed: Tensor  # [slots, HV, C, K] operand dtype
    k_decayed: Tensor
    k_to_end: Tensor
    chunk_decay: Tensor  # [slots, HV, K] float32
    A_inv: Tensor  # [slots, HV, C, C] operand dtype
    P: Tensor

    @classmethod
    def empty(cls, slots: int, HV: int, K: int, dtype: torch.dtype, delta: bool, device: torch.device) -> Workspace:
        def rows(slots: int, *shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty((slots, HV, *shape), dtype=dtype, device=device)

        return cls(
            q_decayed=rows(slots, CHUNK, K),
            k_decayed=rows(slots if delta else 0, CHUNK, K),
            k_to_end=rows(slots, CHUNK, K),
            chunk_decay=rows(slots, K, dtype=torch.float32),
            A_inv=rows(slots if delta else 0, CHUNK, CHUNK),
            P=rows(slots, CHUNK, CHUNK),
        )

    @staticmethod
    def bytes_per_slot_and_head(K: int, itemsize: int, delta: bool) -> int:
        return (3 if delta else 2) * CHUNK * K * itemsize + 4 * K + (2 if delta else 1) * CHUNK * CHUNK * itemsize


@dataclass(frozen=True, eq=False)
class Pool:
    """Which slots of a pool the sequences have. null_index, or an index outside the pool: none."""

    indices: Tensor  # [N] int32
    null_index: int = NO_INDEX
    has_initial_state: Tensor | None = None  # [N] uint8


@dataclass(frozen=True, eq=False)
class Segments:
    """How sequences are cut: `count` segments of `chunks` chunks each at most, and the state before all but the first."""

    count: int
    chunks: int
    states: Tensor  # [N, count, HV, K, V] float32

    @classmethod
    def empty(cls, N: int, count: int, chunks: int, HV: int, K: int, V: int, device: torch.device) -> Segments:
        return cls(count, chunks, torch.empty((N, count, HV, K, V), dtype=torch.float32, device=device))


@dataclass(frozen=True, eq=False)
class Maps:
    """What intracard_pre_scan writes: of segments, M transposed (or its diagonal) and B of the map S -> M S + B."""

    transitions: Tensor  # [N, cuts, HV, K, K], or [N, cuts, HV, 1, K] without the delta correction; float32
    biases: Tensor  # [N, cuts, HV, K, V] float32

    @classmethod
    def empty(cls, N: int, cuts: int, HV: int, K: int, V: int, delta: bool, device: torch.device) -> Maps:
        def rows(*shape: int) -> Tensor:
            return torch.empty((N, cuts, HV, *shape), dtype=torch.float32, device=device)

        return cls(rows(K if delta else 1, K), rows(K, V))


def launch_chunk_wy(
    kernel: Callable[..., Any], q: Tensor, k: Tensor, g: Tensor | None, beta: Tensor | None, options: GateOptions,
    cu_seqlens: Tensor | None, workspace: Workspace,
) -> None:  # fmt: skip
    """q, k, g, beta as the spec has them; g and beta None where the rule has no decay or no delta correction."""
    absent = _nothing(q.device, torch.float32)
    given = g if g is not None else beta
    no_gate = _nothing(q.device, torch.float32 if given is None else given.dtype).view(1, 1, 1)
    kernel(
        q, k, no_gate if g is None else g, no_gate if beta is None else beta,
        absent if options.A_log is None else options.A_log, absent if options.dt_bias is None else options.dt_bias,
        absent if options.bonus is None else options.bonus, _offsets(cu_seqlens, q.device),
        workspace.q_decayed, workspace.k_decayed, workspace.k_to_end, workspace.chunk_decay, workspace.A_inv, workspace.P,
        options.lower_bound, int(options.form), int(options.beta_form), int(options.normalize), int(cu_seqlens is None),
    )  # fmt: skip


def launch_chunk_scan(
    kernel: Callable[..., Any], v: Tensor, workspace: Workspace, o: Tensor, scale: float, cu_seqlens: Tensor | None,
    initial_state: Tensor | None, final_state: Tensor | None, *, state_dtype: torch.dtype = torch.float32,
    pool: Pool | None = None, segments: Segments | None = None, states: Tensor | None = None,
) -> None:  # fmt: skip
    """States are [N or slots of the pool, HV, K, V], whatever their strides."""
    HV, K, V = v.shape[2], workspace.q_decayed.shape[-1], v.shape[-1]
    N = v.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    device = v.device
    no_state = _nothing(device, state_dtype).expand(0, HV, K, V)
    no_index = _nothing(device, torch.int32)
    mask = None if pool is None else pool.has_initial_state
    kernel(
        v, _offsets(cu_seqlens, device), workspace.q_decayed, workspace.k_decayed, workspace.k_to_end, workspace.chunk_decay,
        workspace.A_inv, workspace.P, o,
        no_state if initial_state is None else initial_state, no_state if final_state is None else final_state,
        no_index if pool is None else pool.indices, _nothing(device, torch.uint8) if mask is None else mask,
        _no_rows(device, (0, 1, HV, K, V)) if segments is None else segments.states,
        _no_rows(device, (0, HV, K, V)) if states is None else states,
        scale, N, int(cu_seqlens is None), int(initial_state is not None), int(mask is not None),
        int(final_state is not None), int(pool is not None), int(states is not None),
        NO_INDEX if pool is None else pool.null_index,
        1 if segments is None else segments.count,
        max(1, -(-v.shape[1] // CHUNK)) if segments is None else segments.chunks,
    )  # fmt: skip


def launch_intracard_pre_scan(
    kernel: Callable[..., Any], v: Tensor, workspace: Workspace, cu_seqlens: Tensor | None, segment_chunks: int, maps: Maps,
    every: bool = False,
) -> None:  # fmt: skip
    """Maps of all segments but the last of every sequence; with `every`, of that too."""
    N, cuts = maps.biases.shape[:2]
    kernel(
        v, _offsets(cu_seqlens, v.device), workspace.k_decayed, workspace.k_to_end, workspace.chunk_decay, workspace.A_inv,
        maps.transitions, maps.biases, N, int(cu_seqlens is None), cuts, segment_chunks, int(every),
    )  # fmt: skip


def launch_intracard_merge(
    kernel: Callable[..., Any], maps: Maps, T: int, cu_seqlens: Tensor | None, initial_state: Tensor | None,
    segments: Segments, *, state_dtype: torch.dtype = torch.float32, pool: Pool | None = None,
) -> None:  # fmt: skip
    """Fills segments.states. T: tokens of a batch row; the initial state as in `launch_chunk_scan`."""
    N, _, HV, K, V = segments.states.shape
    device = segments.states.device
    mask = None if pool is None else pool.has_initial_state
    kernel(
        maps.transitions, maps.biases, _offsets(cu_seqlens, device),
        _nothing(device, state_dtype).expand(0, HV, K, V) if initial_state is None else initial_state,
        _nothing(device, torch.int32) if pool is None else pool.indices,
        _nothing(device, torch.uint8) if mask is None else mask,
        segments.states, T, N, int(cu_seqlens is None), int(initial_state is not None), int(mask is not None),
        int(pool is not None), NO_INDEX if pool is None else pool.null_index, segments.chunks,
    )  # fmt: skip


@functools.cache
def _nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[1], for what a kernel does not read."""
    return torch.zeros(1, dtype=dtype, device=device)


@functools.lru_cache(maxsize=256)
def _no_rows(device: torch.device, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def _offsets(cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """cu_seqlens [N + 1] int32, contiguous; a dense batch has an element that nobody reads."""
    return _nothing(device, torch.int32) if cu_seqlens is None else cu_seqlens
