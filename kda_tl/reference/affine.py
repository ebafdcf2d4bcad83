"""The affine maps of chunks and segments: S_out = transition @ S_in + bias, and what they are for.

One token maps S to (I - beta k k^T) Diag(e^g) S + beta k v^T, or to Diag(e^g) S + k v^T without the delta correction. Both
are affine in S, so a chunk, a segment and a whole sequence are too, and maps of neighbours compose. Split a sequence into
segments: the maps of all segments can be had at once, a short serial fold turns them into the state before each, and then
all segments run at once from their true initial states. Nothing is truncated: the transition of a strong gate is a small
matrix, not a zero one. Intracard and context parallelism are this, across blocks and across ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ._inputs import CumulativeLengths, check_inputs
from .chunk import chunk_rule, chunk_wy, decay_to_end

AffineMap = tuple[Tensor, Tensor]


def chunk_affine(k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, delta: bool = True) -> AffineMap:
    """(transition, bias): the state after the chunk is transition @ S + bias for any incoming state S [..., K, V].

    k [..., C, K], v [..., C, V]; g as in `decay_products`, per step; beta [..., C], read with `delta` only, 1 if left out.
    Any C >= 1, so a whole segment may be one chunk. Returns transition [..., K, K] and bias [..., K, V].
    Derivation: docstring of `kda_tl.reference.chunk`, step 4.
    """
    if k.shape[-2] < 1:
        raise ValueError("chunk_affine needs at least one token (the map of none is the identity and zero)")
    k_to_end = (k * decay_to_end(g).exp()).transpose(-1, -2)
    decay = torch.diag_embed(g.sum(-2).exp().expand(*k.shape[:-2], k.shape[-1]))
    if not delta:
        return decay, k_to_end @ v
    _, _, W, U = chunk_wy(k, v, g, torch.ones_like(k[..., 0]) if beta is None else beta)
    return decay - k_to_end @ W, k_to_end @ U


def compose(later: AffineMap, earlier: AffineMap) -> AffineMap:
    """The affine map that applies `earlier`, then `later`; each is (transition [..., K, K], bias [..., K, V]).

    M1 (M0 S + B0) + B1 = (M1 M0) S + (M1 B0 + B1). Associative, not commutative; the unit is (I, 0).
    """
    (M1, B1), (M0, B0) = later, earlier
    return M1 @ M0, M1 @ B0 + B1


def segment_affine(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, delta: bool = True, chunk_size: int = 64
) -> AffineMap:
    """`chunk_affine` of a segment of any length, none included, chunk after chunk: the pre-scan of one segment."""
    K, V = k.shape[-1], v.shape[-1]
    M: Tensor = torch.eye(K, dtype=k.dtype, device=k.device).expand(*k.shape[:-2], K, K)
    B = k.new_zeros(*k.shape[:-2], K, V)
    for start in range(0, k.shape[-2], chunk_size):
        part = slice(start, start + chunk_size)
        beta_part = None if beta is None else beta[..., part]
        M, B = compose(chunk_affine(k[..., part, :], v[..., part, :], g[..., part, :], beta_part, delta), (M, B))
    return M, B


def merge_affine(state: Tensor, transitions: Tensor, biases: Tensor) -> Tensor:
    """The state before each of a sequence's segments, and after the last: what the merge makes of the pre-scan.

    state [..., K, V] before the first segment; transitions [segments, ..., K, K]; biases [segments, ..., K, V].
    Returns [segments + 1, ..., K, V].
    """
    states = [state]
    for M, B in zip(transitions, biases):
        states.append(M @ states[-1] + B)
    return torch.stack(states)


def sequence_affine(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    chunk_size: int = 64,
    dtype: torch.dtype = torch.float64,
    *,
    decay: str,
    delta: bool,
) -> AffineMap:
    """(transition [N, HV, K, K], bias [N, HV, K, V]) of every sequence of a batch or pack; arguments as in `recurrent_rule`.

    The identity and zero for an empty sequence. What one rank, or one segment of a pack, hands to the others.

    The chunk form itself is run on states [I | 0] with values [0 | v]: each column of a state is mapped alone.
    """
    x = check_inputs(k, k, v, g, beta, None, decay, delta, False, None, None, cu_seqlens, False, dtype)
    N, (HV, K), V = len(x.lengths), x.g.shape[1:], v.shape[-1]
    unit = torch.eye(K, dtype=dtype, device=k.device).expand(N, HV, K, K)
    extended = torch.cat([v.new_zeros(*v.shape[:-1], K), v], -1)
    _, maps, _ = chunk_rule(
        k, k, extended, g, beta, None, None, torch.cat([unit, unit.new_zeros(N, HV, K, V)], -1), cu_seqlens, False,
        chunk_size, dtype, decay=decay, delta=delta,
    )  # fmt: skip
    return maps[..., :K], maps[..., K:]


def segmented_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    bonus: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    segment_size: int | Sequence[Sequence[int]] = 256,
    chunk_size: int = 64,
    dtype: torch.dtype = torch.float64,
    *,
    decay: str,
    delta: bool,
    read_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """`recurrent_rule` in three steps: maps of all segments, the state before each of them, then all segments at once.

    segment_size: tokens per segment; or for each sequence its inner cuts, as ascending token offsets from its start.
    Other arguments, results and errors are those of `recurrent_rule`.
    """
    x = check_inputs(q, k, v, g, beta, bonus, decay, delta, read_first, scale, initial_state, cu_seqlens, state_v_first, dtype)
    shape = v.shape
    if isinstance(segment_size, int):
        if segment_size < 1:
            raise ValueError(f"segment_size must be a positive number of tokens, got {segment_size}")
        cuts: Sequence[Sequence[int]] = [range(segment_size, length, segment_size) for length in x.lengths]
    else:
        cuts = segment_size
        if len(cuts) != len(x.lengths):
            raise ValueError(f"segment_size must name the cuts of {len(x.lengths)} sequences, got {len(cuts)}")
    flat_bounds: list[list[int]] = []
    for start, length, inner in zip(x.starts, x.lengths, cuts):
        bounds = [0, *inner, length]
        if any(b < a for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"segment_size must cut a sequence of {length} tokens in ascending order, got {list(inner)}")
        flat_bounds.append([start + bound for bound in bounds])

    # Sequences lie one after another in the flat tokens, so all segments of all of them are one pack.
    pack = [0, *itertools.chain.from_iterable(bounds[1:] for bounds in flat_bounds)]
    q, k, v, beta = x.q.unsqueeze(0), x.k.unsqueeze(0), x.v.unsqueeze(0), x.beta.unsqueeze(0) if delta else None
    g = None if decay == "none" else x.g[..., 0].unsqueeze(0) if decay == "scalar" else x.g.unsqueeze(0)
    M, B = sequence_affine(k, v, g, beta, pack, chunk_size, dtype, decay=decay, delta=delta)

    initial_states, final_states, segment = [], [], 0
    for n, bounds in enumerate(flat_bounds):
        own = slice(segment, segment + len(bounds) - 1)
        states = merge_affine(x.state[n], M[own], B[own])
        initial_states.append(states[:-1])
        final_states.append(states[-1])
        segment = own.stop
    starts = torch.cat(initial_states) if initial_states else x.state
    o, _, _ = chunk_rule(
        q, k, v, g, beta, bonus, x.scale, starts, pack, False, chunk_size, dtype,
        decay=decay, delta=delta, read_first=read_first,
    )  # fmt: skip
    final_state = torch.stack(final_states) if final_states else x.state
    return o.reshape(shape), (final_state.transpose(-1, -2) if state_v_first else final_state).contiguous()
