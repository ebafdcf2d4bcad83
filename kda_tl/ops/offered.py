"""What the prefill ops take, as data: dtypes of every argument, head dims, chunk sizes."""

from __future__ import annotations

import torch

from kda_tl.specs.prefill import shipped_head_dims
from kda_tl.specs.rules import Rule

__all__ = [
    "CHUNK_SIZES",
    "DTYPES",
    "MAX_HEAD_DIM_K",
    "MAX_HEAD_DIM_V",
    "dtype_names",
    "dtype_table",
    "shipped_k",
    "v_runs",
]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INDICES = (torch.int32, torch.int64)

# By field of Arguments. q, k and v must agree; o has the dtype of v, a final state is float32, a pool keeps its own.
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "q": FLOATS,
    "k": FLOATS,
    "v": FLOATS,
    "g": FLOATS,
    "beta": FLOATS,
    "bonus": FLOATS,
    "A_log": FLOATS,
    "dt_bias": FLOATS,
    "initial_state": FLOATS,
    "has_initial_state": (torch.bool,),
    "cu_seqlens": INDICES,
    "cu_seqlens_cpu": INDICES,
    "state_indices": INDICES,
}

CHUNK_SIZES = (64,)
MAX_HEAD_DIM_K = 128  # a smaller K is padded with zeros; a larger one needs a larger kernel
MAX_HEAD_DIM_V = 256  # columns of V are independent: a larger V is run in pieces


def shipped_k(rule: Rule, dtype: str, K: int) -> int:
    """The K of the kernels that serve a head dim of 1 to MAX_HEAD_DIM_K."""
    return next(size for size in shipped_head_dims(rule, dtype) if size >= K)


def v_runs(rule: Rule, dtype: str, V: int) -> list[tuple[int, int, int]]:
    """(first column, columns, V of the kernel) of every run that covers V, 1 to MAX_HEAD_DIM_V."""
    sizes = shipped_head_dims(rule, dtype)
    runs = []
    for first in range(0, V, sizes[-1]):
        columns = min(V - first, sizes[-1])
        runs.append((first, columns, next(size for size in sizes if size >= columns)))
    return runs


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def dtype_table() -> str:
    """The accepted dtypes as a Markdown table, one argument a row."""
    return "\n".join(["| argument | dtype |", "|---|---|", *(f"| {n} | {dtype_names(d)} |" for n, d in DTYPES.items())])
