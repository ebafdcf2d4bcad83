"""Sequences cut into segments, on a device: every artifact that runs there, against the float64 recurrence and uncut runs."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from chunk_kda_cases import TOLERANCE, Case, make_inputs, nan_filled_memory, relative_error
from intracard_cases import CUTS, Cut, make_cut_inputs, run_cut

import kda_tl
from kda_tl.ops.prefill_kernels import (
    GateOptions,
    Maps,
    Segments,
    Workspace,
    launch_chunk_wy,
    launch_intracard_merge,
    launch_intracard_pre_scan,
)
from kda_tl.reference import segment_affine
from kda_tl.runtime import dispatcher
from kda_tl.specs.archs import ARCHS, archs_for_capability
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkWySpec

pytestmark = pytest.mark.gpu
PACKED = Case("pack", lengths=(0, 1, 63, 64, 700, 1000), tail=50, gate="weak")


@pytest.fixture(params=[name for name, row in ARCHS.items() if not row.is_cpu and row.measured][::-1])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every arch whose artifacts this device can load, forced."""
    if request.param not in archs_for_capability(torch.cuda.get_device_capability()):
        pytest.skip(f"{torch.cuda.get_device_name()} runs no {request.param} artifacts")
    monkeypatch.setenv("KDA_TL_ARCH", request.param)
    return request.param


