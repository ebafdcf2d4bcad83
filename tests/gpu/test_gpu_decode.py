"""Recurrent decode on a device: every artifact that runs there, against the float64 recurrence. Needs no TileLang; the registry
must hold what is tested (`kda-tl build --arch ...`)."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from decode_cases import CASES, OPS, SERVING, DecodeCase, decode_truth, make_decode_inputs, relative, run_decode_case, same_bits

import kda_tl
from kda_tl.specs.archs import ARCHS, archs_for_capability

pytestmark = pytest.mark.gpu

OUTPUT = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}
STATE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}


@pytest.fixture(params=[name for name, row in ARCHS.items() if not row.is_cpu][::-1])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every arch whose artifacts this device can load, forced."""
    if request.param not in archs_for_capability(torch.cuda.get_device_capability()):
        pytest.skip(f"{torch.cuda.get_device_name()} runs no {request.param} artifacts")
    monkeypatch.setenv("KDA_TL_ARCH", request.param)
    return request.param


def check(case: DecodeCase) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    errors = run_decode_case(case, "cuda", seed)
    state = STATE[case.state_dtype if case.initial else torch.float32]
    assert errors["o"] < OUTPUT[case.dtype] and errors["state"] < state, (errors, seed)


@pytest.mark.parametrize("state_dtype", STATE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_the_recurrence(arch: str, case: DecodeCase, state_dtype: torch.dtype) -> None:
    if case.K == 64 and state_dtype == torch.float16:
        pytest.skip("float16 states ship for K = 128")
    check(replace(case, state_dtype=state_dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("case", [case for case in CASES if case.K == 128 and case.name.startswith(("serving", "pack"))],
                         ids=lambda case: case.name)  # fmt: skip
def test_activations_of_other_dtypes(arch: str, case: DecodeCase, dtype: torch.dtype) -> None:
    """flashinfer#4214: float16 is not read as bfloat16."""
    check(replace(case, dtype=dtype, gate_dtype=dtype))


def test_a_pair_of_dtypes_that_does_not_ship_is_refused() -> None:
    x = make_decode_inputs(replace(SERVING, dtype=torch.float16, state_dtype=torch.bfloat16), "cuda", 0).args
    with pytest.raises(TypeError, match="q must have a dtype that is served together with that of initial_state"):
        kda_tl.recurrent_kda(**x)


def test_many_small_requests(arch: str) -> None:
    """fla#1077: grids of more than 65535 blocks."""
    for N, HV, V in ((65536, 1, 8), (2048, 32, 16)):
        case = DecodeCase("many", N=N, H=HV, HV=HV, K=64, V=V, v_first=False)
        x = make_decode_inputs(case, "cuda", 6)
        o, final = kda_tl.recurrent_kda(**x.args)
        q, k, v, g, beta = (x.args[name][:, 0].double() for name in ("q", "k", "v", "g", "beta"))
        S = g.exp().unsqueeze(-1) * x.pool.double()
        u = beta.unsqueeze(-1) * (v - torch.einsum("nhk,nhkv->nhv", k, S))
        S = S + k.unsqueeze(-1) * u.unsqueeze(-2)
        assert relative(final, S) < STATE[torch.float32]
        assert relative(o[:, 0], 64**-0.5 * torch.einsum("nhk,nhkv->nhv", q, S)) < OUTPUT[torch.bfloat16]


@pytest.mark.parametrize("stride", [32 * 128 * 128, 540_672])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_beyond_two_to_the_31_elements(arch: str, dtype: torch.dtype, stride: int) -> None:
    """flashinfer#3230: the named slots change, all others are bit-identical."""
    slots = 4200
    if torch.cuda.mem_get_info()[0] < 3 * slots * stride * dtype.itemsize:
        pytest.skip("too little memory")
    case = DecodeCase("large", N=3, H=32, HV=32, state_dtype=dtype, slots=8, inplace=True)
    x = make_decode_inputs(case, "cuda", 1)
    storage = torch.full((slots * stride,), 0.5, dtype=dtype, device="cuda")
    pool = storage.as_strided((slots, 32, 128, 128), (stride, 128 * 128, 128, 1))
    named = [4095, 4096, slots - 1]
    pool[named] = x.pool[:3]
    x.args |= {"initial_state": pool, "state_indices": torch.tensor(named, dtype=torch.int32, device="cuda")}
    x.slot = [0, 1, 2]
    _, states = decode_truth(case, x)
    o, _ = kda_tl.recurrent_kda(**x.args)
    for slot, state in zip(named, states, strict=True):
        assert relative(pool[slot].transpose(-1, -2), state) < STATE[dtype]
    assert o.isfinite().all()
    pool[named] = 0.5
    assert bool((storage == 0.5).all())


@pytest.mark.parametrize("rule", ["kda", "gdn", "rwkv6"])
def test_graph_replays_read_the_indices_of_the_day(arch: str, rule: str) -> None:
    """sglang#38994, vllm#52413: captured with slots 3 and 7, replayed with 5 and 1, at an address that is no multiple of 16."""
    gate = "none" if rule == "rwkv6" else "softplus"
    case = DecodeCase("graph", rule=rule, N=2, slots=8, gate=gate, inplace=True)
    x = make_decode_inputs(case, "cuda", 2)
    buffer = torch.tensor([0, 3, 7], dtype=torch.int32, device="cuda")
    x.args["state_indices"] = buffer[1:]
    OPS[rule](**x.args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = OPS[rule](**x.args)
    for slots in ([5, 1], [2, -1], [0, 6], [-1, -1]):
        buffer[1:] = torch.tensor(slots, device="cuda")
        x.pool, x.slot = x.args["initial_state"].clone(), slots
        truth_o, states = decode_truth(case, x)
        before = x.args["initial_state"].clone()
        o.fill_(torch.nan)
        graph.replay()
        assert relative(o, truth_o) < OUTPUT[torch.bfloat16]
        for slot in range(8):
            if slot in slots:
                state = states[slots.index(slot)]
                assert relative(x.args["initial_state"][slot].transpose(-1, -2), state) < STATE[torch.float32]
            else:
                assert same_bits(x.args["initial_state"][slot], before[slot])


@pytest.mark.parametrize("rule", ["kda", "gdn"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_the_error_of_the_state_over_4096_steps(arch: str, rule: str, state_dtype: torch.dtype) -> None:
    """sglang#38975, in launches of one token each, in place. A narrow state is rounded at every step."""
    case = DecodeCase("long", rule=rule, N=2, T=4096, gate="bounded", l2norm=True, beta="sigmoid", gate_dtype=torch.bfloat16,
                      state_dtype=state_dtype)  # fmt: skip
    x = make_decode_inputs(case, "cuda", 3)
    _, states = decode_truth(case, x)
    pool = x.args.pop("initial_state").clone()
    tokens = {name: x.args.pop(name) for name in ("q", "k", "v", "g", "beta")}
    for t in range(case.T):
        part = {name: tensor[:, t : t + 1] for name, tensor in tokens.items()}
        OPS[rule](**part, **{**x.args, "inplace": True}, initial_state=pool)
    for n, state in enumerate(states):
        assert relative(pool[n].transpose(-1, -2), state) < (1e-5 if state_dtype == torch.float32 else 2e-2)


def test_the_calls_do_not_wait_for_the_device(arch: str) -> None:
    x = make_decode_inputs(replace(SERVING, N=16, slots=32), "cuda", 4).args
    kda_tl.recurrent_kda(**x)
    torch.cuda.synchronize()
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kda_tl.recurrent_kda(**x)
    finally:
        torch.cuda.set_sync_debug_mode(previous)


def test_calls_are_bit_equal(arch: str) -> None:
    x = make_decode_inputs(replace(SERVING, N=64, slots=100, inplace=False, T=3), "cuda", 5).args
    first = kda_tl.recurrent_kda(**x)
    for _ in range(20):
        assert all(same_bits(a, b) for a, b in zip(kda_tl.recurrent_kda(**x), first, strict=True))
