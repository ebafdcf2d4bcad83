"""What the tools share: whether there is a GPU, medians of CUDA events, and CUDA graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median

import torch

__all__ = ["captured", "need_gpu", "time_ms"]


def need_gpu(status: int = 1) -> None:
    """Ends the process with this status, and a message, where there is none."""
    if not torch.cuda.is_available():
        why = "no NVIDIA GPU here" if torch.version.cuda else f"torch {torch.__version__} is no CUDA build"
        print(f"{sys.argv[0]} runs on a GPU, and {why}: `kda-tl doctor` says what is missing", file=sys.stderr)
        raise SystemExit(status)


def time_ms(call: Callable[[], object], repeats: int = 20) -> float:
    """Milliseconds between the events before and after a call: the median, after three calls that do not count."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """Replays a graph of the call, and keeps its tensors. It has run once before: what only a first call does is not in it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(_: object = call) -> None:
        graph.replay()

    return replay
