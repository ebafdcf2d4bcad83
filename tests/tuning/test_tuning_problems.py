"""The problems' truth against the kernels, each made on its own: the cpu's artifacts are right by the kernels' tests."""

from __future__ import annotations

import pytest
import torch
from built_specs import built_specs

from kda_tl.registry import Registry
from kda_tl.runtime.loader import load_artifact
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.decode import RecurrentDecodeSpec
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.floors import Problem, cost
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec
from kda_tl.tuning.problems import check_case, full_case, held_out_problems, problems, size_of
from kda_tl.tuning.problems_case import relative_error

CPU = torch.device("cpu")
TUNED_ON_CPU = [spec for spec in built_specs("cpu") if problems(spec, "cpu")]


@pytest.mark.tilelang
@pytest.mark.parametrize("spec", TUNED_ON_CPU, ids=lambda spec: spec.key)
def test_a_right_kernel_passes_and_a_wrong_one_does_not(cpu_registry: Registry, spec: KernelSpec) -> None:
    path = cpu_registry.find("cpu", spec.key)
    assert path is not None
    kernel = load_artifact(cpu_registry.root, path.name, "cpu", spec.key)
    case = check_case(spec, CPU)
    assert case.truth is not None and set(case.truth) <= set(case.outputs)
    for _ in range(2):  # a reset undoes what a pass has changed in place
        case.reset()
        for arguments in case.calls:
            kernel(*arguments)
        assert case.error(case.truth) < 5e-6
    for name, tensor in case.outputs.items():
        if name in case.truth:
            kept = tensor.clone()
            tensor.view(-1)[0] = torch.nan
            assert case.error(case.truth) == float("inf")
            tensor.copy_(kept * 1.01)
            assert case.error(case.truth) > case.tolerance
            tensor.copy_(kept)

    full = full_case(spec, problems(spec, "cpu")[-1], CPU)
    assert full.truth is None
    full.reset()
    assert all(bool(x.isnan().all()) for name, x in full.outputs.items() if name != "pool")
    for arguments in full.calls:
        kernel(*arguments)
    assert all(bool(tensor.isfinite().all()) for tensor in full.outputs.values())


@pytest.mark.parametrize("arch", ARCHS)
def test_sizes_are_those_that_schedules_are_chosen_by(arch: str) -> None:
    for spec in default_specs(arch):
        sizes = [size_of(spec, problem) for problem in problems(spec, arch)]
        assert sizes == sorted(set(sizes)), "from small to large, each once"
        assert len(sizes) <= 6 and (arch == "cpu" or len(sizes) == 0 or len(sizes) >= 3)
        if sizes and arch != "cpu":
            held_out = [size_of(spec, problem) for problem in held_out_problems(spec)]
            assert not set(sizes) & set(held_out)
        for problem in problems(spec, arch):
            assert problem.HV % problem.H == 0 and cost(spec, problem).bytes > 0


def test_size_of() -> None:
    problem = Problem(sequences=2, tokens=130, H=4, HV=8, segments=3)
    assert size_of(ChunkWySpec(), problem) == 2 * 3 * 8
    assert size_of(ChunkScanSpec(), problem) == size_of(IntracardPreScanSpec(), problem) == 2 * 3 * 8
    assert size_of(IntracardMergeSpec(), problem) == size_of(RecurrentDecodeSpec(), problem) == 2 * 8


def test_relative_error() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5], dtype=torch.float64)) == pytest.approx(
        0.5 / (9 + 20.25) ** 0.5
    )
    assert relative_error(torch.tensor([torch.nan]), torch.tensor([1.0])) == float("inf")
