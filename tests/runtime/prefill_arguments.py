"""Arguments of both prefill kernels by name, in call order, as the ops hand them over."""

from __future__ import annotations

from typing import Any

import torch

from kda_tl.ops.prefill_kernels import GateOptions, Workspace, launch_chunk_scan, launch_chunk_wy

WORKSPACE = ("q_decayed", "k_decayed", "k_to_end", "chunk_decay", "A_inv", "P")
NAMES = {
    "chunk_wy": (
        "q", "k", "g", "beta", "A_log", "dt_bias", "bonus", "cu_seqlens", *WORKSPACE,
        "lower_bound", "gate_form", "beta_form", "normalize", "uniform",
    ),
    "chunk_scan": (
        "v", "cu_seqlens", *WORKSPACE, "o", "initial_state", "final_state", "state_indices", "has_initial_state",
        "segment_states", "states", "scale", "num_seqs", "uniform", "load_state", "masked", "store_final_state", "indexed",
        "store_states", "null_index", "segments", "segment_chunks",
    ),
}  # fmt: skip


def prefill_arguments(
    B: int, T: int, H: int, HV: int, lengths: list[int] | None = None, dtype: torch.dtype = torch.float32,
    operand_dtype: torch.dtype = torch.float32,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Of a KDA problem with random inputs and outputs full of NaN."""
    generator = torch.Generator().manual_seed(0)
    N = B if lengths is None else len(lengths)
    slots = B * -(-T // 64) if lengths is None else T // 64 + N
    cu_seqlens = None
    if lengths is not None:
        cu_seqlens = torch.tensor([sum(lengths[:n]) for n in range(N + 1)], dtype=torch.int32)
    q, k = (torch.randn(B, T, H, 128, generator=generator).div(12).to(dtype) for _ in range(2))
    v = torch.randn(B, T, HV, 128, generator=generator).to(dtype)
    g, beta = -torch.rand(B, T, HV, 128, generator=generator), torch.rand(B, T, HV, generator=generator)
    workspace = Workspace.empty(slots, HV, 128, operand_dtype, True, torch.device("cpu"))
    for tensor in workspace:
        tensor.fill_(torch.nan)
    o, initial = torch.full_like(v, torch.nan), torch.randn(N, HV, 128, 128, generator=generator)
    calls: dict[str, tuple[Any, ...]] = {}
    launch_chunk_wy(lambda *a: calls.update(chunk_wy=a), q, k, g, beta, GateOptions(), cu_seqlens, workspace)
    launch_chunk_scan(
        lambda *a: calls.update(chunk_scan=a), v, workspace, o, 0.5, cu_seqlens, initial, torch.full_like(initial, torch.nan)
    )
    return {kernel: dict(zip(NAMES[kernel], arguments, strict=True)) for kernel, arguments in calls.items()}
