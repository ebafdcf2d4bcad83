"""What the prefill ops take, as data: dtypes of every argument, head dims, chunk sizes."""

from __future__ import annotations

import torch

__all__ = [
    "CHUNK_SIZES",
    "DTYPES",
    "MAX_HEAD_DIM_K",
    "MAX_HEAD_DIM_V",
    "SHIPPED_K",
    "SHIPPED_V",
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
SHIPPED_K = (64, 128)  # a K between them is padded with zeros; one past the last needs a larger kernel
SHIPPED_V = (64, 128)  # columns of V are independent: a larger V is run in pieces of the last
MAX_HEAD_DIM_K = max(SHIPPED_K)
MAX_HEAD_DIM_V = 256


def shipped_k(K: int) -> int:
    """The K of the kernels that serve a head dim of 1 to MAX_HEAD_DIM_K."""
    return next(size for size in SHIPPED_K if size >= K)


def v_runs(V: int) -> list[tuple[int, int, int]]:
    """(first column, columns, V of the kernel) of every run that covers V, 1 to MAX_HEAD_DIM_V."""
    runs = []
    for first in range(0, V, SHIPPED_V[-1]):
        columns = min(V - first, SHIPPED_V[-1])
        runs.append((first, columns, next(size for size in SHIPPED_V if size >= columns)))
    return runs


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def dtype_table() -> str:
    """The accepted dtypes as a Markdown table, one argument a row."""
    return "\n".join(["| argument | dtype |", "|---|---|", *(f"| {n} | {dtype_names(d)} |" for n, d in DTYPES.items())])
