"""chunk_wy alone on the cpu target, slot by slot against the reference's intermediates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_inputs
import pytest
import torch
from kernel_inputs import PACK, PROBLEMS, Problem, relative_error

from kda_tl.reference import chunk_kda
from kda_tl.registry import Registry
from kda_tl.runtime.loader import load
from kda_tl.specs.kernels import ChunkWySpec

LIMIT = 2e-6


@pytest.fixture(scope="module")
def chunk_wy(cpu_registry: Registry) -> Callable[..., Any]:
    key = ChunkWySpec(dtype="float32").key
    path = cpu_registry.find("cpu", key)
    assert path is not None
    return load(cpu_registry, path, "cpu", key)


def run(chunk_wy, problem: Problem, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    A_inv, P = problem.workspace(), problem.workspace()
    chunk_wy(x["q"], x["k"], x["g"], x["beta"], problem.cu_seqlens, A_inv, P, problem.uniform)
    return A_inv, P


def check(problem: Problem, x: dict[str, torch.Tensor], A_inv: torch.Tensor, P: torch.Tensor) -> None:
    _, _, truth = chunk_kda(**x, cu_seqlens=problem.offsets)
    chunks = list(zip(truth.sequence.tolist(), truth.start.tolist(), truth.length.tolist()))
    assert sum(length for _, _, length in chunks) == problem.B * (problem.T or sum(problem.lengths or ()))
    first = problem.offsets or [0] * problem.B
    used = [problem.slot(n, (start - first[n]) // kernel_inputs.C) for n, start, _ in chunks]
    assert len(set(used)) == len(used)
    for index, slot in enumerate(used):
        for head in range(problem.HV):
            assert relative_error(A_inv[slot, head], truth.A_inv[index, head]) < LIMIT, (slot, head)
            # Absolute too: the product of two unit rows may cancel.
            difference = (P[slot, head].double() - truth.P[index, head]).norm()
            assert difference < LIMIT * truth.P[index, head].norm().clamp(min=1.0), (slot, head)
        # Exact zeros: above the diagonal no later row may leak in, and past the end chunk_scan multiplies whatever is there.
        length = chunks[index][2]
        assert not A_inv[slot].triu(1).any() and not P[slot].triu(1).any()
        assert not A_inv[slot, :, length:].any() and not P[slot, :, length:].any()
    untouched = sorted(set(range(len(A_inv))) - set(used))
    assert A_inv[untouched].isnan().all() and P[untouched].isnan().all()


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_workspace_against_the_reference(chunk_wy, problem: Problem) -> None:
    x = problem.inputs()
    check(problem, x, *run(chunk_wy, problem, x))


def test_strides_are_honoured(chunk_wy) -> None:
    problem = Problem(B=2, T=70, H=2, HV=4, gate="strong")
    x = problem.inputs()
    strided = {}
    for name, tensor in x.items():
        buffer = torch.full((*(size + 3 for size in tensor.shape[:3]), *tensor.shape[3:]), torch.nan)
        strided[name] = buffer[tuple(slice(1, 1 + size) for size in tensor.shape[:3])]
        strided[name].copy_(tensor)
    strided["beta"] = x["beta"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    A_inv, P = run(chunk_wy, problem, strided)
    check(problem, x, A_inv, P)
    assert all(torch.equal(a, b) for a, b in zip(run(chunk_wy, problem, x), (A_inv, P)))


@pytest.mark.parametrize("row", [0, 15, 16, 32, 47, 63])
def test_a_mask_at_a_block_boundary(chunk_wy, row: int) -> None:
    problem = Problem(T=64)
    x = problem.inputs()
    x["g"][:, row] = -1000.0
    A_inv, P = run(chunk_wy, problem, x)
    check(problem, x, A_inv, P)
    assert row == 0 or not P[0, 0, row:, :row].any()
    assert P[0, 0, row, row] != 0


def test_rows_do_not_depend_on_the_future(chunk_wy) -> None:
    problem = Problem(T=64, gate="strong")
    x = problem.inputs()
    before = run(chunk_wy, problem, x)
    for t in (1, 16, 22, 33, 63):
        changed = {name: tensor.clone() for name, tensor in x.items()}
        for name in ("q", "k", "g", "beta"):
            changed[name][:, t:] *= 1.5
        after = run(chunk_wy, problem, changed)
        for a, b in zip(before, after):
            assert torch.equal(a[0, 0, :t], b[0, 0, :t])
            assert not torch.equal(a[0, 0, t:], b[0, 0, t:])


def test_nan_stays_in_its_chunk_and_head(chunk_wy) -> None:
    problem = Problem(lengths=PACK, H=2, HV=4)
    x = problem.inputs()
    before = run(chunk_wy, problem, x)
    token, head = sum(PACK[:5]) + 7, 1  # in the 65 token sequence
    x["g"][0, token, head] = torch.nan
    x["beta"][0, token, head] = torch.inf
    after = run(chunk_wy, problem, x)
    for a, b in zip(before, after):
        spoilt = torch.zeros(a.shape[:2], dtype=torch.bool)
        spoilt[problem.slot(5, 0), head] = True
        assert torch.equal(a[~spoilt].nan_to_num(7.0), b[~spoilt].nan_to_num(7.0))
        assert not b[spoilt].isfinite().all()
