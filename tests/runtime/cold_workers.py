"""What test processes run: imported by name there, with nothing loaded yet."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch


def call_cold(environment: dict[str, str], root: str, builder: str, offset: int) -> tuple[float, dict[str, int], bool]:
    """One chunk_kda in a process that has loaded no kernel, with one registry and a builder that stands in for kda-tl: its
    error, the counters, and whether a compiler got in."""
    os.environ.update(environment)

    import kda_tl
    from kda_tl.runtime import build_on_miss, dispatcher

    dispatcher.search_path = lambda: [Path(root)]
    build_on_miss.default_root = lambda: Path(root)
    build_on_miss.MODULE = builder
    error = call(seed=offset, offset=offset % 2)
    return error, vars(kda_tl.counters()), "tilelang" in sys.modules or "kda_tl.compiler" in sys.modules


def call(seed: int, offset: int = 0, T: int = 70) -> float:
    """||o - reference|| / ||reference|| of a random call, the larger of both results; the state starts `offset` elements into a
    buffer full of NaN, so that its alignment flips."""
    import kda_tl
    from kda_tl.reference import recurrent_kda

    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, 1, 128, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(1, T, 2, 128, generator=generator)
    g, beta = -torch.rand(1, T, 2, 128, generator=generator), torch.rand(1, T, 2, generator=generator)
    buffer = torch.full((2 * 128 * 128 + 8,), torch.nan)
    state = buffer[offset : offset + 2 * 128 * 128].view(1, 2, 128, 128)
    state.copy_(torch.randn(1, 2, 128, 128, generator=generator))
    results = kda_tl.chunk_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)
    expected = recurrent_kda(q.double(), k.double(), v.double(), g.double(), beta.double(), initial_state=state.double())
    return max(float((out.double() - ref).norm() / ref.norm()) for out, ref in zip(results, expected))


def in_threads(count: int, work) -> list:
    """Results of work(0), work(1), ..., started at one moment in as many threads; the first exception is raised here."""
    start, results = threading.Barrier(count), [None] * count

    def run(number: int) -> None:
        start.wait()
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
