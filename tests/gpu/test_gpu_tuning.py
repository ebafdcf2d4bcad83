"""What is chosen on sizes that nothing was tuned on: schedules, against every candidate of a prepared folder, and segments.

The folder is tuning/ARCH of the registry that a build goes to, as `kda-tl autotune --arch ARCH --prepare build/tuning/ARCH`
makes it; the registry must hold what is dispatched (`kda-tl build --arch ARCH`).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import kda_tl
from kda_tl.registry import default_root
from kda_tl.runtime import dispatcher
from kda_tl.specs.decode import RecurrentDecodeSpec
from kda_tl.specs.floors import Problem
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec, spec_of_key
from kda_tl.tuning import read_timings
from kda_tl.tuning.measure import measure
from kda_tl.tuning.problems import held_out_problems, size_of
from kda_tl.tuning.problems_plan import PLAN, PlannedProblem, PlannedSpec, read_plan, write_plan

pytestmark = pytest.mark.gpu

SPECS: list[KernelSpec] = [
    ChunkWySpec(gate_dtype="bfloat16"), ChunkWySpec(gate_dtype="bfloat16", decay="scalar"), ChunkScanSpec(),
    IntracardPreScanSpec(), IntracardMergeSpec(), RecurrentDecodeSpec(),
]  # fmt: skip
HELD_OUT = [(spec, problem) for spec in SPECS for problem in held_out_problems(spec)]
WITHIN = 1.05


def test_there_are_twenty_sizes_and_more() -> None:
    assert len(HELD_OUT) == 24


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of every candidate on every held-out problem; `baseline` is what the dispatcher takes."""
    arch = dispatcher.device_arch(torch.device("cuda"))
    prepared = default_root() / "tuning" / arch
    if not (prepared / PLAN).exists():
        pytest.skip(f"{prepared} has no candidates: kda-tl autotune --arch {arch} --prepare {prepared}")
    folder: Path = tmp_path_factory.mktemp("held-out")
    for name in ("artifacts", "support", "manifest"):
        (folder / name).symlink_to(prepared / name)
    plan = read_plan(prepared)
    planned = {spec_of_key(one.spec): one for one in plan.specs}
    write_plan(folder, replace(plan, specs=tuple(_held_out(planned[spec], arch) for spec in SPECS if spec in planned)))
    measure(folder)
    return [asdict(record) for record in read_timings(folder / "timings.jsonl")]


def _held_out(planned: PlannedSpec, arch: str) -> PlannedSpec:
    spec = spec_of_key(planned.spec)
    problems = []
    for problem in held_out_problems(spec):
        size = size_of(spec, problem)
        chosen = dispatcher.size_class(spec, arch, size).schedule
        problems.append(PlannedProblem(size, problem.as_dict(), chosen.as_dict()))
    return replace(planned, problems=tuple(problems))


def _name(part: KernelSpec | Problem) -> str:
    return part.kernel if isinstance(part, KernelSpec) else "-".join(map(str, part.as_dict().values()))


@pytest.mark.parametrize(("spec", "problem"), HELD_OUT, ids=_name)
def test_the_choice_is_near_the_best(records: list[dict[str, Any]], spec: KernelSpec, problem: Problem) -> None:
    here = [r for r in records if (r["spec"], r["problem"]) == (spec.key, problem.as_dict())]
    if not here:
        pytest.skip(f"{spec.key} is not in the plan")
    timed = {str(r["schedule"]): r["time_ms"] for r in here if r["status"] in ("ok", "stopped")}
    chosen = [r for r in here if r["baseline"]]
    assert chosen, f"the dispatcher's schedule is none of the candidates {list(timed)}: prepare them again"
    assert chosen[0]["status"] == "ok", chosen[0]["reason"]
    best = min(timed, key=timed.__getitem__)
    told = f"{chosen[0]['schedule']} takes {chosen[0]['time_ms']} ms, {best} {timed[best]}"
    assert chosen[0]["time_ms"] <= WITHIN * timed[best], told


@pytest.mark.parametrize(("T", "HV"), [(8192, 1), (8192, 3), (8192, 6), (12288, 8), (16384, 2), (8192, 20), (3072, 4)])
def test_the_cut_is_near_the_best(T: int, HV: int) -> None:
    """How many segments the model chooses for a sequence, against 1, 2, 4, 8, 16 and 24, in CUDA graphs that take turns."""
    q, k, v = (torch.randn(1, T, HV, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g = -torch.rand(1, T, HV, 128, device="cuda", dtype=torch.bfloat16)
    beta = torch.rand(1, T, HV, device="cuda", dtype=torch.bfloat16)
    call = partial(kda_tl.chunk_kda, q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    split = kda_tl.explain("chunk_kda", q, k, v, g, beta).split
    assert split is not None
    times: dict[int, list[float]] = {segments: [] for segments in sorted({1, 2, 4, 8, 16, 24, split.segments})}
    graphs = {}
    for segments in times:
        with torch.no_grad():
            call(intracard_segments=segments)
            torch.cuda.synchronize()
            graphs[segments] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[segments]):
                call(intracard_segments=segments)
    for _ in range(15):
        for segments, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # after another graph, the first one finds other things in the caches
            start.record()
            for _ in range(4):
                graph.replay()
            end.record()
            end.synchronize()
            times[segments].append(start.elapsed_time(end) / 4)
    found = {segments: median(taken) for segments, taken in times.items()}
    assert found[split.segments] <= 1.06 * min(found.values()), (split.segments, found)
