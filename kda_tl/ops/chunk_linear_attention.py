"""chunk_linear_attention: linear attention over whole sequences, with or without its normalizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.checks import check_dtype, check_tensors
from kda_tl.ops.offered import DTYPES, MAX_HEAD_DIM_V
from kda_tl.ops.prefill_checks import CHUNK_SIZE, check_names
from kda_tl.ops.prefill_library import register, run
from kda_tl.runtime.ranges import annotate_op
from kda_tl.specs.rules import Rule

__all__ = ["CHUNK_LINEAR_ATTENTION", "chunk_linear_attention", "chunk_linear_attn"]

CHUNK_LINEAR_ATTENTION = Op("chunk_linear_attention", Rule("none", delta=False))
EPSILON = 1e-10  # added to the normalizer, as flash-linear-attention does

register(CHUNK_LINEAR_ATTENTION)


def chunk_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    state_v_first: bool = False,
    return_intermediate_states: bool = False,
    chunk_size: int | None = CHUNK_SIZE,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int | None = None,
    intracard_segments: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Linear attention: S <- S + k v^T, o = scale S^T q (arXiv 2006.16236).

    The first eight arguments are those of flash-linear-attention 0.6 (`chunk_linear_attn`), which has HV = H. Arguments,
    results and errors that are not named here are those of `chunk_kda`.

    Args:
        v: [B, T, HV, V], V up to 255 with `normalize`.
        normalize: divide o by scale q . z, where z is the sum of all keys so far; needs keys and queries for which that is
            not near zero.
        initial_state: with `normalize` a pair (state, z [N, 1, HV, K]), either of which may be None, or the state alone.

    Returns:
        o, and the final state where it is asked for; with `normalize` that is a pair as initial_state.

    Raises:
        ValueError: also where `normalize` meets `state_indices`, `return_intermediate_states` or `state_v_first`.
    """
    a = arguments(
        q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens, cu_seqlens_cpu, state_v_first=state_v_first,
        return_intermediate_states=return_intermediate_states, chunk_size=chunk_size, state_indices=state_indices,
        has_initial_state=has_initial_state, null_index=null_index, intracard_segments=intracard_segments, **kwargs,
    )  # fmt: skip
    results: tuple[Tensor, Any] = run(CHUNK_LINEAR_ATTENTION, a)
    if not normalize:
        return results
    o, state = results
    o = (o[..., :-1].float() / (o[..., -1:].float() + EPSILON)).to(v.dtype)
    return o, None if state is None else (state[..., :-1].contiguous(), state[..., -1].unsqueeze(1).contiguous())


def _arguments(
    join: Callable[[Tensor, Tensor, torch.dtype], Tensor],
    /,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    state_v_first: bool = False,
    return_intermediate_states: bool = False,
    chunk_size: int | None = CHUNK_SIZE,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int | None = None,
    intracard_segments: int | None = None,
    **kwargs: Any,
) -> Arguments:
    """What the kernels run. The normalizer is one more column of v, all ones: its column of the state is z.

    join: of two tensors along the last dim, in a dtype.
    """
    z: Any = None
    state: Any = initial_state
    if normalize:
        for name, value in (
            ("state_indices", state_indices),
            ("return_intermediate_states", return_intermediate_states),
            ("state_v_first", state_v_first),
        ):
            if value is not None and value is not False:
                raise ValueError(f"{name} needs normalize=False: with it a state is a pair")
        if isinstance(initial_state, tuple):
            if len(initial_state) != 2:
                raise ValueError(f"initial_state must be a pair (state, z) with normalize, got {len(initial_state)} entries")
            state, z = initial_state
        if isinstance(v, torch.Tensor) and v.dim() == 4:
            if v.shape[-1] >= MAX_HEAD_DIM_V:
                raise ValueError(
                    f"V, the last size of v, must be from 1 to {MAX_HEAD_DIM_V - 1} with normalize, got {v.shape[-1]}"
                )
            if (state is not None or z is not None) and isinstance(q, torch.Tensor) and q.dim() == 4:
                state = _with_normalizer(join, state, z, q, v)
            v = join(v, v.new_ones(()).expand((*v.shape[:-1], 1)), v.dtype)
    a = Arguments(
        q=q, k=k, v=v, initial_state=state, has_initial_state=has_initial_state, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, scale=scale, state_v_first=bool(state_v_first),
        output_final_state=bool(output_final_state), return_intermediate_states=bool(return_intermediate_states),
        intracard_segments=intracard_segments, state_indices=state_indices, null_index=null_index,
    )  # fmt: skip
    check_names(CHUNK_LINEAR_ATTENTION, kwargs, chunk_size)
    return a


def _with_normalizer(join: Callable[[Tensor, Tensor, torch.dtype], Tensor], state: Any, z: Any, q: Tensor, v: Tensor) -> Tensor:
    given = state if state is not None else z
    for name, value in (("initial_state", state), ("z, the second of initial_state,", z)):
        if value is None:
            continue
        check_tensors(**{name: value})
        check_dtype(name, value, DTYPES["initial_state"])
        if value.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {value.device}")
    N = given.shape[0] if given.dim() else 0
    HV, K, V = v.shape[2], q.shape[-1], v.shape[3]
    for name, value, layout, shape in (
        ("initial_state", state, "[N, HV, K, V]", (N, HV, K, V)),
        ("z, the second of initial_state,", z, "[N, 1, HV, K]", (N, 1, HV, K)),
    ):
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} must have shape {layout} = {list(shape)}, got {list(value.shape)}")
    zero = given.new_zeros((), dtype=torch.float32)
    state = zero.expand((N, HV, K, V)) if state is None else state
    z = zero.expand((N, HV, K, 1)) if z is None else z.squeeze(1).unsqueeze(-1)
    return join(state, z, torch.float32)


def _joined(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat([x.to(dtype), y.to(dtype)], -1)


def _as_if_joined(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """As `_joined`, for a plan, which looks at shapes alone: no memory, and no numbers either."""
    return x.new_empty((), dtype=dtype).expand((*x.shape[:-1], x.shape[-1] + y.shape[-1]))


arguments = functools.partial(_arguments, _joined)

chunk_linear_attention = annotate_op(chunk_linear_attention, "kda_tl::chunk_linear_attention")
chunk_linear_attention.op = CHUNK_LINEAR_ATTENTION  # type: ignore[attr-defined]
chunk_linear_attention.arguments = functools.partial(_arguments, _as_if_joined)  # type: ignore[attr-defined]
chunk_linear_attn = chunk_linear_attention