def call(x: dict[str, Any], segments: int | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with nan_filled_memory(), torch.no_grad():
        o, state = kda_tl.chunk_kda(**x, output_final_state=True, intracard_segments=segments, **options)
    return o, state


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    """Bit for bit, NaN included."""
    integers = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    return all(torch.equal(x.view(integers[x.dtype]), y.view(integers[y.dtype])) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_against_the_recurrence(arch: str, cut: Cut) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    errors = run_cut(cut, seed=seed)
    assert max(errors["o"], errors["state"]) < TOLERANCE and errors["token"] < 5 * TOLERANCE, (errors, seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("gate", ["weak", "strong", "masked"])
def test_maps_and_states_alone(arch: str, dtype: torch.dtype, delta: bool, gate: str) -> None:
    if dtype == torch.float32 and not delta:
        pytest.skip("not cut in float32")
    x: dict[str, Any] = make_inputs(Case("maps", T=64 * 11 + 5, gate=gate, H=2, HV=2), "cuda", seed=1)
    name, chunks, cuts, device = str(dtype).removeprefix("torch."), 3, 3, torch.device("cuda", torch.cuda.current_device())
    q, k, v = (x[name].to(dtype).contiguous() for name in ("q", "k", "v"))
    g, beta = x["g"].contiguous(), x["beta"].contiguous() if delta else None
    wy = ChunkWySpec(128, 64, name, "float32", "per_key", delta)
    operand = getattr(torch, wy.operand_dtype)

    def kernel(spec: Any) -> Any:
        return dispatcher.kernel(spec, arch, device)

    with nan_filled_memory():
        workspace = Workspace.empty(12, 2, 128, operand, delta, device)
        maps = Maps.empty(1, cuts, 2, 128, 128, delta, device)
        segments = Segments.empty(1, cuts + 1, chunks, 2, 128, 128, device)
        launch_chunk_wy(kernel(wy), q, k, g, beta, GateOptions(), None, workspace)
        launch_intracard_pre_scan(kernel(IntracardPreScanSpec(128, 128, 64, name, delta)), v, workspace, None, chunks, maps)
        merge = kernel(IntracardMergeSpec(128, 128, delta=delta))
        launch_intracard_merge(merge, maps, q.shape[1], None, x["initial_state"], segments)
    state = x["initial_state"][0].double()
    limit = TOLERANCE if dtype != torch.float32 else 1e-5
    for s in range(cuts):
        part = slice(s * chunks * 64, (s + 1) * chunks * 64)
        k_s, v_s, g_s = (t[0, part].double().transpose(0, 1) for t in (k, v, g))
        M, B = segment_affine(k_s, v_s, g_s, None if beta is None else beta[0, part].double().transpose(0, 1), delta)
        found = maps.transitions[0, s]
        found = found.transpose(-1, -2) if delta else torch.diag_embed(found.squeeze(-2))
        # A strong gate leaves maps under float16's relative accuracy; what they do to a state is nothing then.
        assert (found.double() - M).norm() <= limit * max(M.norm().item(), 1.0)
        assert relative_error(maps.biases[0, s], B) < limit
        state = M @ state + B
        assert relative_error(segments.states[0, s + 1], state) < limit, s


@pytest.mark.parametrize("case", [Case("dense", T=2000, HV=8, gate="weak"), PACKED])
def test_twenty_calls_are_bit_equal(arch: str, case: Case) -> None:
    x = make_inputs(case, "cuda", seed=2)
    first = call(x, 5)
    for _ in range(19):
        assert same(call(x, 5), first)


def test_equal_cuts_give_equal_bits(arch: str) -> None:
    """A row of a batch, a head, a sequence of a pack: alone and beside others."""
    x: dict[str, Any] = make_inputs(Case("batch", T=1000, B=3, H=2, HV=4, gate="weak"), "cuda", seed=3)
    o, state = call(x, 4)
    row = {name: t[1:2] for name, t in x.items() if isinstance(t, torch.Tensor)}
    assert same(call(row, 4), (o[1:2], state[1:2]))
    heads = {name: x[name][:, :, 1:2] for name in ("q", "k")} | {name: x[name][:, :, 2:4] for name in ("v", "g", "beta")}
    assert same(call(heads | {"initial_state": x["initial_state"][:, 2:4]}, 4), (o[:, :, 2:4], state[:, 2:4]))
    cu_seqlens = torch.tensor([0, 1000], device="cuda")
    assert same(call({**row, "cu_seqlens": cu_seqlens}, 4), call(row, 4))


def test_the_plan_cuts_few_heads(arch: str) -> None:
    x = make_inputs(Case("few", T=16384, H=1, HV=1, gate="weak"), "cuda", seed=4)
    plan = kda_tl.explain(kda_tl.chunk_kda, **x)
    assert plan.split is not None and plan.split.segments > 1
    assert [launch.spec.kernel for launch in plan.launches][1:3] == ["intracard_pre_scan", "intracard_merge"]
    assert same(call(x, None), call(x, plan.split.segments))


def test_pools(arch: str) -> None:
    x: dict[str, Any] = make_inputs(Case("pool", lengths=(700, 0, 300, 200), gate="weak"), "cuda", seed=5)
    states = x.pop("initial_state")
    pool = torch.full((6, *states.shape[1:]), torch.nan, device="cuda")
    indices = torch.tensor([4, 1, -1, 0], device="cuda", dtype=torch.int32)
    pool[[4, 1, 0]] = states[[0, 1, 3]]
    whole = pool.clone()
    o_whole, _ = call({**x, "initial_state": whole}, 1, state_indices=indices)
    o, _ = call({**x, "initial_state": pool}, 4, state_indices=indices)
    assert relative_error(o, o_whole.double()) < TOLERANCE
    assert relative_error(pool[[4, 1, 0]], whole[[4, 1, 0]].double()) < TOLERANCE
    assert pool[[2, 3, 5]].isnan().all() and not o[:, 700:1000].any()


@pytest.mark.parametrize("case", [Case("dense", T=1500, B=2, gate="weak"), PACKED])
def test_graph_capture_and_replay_with_fresh_inputs(arch: str, case: Case) -> None:
    x: dict[str, Any] = make_inputs(case, "cuda", seed=7)
    call(x, 4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = kda_tl.chunk_kda(**x, output_final_state=True, intracard_segments=4)
    for seed in range(8, 14):
        fresh = make_inputs(case, "cuda", seed=seed)
        for name, tensor in fresh.items():
            if isinstance(tensor, torch.Tensor):
                x[name].copy_(tensor)
        o.fill_(torch.nan)
        state.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert same((o, state), call(fresh, 4)), seed


def test_lengths_may_change_between_replays(arch: str) -> None:
    """The device alone knows them: the cut is that of a sequence of T tokens."""
    x: dict[str, Any] = make_inputs(Case("pack", lengths=(300, 500, 400), gate="weak"), "cuda", seed=30)
    call(x, 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = kda_tl.chunk_kda(**x, output_final_state=True, intracard_segments=3)
    for bounds in ([0, 1, 1, 1200], [0, 600, 1100, 1101], [0, 0, 0, 0], [0, 128, 1000, 1200]):
        x["cu_seqlens"].copy_(torch.tensor(bounds))
        graph.replay()
        torch.cuda.synchronize()
        assert same((o, state), call(x, 3)), bounds
        for n, (first, last) in enumerate(itertools.pairwise(bounds)):
            own = {name: x[name][:, first:last] for name in ("q", "k", "v", "g", "beta")}
            o_own, state_own = call(own | {"initial_state": x["initial_state"][n : n + 1]}, 1)
            assert relative_error(o[:, first:last], o_own.double()) < TOLERANCE
            assert relative_error(state[n : n + 1], state_own.double()) < TOLERANCE


def test_nan_stays_in_its_sequence_and_head(arch: str) -> None:
    x: dict[str, Any] = make_inputs(PACKED, "cuda", seed=6)
    o, state = call(x, 4)
    x["v"][0, 128 + 300, 2] = torch.inf
    o_bad, state_bad = call(x, 4)
    spoilt = torch.zeros(o.shape[1:3], dtype=torch.bool, device="cuda")
    spoilt[128:828, 2] = True
    states = torch.zeros(state.shape[:2], dtype=torch.bool, device="cuda")
    states[4, 2] = True
    assert same((o_bad[0, ~spoilt], state_bad[~states]), (o[0, ~spoilt], state[~states]))
    assert not o_bad[0, 128 + 300 :, 2].isfinite().all()


def test_inputs_of_the_cuts_are_what_they_say() -> None:
    x = make_cut_inputs(next(cut for cut in CUTS if cut.gate == "mixed"), "cuda", seed=8)
    g = x["g"]
    assert isinstance(g, torch.Tensor) and (g[..., 3] == 0).all() and (g[..., 4] == -5).all()
