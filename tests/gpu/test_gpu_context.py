"""Context parallelism over NCCL: two processes, a GPU each, against the float64 recurrence of the whole sequences."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunk_kda_cases import TOLERANCE, Case, make_inputs, nan_filled_memory, relative_error

import kda_tl
from kda_tl.distributed import ContextParallel, ContextParallelError, Layout
from kda_tl.reference import recurrent_kda

pytestmark = pytest.mark.gpu

RANKS = 2
TOKENS = ("q", "k", "v", "g", "beta")
OPS = {"chunk_kda": kda_tl.chunk_kda, "chunk_gdn": kda_tl.chunk_gdn}
PACK = [0, 1000, 1000, 1333, 2000]
CASES = {
    "pack": (Layout.packed(PACK, [0, 1100, 2000]), Case("pack", lengths=(1000, 0, 333, 667), gate="weak")),
    "one-sequence": (Layout.packed([0, 2000], [0, 777, 2000]), Case("one", lengths=(2000,), gate="masked")),
    "batch": (Layout.dense(3, [0, 65, 300]), Case("batch", T=300, B=3, gate="strong")),
    "empty-rank": (Layout.packed([0, 300], [0, 300, 300]), Case("empty", lengths=(300,), gate="weak")),
}


def inputs(case: Case, op: str) -> dict[str, Any]:
    x = make_inputs(case, "cpu", seed=1)
    if op == "chunk_gdn":
        x["g"] = x["g"][..., 0]
    return {name: x[name].cuda() for name in (*TOKENS, "initial_state")}


def check(name: str, op: str) -> None:
    layout, case = CASES[name]
    context = ContextParallel(layout)
    x = inputs(case, op)
    bounds = None
    if case.lengths is not None:
        bounds = [0]
        for length in case.lengths:
            bounds.append(bounds[-1] + length)
    part = {n: context.take(x[n], bounds) for n in TOKENS}
    rows = [x["initial_state"][n] if here else torch.full_like(x["initial_state"][0], torch.nan)
            for n, here in zip(context.sequences, context.starts_here)]  # fmt: skip
    state = torch.stack(rows) if rows else x["initial_state"][:0]
    with nan_filled_memory(), torch.no_grad():
        o, final = OPS[op](**part, initial_state=state, output_final_state=True, cp_context=context)
    o_true, final_true = recurrent_kda(**x, cu_seqlens=bounds)
    o_true = context.take(o_true, bounds)
    for n, piece in enumerate(context.pieces):
        at = slice(context.offsets[n], context.offsets[n + 1])
        mine, truth = (o[0, at], o_true[0, at]) if context.is_packed else (o[n], o_true[n])
        assert relative_error(mine, truth) < TOLERANCE, f"{name} {op}: o of {piece} on rank {context.rank}"
        if context.ends_here[n]:
            error = relative_error(final[n], final_true[piece.sequence])
            assert error < TOLERANCE, f"{name} {op}: state of {piece} on rank {context.rank}: {error}"


def check_failure(rank: int) -> None:
    """Rank 1 fails; then both go on."""
    x = inputs(CASES["one-sequence"][1], "chunk_kda")
    context = ContextParallel(CASES["one-sequence"][0])
    part = {name: context.take(x[name], [0, 2000]) for name in TOKENS}
    if rank == 1:
        part["beta"] = part["beta"][..., :1]
    try:
        with torch.no_grad():
            kda_tl.chunk_kda(**part, cp_context=context)
    except ContextParallelError as error:
        assert rank == 0 and error.ranks == (1,) and "beta must have shape" in str(error)
    except ValueError as error:
        assert rank == 1 and "beta must have shape" in str(error)
    else:
        raise AssertionError("nothing was raised")
    check("pack", "chunk_kda")


def work(rank: int, folder: str, backend: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=timedelta(seconds=90)
    )
    for name in CASES:
        for op in OPS:
            check(name, op)
    check_failure(rank)
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"fewer than {RANKS} CUDA devices")
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_two_devices(backend: str, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, args=(str(tmp_path), backend), nprocs=RANKS)
