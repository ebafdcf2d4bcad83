"""What is timed: for every kernel a few sizes, and a small problem whose truth the reference computes.

This is what both halves of the tuner know: the preparing one writes the sizes into its plan, the measuring one makes tensors
of them.
"""

from __future__ import annotations

import torch

from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.decode import RecurrentDecodeSpec
from kda_tl.specs.floors import Problem
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec
from kda_tl.specs.sizes import problem_size
from kda_tl.tuning import problems_decode, problems_prefill
from kda_tl.tuning.problems_case import Case

__all__ = ["check_case", "full_case", "held_out_problems", "problems", "size_of"]

CHECK_SEED, FULL_SEED = 1, 2


def size_of(spec: KernelSpec, problem: Problem) -> int:
    """The number that a schedule is chosen by (`kda_tl.specs.sizes`)."""
    items = problem.sequences
    if isinstance(spec, ChunkWySpec):
        items = problem.chunks(spec.chunk_size)
    elif isinstance(spec, ChunkScanSpec | IntracardPreScanSpec):
        items *= problem.segments
    return problem_size(spec.kernel, items, problem.HV)


def problems(spec: KernelSpec, arch: str) -> list[Problem]:
    """What `spec` is timed on, from small to large; empty where the tuner does not know the kernel."""
    if arch_row(arch).is_cpu:
        return _of_cpu(spec)
    if isinstance(spec, ChunkWySpec):
        return [_prefill(1, tokens, HV, spec) for tokens, HV in ((2048, 4), (3072, 4), (4096, 4), (8192, 8), (8192, 32),
                                                                        (8192, 96))]  # fmt: skip
    if isinstance(spec, ChunkScanSpec):
        return [_prefill(N, tokens, HV, spec) for N, tokens, HV in ((1, 8192, 8), (1, 8192, 32), (1, 8192, 64), (1, 8192, 96),
                                                                    (4, 2048, 64))]  # fmt: skip
    if isinstance(spec, IntracardPreScanSpec):
        return [Problem(1, 8192, HV, HV, segments) for segments, HV in ((8, 4), (16, 8), (8, 32))]
    if isinstance(spec, IntracardMergeSpec):
        # Tiles of 8 columns fill 132 processors twice at 16 heads, tiles of 16 at 32: sizes on both sides of where that ends.
        return [Problem(N, 8192, HV, HV, segments) for N, HV, segments in ((1, 4, 32), (1, 16, 16), (1, 20, 16), (1, 32, 8),
                                                                           (1, 40, 8), (4, 32, 8))]  # fmt: skip
    if isinstance(spec, RecurrentDecodeSpec):
        return [Problem(batch, 1, 32, 32) for batch in (1, 8, 24, 64, 256)]
    return []


def held_out_problems(spec: KernelSpec) -> list[Problem]:
    """Sizes that no schedule was tuned on, between those that were: for a test of how choices carry over."""
    if isinstance(spec, ChunkWySpec):
        return [_prefill(1, tokens, HV, spec) for tokens, HV in ((4096, 24), (8192, 16), (8192, 48), (8192, 64))]
    if isinstance(spec, ChunkScanSpec):
        return [_prefill(N, tokens, HV, spec) for N, tokens, HV in ((1, 4096, 4), (1, 4096, 16), (1, 4096, 24), (1, 4096, 48),
                                                                    (1, 4096, 80), (2, 2048, 64), (6, 1024, 64))]  # fmt: skip
    if isinstance(spec, IntracardPreScanSpec):
        return [Problem(1, 8192, HV, HV, segments) for segments, HV in ((12, 4), (6, 16))]
    if isinstance(spec, IntracardMergeSpec):
        return [Problem(1, 8192, HV, HV, segments) for HV, segments in ((8, 16), (24, 8), (48, 8))]
    if isinstance(spec, RecurrentDecodeSpec):
        return [Problem(batch, 1, 32, 32) for batch in (2, 16, 32, 128)]
    return []


def _prefill(N: int, tokens: int, HV: int, spec: ChunkWySpec | ChunkScanSpec) -> Problem:
    """GDN's q and k have half as many heads; the scan knows value heads alone."""
    grouped = isinstance(spec, ChunkWySpec) and spec.decay == "scalar"
    return Problem(N, tokens, HV // 2 if grouped else HV, HV)


def _of_cpu(spec: KernelSpec) -> list[Problem]:
    """Sizes for checking the loop, not for speed."""
    if isinstance(spec, ChunkWySpec | ChunkScanSpec):
        return [Problem(1, 128, 1, 1), Problem(2, 128, 1, 2)]
    if isinstance(spec, IntracardPreScanSpec | IntracardMergeSpec):
        return [Problem(1, 256, 1, 1, 2), Problem(1, 256, 2, 2, 4)]
    if isinstance(spec, RecurrentDecodeSpec):
        return [Problem(1, 1, 2, 2), Problem(4, 1, 2, 4)]
    return []


def check_case(spec: KernelSpec, device: torch.device) -> Case:
    """A small problem with the reference's outputs."""
    if isinstance(spec, RecurrentDecodeSpec):
        return _case(spec, problems_decode.check_problem(spec), device, CHECK_SEED, exact=True)
    if isinstance(spec, ChunkWySpec | ChunkScanSpec | IntracardPreScanSpec | IntracardMergeSpec):
        return _case(spec, problems_prefill.check_problem(spec), device, CHECK_SEED, exact=True)
    raise NotImplementedError(f"the tuner has no problems for {spec.key}")


def full_case(spec: KernelSpec, problem: Problem, device: torch.device) -> Case:
    """A problem of real size, without a truth."""
    return _case(spec, problem, device, FULL_SEED, exact=False)


def _case(spec: KernelSpec, problem: Problem, device: torch.device, seed: int, exact: bool) -> Case:
    if isinstance(spec, ChunkWySpec):
        return problems_prefill.chunk_wy_case(spec, problem, device, seed, exact)
    if isinstance(spec, ChunkScanSpec):
        return problems_prefill.chunk_scan_case(spec, problem, device, seed, exact)
    if isinstance(spec, IntracardPreScanSpec):
        return problems_prefill.pre_scan_case(spec, problem, device, seed, exact)
    if isinstance(spec, IntracardMergeSpec):
        return problems_prefill.merge_case(spec, problem, device, seed, exact)
    if isinstance(spec, RecurrentDecodeSpec):
        return problems_decode.recurrent_case(spec, problem, device, seed, exact)
    raise NotImplementedError(f"the tuner has no problems for {spec.key}")
