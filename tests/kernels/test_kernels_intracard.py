"""Maps of segments with float16 operands, as the GPU archs have them, and the merge over many segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chunk_kda_cases import nan_filled_memory, relative_error
from torch import Tensor

from kda_tl.ops.prefill_kernels import (
    GateOptions,
    Maps,
    Segments,
    Workspace,
    launch_chunk_wy,
    launch_intracard_merge,
    launch_intracard_pre_scan,
)
from kda_tl.reference import recurrent_kda, segment_affine
from kda_tl.specs.intracard import (
    IntracardMergeSchedule,
    IntracardMergeSpec,
    IntracardPreScanSchedule,
    IntracardPreScanSpec,
)
from kda_tl.specs.kernels import ChunkWySpec
from kda_tl.specs.schedules import ChunkWySchedule

pytestmark = pytest.mark.tilelang

CPU = torch.device("cpu")
GATES = {"-5": -5.0, "-0.05": -0.05, "-1e-4": -1e-4, "0": 0.0}
Compile = Callable[..., Any]


def make(chunks: int, gate: str, values: float = 1.0) -> dict[str, Tensor]:
    """One head of K = V = 64; decays as in tests/ops/test_ops_intracard.py."""
    generator = torch.Generator().manual_seed(chunks)
    T = chunks * 64
    g = torch.full((1, T, 1, 64), GATES.get(gate, -5.0))
    if gate == "mixed":
        g[..., 3] = 0.0

    def unit() -> Tensor:
        return torch.nn.functional.normalize(torch.randn((1, T, 1, 64), generator=generator), dim=-1).half()

    return {
        "q": unit(), "k": unit(), "v": (values * torch.randn((1, T, 1, 64), generator=generator)).half(), "g": g,
        "beta": torch.rand((1, T, 1), generator=generator),
        "initial_state": values * torch.randn((1, 1, 64, 64), generator=generator),
    }  # fmt: skip


@pytest.fixture(scope="module")
def states(compile_spec: Compile) -> Callable[..., tuple[Maps, Tensor]]:
    """states(inputs, chunks of a segment): the maps, and the states before every segment."""
    wy = compile_spec(ChunkWySpec(64, dtype="float16"), ChunkWySchedule())
    pre_scan = compile_spec(IntracardPreScanSpec(64, 64, dtype="float16"), IntracardPreScanSchedule())
    merge = compile_spec(IntracardMergeSpec(64, 64), IntracardMergeSchedule())

    def run(x: dict[str, Tensor], chunks: int) -> tuple[Maps, Tensor]:
        T = x["k"].shape[1]
        count = -(-T // (64 * chunks))
        with nan_filled_memory():
            workspace = Workspace.empty(-(-T // 64), 1, 64, torch.float16, True, CPU)
            launch_chunk_wy(wy, x["q"], x["k"], x["g"], x["beta"], GateOptions(), None, workspace)
            maps, segments = Maps.empty(1, count - 1, 1, 64, 64, True, CPU), Segments.empty(1, count, chunks, 1, 64, 64, CPU)
        launch_intracard_pre_scan(pre_scan, x["v"], workspace, None, chunks, maps)
        launch_intracard_merge(merge, maps, T, None, x["initial_state"], segments)
        return maps, segments.states

    return run


@pytest.mark.parametrize("gate", [*GATES, "mixed"])
def test_many_segments_with_narrow_operands(states: Callable[..., tuple[Maps, Tensor]], gate: str) -> None:
    """24 maps one after another: the last state is as exact as that of a scan in one piece."""
    x = make(25, gate)
    maps, found = states(x, 1)
    _, last = recurrent_kda(**{name: t[:, : 24 * 64] if name != "initial_state" else t for name, t in x.items()})
    assert relative_error(found[0, 24], last[0]) < 1e-3
    k, v, g, beta = (x[name][0, :64].double().transpose(0, 1) for name in ("k", "v", "g", "beta"))
    M, B = segment_affine(k, v, g, beta)
    assert relative_error(maps.transitions[0, 0].transpose(-1, -2), M) < 3e-3
    assert relative_error(maps.biases[0, 0], B) < 1e-3


@pytest.mark.parametrize("values", [1e-6, 1e4])
def test_values_of_any_magnitude(states: Callable[..., tuple[Maps, Tensor]], values: float) -> None:
    x = make(4, "-0.05", values)
    _, found = states(x, 2)
    _, last = recurrent_kda(**{name: t[:, :128] if name != "initial_state" else t for name, t in x.items()})
    assert relative_error(found[0, 1], last[0]) < (1e-3 if values > 1 else 0.05)  # v itself is subnormal in float16


def test_a_map_is_no_product_of_decays(states: Callable[..., tuple[Maps, Tensor]]) -> None:
    """Every channel decays to 2^-92 of itself, and yet a key halfway carries half of one channel over to another."""
    x = make(2, "0")
    x["beta"].zero_()
    x["g"].fill_(-2.0)
    x["g"][:, 32:, :, 0] = x["g"][:, :33, :, 1] = 0.0
    x["beta"][:, 32] = 1.0
    x["k"][:, 32] = 0.0
    x["k"][:, 32, :, :2] = 0.5**0.5
    maps, _ = states(x, 1)
    k, v, g, beta = (x[name][0, :64].double().transpose(0, 1) for name in ("k", "v", "g", "beta"))
    M, _ = segment_affine(k, v, g, beta)
    found = maps.transitions[0, 0].transpose(-1, -2)
    assert abs(found[0, 0, 1] + 0.5) < 1e-3 and relative_error(found, M) < 1e-3


def test_a_merge_does_not_depend_on_its_schedule(compile_spec: Compile) -> None:
    spec = IntracardMergeSpec(64, 64)
    generator = torch.Generator().manual_seed(0)
    maps = Maps.empty(1, 5, 2, 64, 64, True, CPU)
    maps.transitions.copy_(torch.randn(maps.transitions.shape, generator=generator) / 8)
    maps.biases.copy_(torch.randn(maps.biases.shape, generator=generator))
    found = []
    for schedule in (IntracardMergeSchedule(), IntracardMergeSchedule(block_v=32, threads=256)):
        segments = Segments.empty(1, 6, 1, 2, 64, 64, CPU)
        launch_intracard_merge(compile_spec(spec, schedule), maps, 6 * 64, None, None, segments)
        found.append(segments.states)
    assert torch.equal(*found) and not found[0][:, 0].any()
