"""chunk_kda on a device: every artifact that runs there, against the float64 recurrence. Artifacts of another arch run through
their PTX. Needs no TileLang; the registry must hold what is tested (`kda-tl build --arch ...`)."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from chunk_kda_cases import CASES, TOLERANCE, Case, make_inputs, nan_filled_memory, relative_error, run_case

import kda_tl
from kda_tl.reference import recurrent_kda
from kda_tl.specs.archs import ARCHS, archs_for_capability

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
Inputs = dict[str, Any]


@pytest.fixture(params=[name for name, row in ARCHS.items() if not row.is_cpu][::-1])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every arch whose artifacts this device can load, forced."""
    if request.param not in archs_for_capability(torch.cuda.get_device_capability()):
        pytest.skip(f"{torch.cuda.get_device_name()} runs no {request.param} artifacts")
    monkeypatch.setenv("KDA_TL_ARCH", request.param)
    return request.param


def call(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    with nan_filled_memory(), torch.no_grad():
        o, state = kda_tl.chunk_kda(**x, output_final_state=True)
    return o, state


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    """Bit for bit, NaN included."""
    integers = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    return all(torch.equal(x.view(integers[x.dtype]), y.view(integers[y.dtype])) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_the_recurrence(arch: str, case: Case) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    errors = run_case(case, seed=seed)
    assert set(errors) == {"o", "state"} and max(errors.values()) < TOLERANCE, (errors, seed)


@pytest.mark.parametrize("T", [17, 22, 33, 47, 64, 65, 130])
def test_outputs_do_not_depend_on_the_future(arch: str, T: int) -> None:
    """fla#1240: a bounded gate of -5, only the last token changes."""
    x = make_inputs(Case("causal", T=T, H=4, HV=4), "cuda", seed=T)
    x["g"].copy_(-5.0 * torch.rand(x["g"].shape, device="cuda"))
    x["beta"].fill_(1.0)
    o, _ = call(x)
    for name in ("q", "k", "v", "g", "beta"):
        changed = x[name].clone()
        changed[:, -1] = -4.999 if name == "g" else 2 * changed[:, -1]
        o_changed, _ = call({**x, name: changed})
        assert same((o_changed[:, :-1],), (o[:, :-1],)), name
        assert not torch.equal(o_changed[:, -1], o[:, -1]), name


def test_a_head_does_not_depend_on_how_many_others_there_are(arch: str) -> None:
    x = make_inputs(Case("heads", T=300, H=3, HV=6, B=2), "cuda", seed=1)
    o, state = call(x)
    own = {name: x[name][:, :, 1:2] for name in ("q", "k")} | {name: x[name][:, :, 2:4] for name in ("v", "g", "beta")}
    own |= {"initial_state": x["initial_state"][:, 2:4]}
    assert same(call(own), (o[:, :, 2:4], state[:, 2:4]))


@pytest.mark.parametrize("case", [Case("dense", T=1000, HV=8), Case("pack", lengths=(0, 1, 63, 64, 300, 1000), tail=50)])
def test_twenty_calls_are_bit_equal(arch: str, case: Case) -> None:
    x = make_inputs(case, "cuda", seed=2)
    first = call(x)
    for _ in range(19):
        assert same(call(x), first)


def test_each_sequence_of_a_pack_equals_its_own_run(arch: str) -> None:
    lengths = (2049, 0, 1011, 513, 256, 128, 65, 32, 16, 8, 4, 5, 1, 64 * 7 + 39)
    x = make_inputs(Case("pack", lengths=lengths, tail=33, H=4, HV=8), "cuda", seed=3)
    o, state = call(x)
    bounds = x["cu_seqlens"].tolist()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        own = {name: x[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
        o_own, state_own = call({**own, "initial_state": x["initial_state"][n : n + 1]})
        assert same((o_own, state_own), (o[:, start:end], state[n : n + 1])), n


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_nan_and_inf_stay_in_their_sequence_and_head(arch: str, name: str, value: float) -> None:
    lengths = (64, 65, 1, 200)
    x = make_inputs(Case("nan", lengths=lengths), "cuda", seed=4)
    o, state = call(x)
    if name == "initial_state":
        x[name][1, 2, 3, 4] = value
    else:
        x[name][0, 64 + 10, 1 if name in ("q", "k") else 2] = value
    o_bad, state_bad = call(x)
    heads = [2, 3] if name in ("q", "k") else [2]
    spoilt = torch.zeros(o.shape[1:3], dtype=torch.bool, device="cuda")
    spoilt[64:129, heads] = True
    spoilt_states = torch.zeros(state.shape[:2], dtype=torch.bool, device="cuda")
    spoilt_states[1, heads] = True
    assert same((o_bad[0, ~spoilt], state_bad[~spoilt_states]), (o[0, ~spoilt], state[~spoilt_states]))
    assert not o_bad[0, spoilt].isfinite().all()


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_values_and_states_of_any_magnitude(arch: str, factor: float) -> None:
    x = make_inputs(Case("magnitude", T=500), "cuda", seed=5)
    for name in ("v", "initial_state"):
        x[name].mul_(factor)
    o, state = call(x)
    o_true, state_true = recurrent_kda(**x)
    assert relative_error(o, o_true) < TOLERANCE and relative_error(state, state_true) < TOLERANCE


def test_two_streams_share_nothing(arch: str) -> None:
    """flashinfer#4476: workspaces that two streams share get mixed up. Same shapes, no sync between the calls."""
    cases = [Case("streams", T=2048, H=4, HV=8, gate=gate) for gate in ("weak", "strong")]
    problems = [make_inputs(case, "cuda", seed=6 + n) for n, case in enumerate(cases)]
    expected = [call(x) for x in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    with torch.no_grad():
        for _ in range(30):
            for n, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    results[n].append(kda_tl.chunk_kda(**problems[n], output_final_state=True))
    torch.cuda.synchronize()
    for n in range(2):
        assert all(same(result, expected[n]) for result in results[n])


@pytest.mark.parametrize("case", [Case("dense", T=500, B=2), Case("pack", lengths=(0, 1, 64, 200), tail=20)])
def test_graph_capture_and_replay_with_fresh_inputs(arch: str, case: Case) -> None:
    """mlc-ai/TIRx-kernels#206: every replay, not only the first."""
    x = make_inputs(case, "cuda", seed=7)
    kda_tl.chunk_kda(**x, output_final_state=True)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = kda_tl.chunk_kda(**x, output_final_state=True)
    for seed in range(8, 28):
        fresh = make_inputs(case, "cuda", seed=seed)
        for name, tensor in fresh.items():
            if isinstance(tensor, torch.Tensor):
                x[name].copy_(tensor)
        o.fill_(torch.nan)
        state.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert same((o, state), call(fresh)), seed


def test_lengths_may_change_between_replays(arch: str) -> None:
    x = make_inputs(Case("pack", lengths=(100, 200, 300)), "cuda", seed=30)
    kda_tl.chunk_kda(**x, output_final_state=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = kda_tl.chunk_kda(**x, output_final_state=True)
    for bounds in ([0, 1, 1, 600], [0, 300, 500, 501], [0, 0, 0, 0], [0, 64, 128, 600]):
        x["cu_seqlens"].copy_(torch.tensor(bounds))
        graph.replay()
        torch.cuda.synchronize()
        assert same((o, state), call(x)), bounds


def test_more_sequences_than_a_grid_axis_holds(arch: str) -> None:
    """fla#1077: 65,535 is the end of grid axes y and z. One token from a zero state: o = scale beta (q . k) v."""
    N = 70_000
    generator = torch.Generator("cuda").manual_seed(31)
    q, k = (torch.randn(1, N, 1, 128, generator=generator, device="cuda", dtype=torch.bfloat16) / 11 for _ in range(2))
    v = torch.randn(1, N, 1, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    g, beta = torch.zeros(1, N, 1, 128, device="cuda"), torch.rand(1, N, 1, generator=generator, device="cuda")
    with nan_filled_memory():
        o, _ = kda_tl.chunk_kda(q, k, v, g, beta, cu_seqlens=torch.arange(N + 1, device="cuda"))
    true = 128**-0.5 * beta.double()[..., None] * (q.double() * k.double()).sum(-1, keepdim=True) * v.double()
    assert relative_error(o, true) < TOLERANCE
    assert relative_error(o[:, 65_536:], true[:, 65_536:]) < TOLERANCE


@pytest.mark.slow
def test_tensors_of_more_than_2_31_elements(arch: str) -> None:
    """The last, short sequence of a pack whose q, k, v, g and o pass 2^31 elements, against its own run."""
    heads, tail = 128, 200
    T = 2**31 // (heads * 128) + 1000
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free device memory")
    q, k, v = (torch.zeros(1, T, heads, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    g, beta = torch.zeros(1, T, heads, 128, device="cuda"), torch.zeros(1, T, heads, device="cuda")
    own = make_inputs(Case("own", T=tail, H=heads, HV=heads), "cuda", seed=32)
    for name, tensor in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        tensor[:, -tail:] = own[name]
    bounds = torch.arange(0, T - tail, 4096, device="cuda")
    cu_seqlens = torch.cat([bounds, torch.tensor([T - tail, T], device="cuda")])
    o, _ = kda_tl.chunk_kda(q, k, v, g, beta, cu_seqlens=cu_seqlens)
    assert o.numel() > 2**31
    own.pop("initial_state")
    assert same((o[:, -tail:],), (call(own)[0],))
    assert not o[:, : T - tail].any()


def test_gradients(arch: str) -> None:
    x = make_inputs(Case("gradient", T=200), "cuda", seed=33)
    x = {name: tensor for name, tensor in x.items() if isinstance(tensor, torch.Tensor)}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
    o, state = kda_tl.chunk_kda(**leaves, output_final_state=True)
    (o.float().sum() + state.sum()).backward()
    truth = {name: tensor.detach().double().requires_grad_() for name, tensor in x.items()}
    o_true, state_true = recurrent_kda(**truth)
    (o_true.sum() + state_true.sum()).backward()
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype
        assert (leaf.grad.double() - truth[name].grad).norm() <= 0.004 * truth[name].grad.norm(), name


FIRST_CALL = """
import sys, time
import torch
q, k, v = (torch.randn(1, 1000, 32, 128, device="cuda", dtype=torch.bfloat16) / 11 for _ in range(3))
g, beta = -torch.rand(1, 1000, 32, 128, device="cuda"), torch.rand(1, 1000, 32, device="cuda")
torch.cuda.synchronize()
import kda_tl
start = time.perf_counter()
o, _ = kda_tl.chunk_kda(q, k, v, g, beta)
torch.cuda.synchronize()
seconds = time.perf_counter() - start
assert o.isfinite().all() and "tilelang" not in sys.modules
print(seconds)
"""


def test_the_first_call_of_a_process_takes_under_a_second(arch: str) -> None:
    """With the driver's cache off. What runs through its PTX is compiled by the driver first, and may take longer."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_CACHE_DISABLE": "1"}
    ran = subprocess.run([sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < (1.0 if arch == "sm_90" else 10.0)
