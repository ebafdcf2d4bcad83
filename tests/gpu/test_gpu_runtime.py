"""The runtime on a device: warm-up before capture, streams, threads, several devices. Needs the arch's default set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from chunk_kda_cases import Case, make_inputs

import kda_tl
from kda_tl.runtime import driver

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


def call(x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        o, state = kda_tl.chunk_kda(**x, output_final_state=True)
    return o, state


def equal(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


CAPTURE = """
import torch, kda_tl
before = torch.cuda.memory_allocated()
kda_tl.warmup("chunk_kda")
assert torch.cuda.memory_allocated() <= before + (64 << 10)  # placeholders, kept
assert torch.cuda.max_memory_allocated() < before + (8 << 20)
kda_tl.reset_counters()
half = dict(device="cuda", dtype=torch.bfloat16)
torch.manual_seed(0)
q, k, v = (torch.randn(1, 300, 2, 128, **half) / 12 for _ in range(3))
g, beta = -torch.rand(1, 300, 2, 128, **half), torch.rand(1, 300, 2, **half)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph), torch.no_grad():
    o, _ = kda_tl.chunk_kda(q, k, v, g, beta)
counted = kda_tl.counters()
assert (counted.loads, counted.misses, counted.builds) == (0, 0, 0), counted
for _ in range(3):
    q.copy_(torch.randn_like(q) / 12)
    o.fill_(float("nan"))
    graph.replay()
    assert torch.equal(o, kda_tl.chunk_kda(q, k, v, g, beta)[0])
print("right")
"""


def test_a_first_call_may_be_captured_after_a_warm_up() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "KDA_TL_ON_MISS": "error"}
    ran = subprocess.run([sys.executable, "-c", CAPTURE], env=environment, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr


def test_every_default_kernel_warms_up() -> None:
    assert kda_tl.warmup()
    before = kda_tl.counters()
    assert kda_tl.warmup() and kda_tl.counters().loads == before.loads


def test_two_streams_do_not_share_a_workspace() -> None:
    cases = [make_inputs(Case("stream", T=1000, H=4, HV=8), "cuda", seed=seed) for seed in (1, 2)]
    expected = [call(x) for x in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for x, stream in zip(cases, streams):
            with torch.cuda.stream(stream):
                results.append(call(x))
        torch.cuda.synchronize()
        assert all(equal(found, right) for found, right in zip(results, expected))


def test_threads_on_streams_of_their_own() -> None:
    cases = [make_inputs(Case("thread", T=700, H=2, HV=4), "cuda", seed=seed) for seed in range(4)]
    expected = [call(x) for x in cases]
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work(x: dict[str, Any], right: tuple[torch.Tensor, ...]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    found = call(x)
                    torch.cuda.current_stream().synchronize()
                    if not equal(found, right):
                        wrong.append("differs")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=arguments) for arguments in zip(cases, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_offsets_of_any_alignment_load_nothing() -> None:
    x = make_inputs(Case("pack", lengths=(100, 0, 30)), "cuda", seed=3)
    right = call(x)
    loads = kda_tl.counters().loads
    buffer = torch.zeros(64, dtype=torch.int32, device="cuda")
    for offset in range(4):
        view = buffer[offset : offset + x["cu_seqlens"].numel()]
        view.copy_(x["cu_seqlens"])
        assert equal(call({**x, "cu_seqlens": view}), right)
    assert kda_tl.counters().loads == loads


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_each_device_runs_its_own_and_the_current_one_stays() -> None:
    x = make_inputs(Case("devices", T=300), "cuda:0", seed=4)
    there = {name: value.to("cuda:1") if isinstance(value, torch.Tensor) else value for name, value in x.items()}
    kda_tl.warmup("chunk_kda", device="cuda:1")
    found = call(there)
    assert torch.cuda.current_device() == 0 and found[0].device == torch.device("cuda:1")
    assert equal(tuple(tensor.to("cuda:0") for tensor in found), call(x))


def test_the_driver_tells_its_version() -> None:
    version = driver.cuda_version()
    assert version is not None and version >= 12000 and driver.too_old(580) is None


def test_doctor_sees_the_device() -> None:
    command = [sys.executable, "-m", "kda_tl.cli.main", "doctor", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    device = next(check for check in json.loads(ran.stdout) if check["subject"] == "device cuda:0")
    assert torch.cuda.get_device_name() in device["detail"] and device["status"] in ("ok", "warning"), ran.stdout
