"""Times DeltaLog decode as a server runs it, each kernel checked before it is timed.

    python tools/bench_deltalog.py prepare DIR [--rules ..] [--bases ..]   anywhere: builds every variant for sm_90 into DIR
    python tools/bench_deltalog.py measure [DIR] [..] [--out F]            on the device: needs torch and apache-tvm-ffi only

One token per request, bfloat16 activations, K = V = 128, 32 value heads; gate, l2 norm and sigmoid in the kernel. A CUDA graph
holds a whole merge cycle of four layers, whose buffers rotate so that nothing is served from L2, with cursors staggered over
the requests; printed is the median over replays, in milliseconds per layer and step. The floor is that of
`kda_tl.specs.floors` at the faster of a copy and a read-only stream, both measured in the same run. Without DIR, the registry
of the search path is measured."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu"), str(ROOT / "tools")]

import torch  # noqa: E402
from chunk_kda_cases import relative_error  # noqa: E402
from deltalog_cases import OPS, recurrence, tokens  # noqa: E402
from timing import captured, need_gpu, time_ms  # noqa: E402

from kda_tl.ops.deltalog import DeltaLogCache  # noqa: E402
from kda_tl.specs.deltalog import RULES, DeltaLogDecodeSchedule, DeltaLogDecodeSpec  # noqa: E402
from kda_tl.specs.floors import Cost, Problem, cost, floor_ms  # noqa: E402
from kda_tl.specs.schedules import schedule_for  # noqa: E402

ARCH, HV, K, V, LAYERS = "sm_90", 32, 128, 128, 4
HEADS = {"kda": 32, "gdn": 16, "rwkv6": 32}
BASES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VARIANTS = {
    "v64-t128-b4": {"block_v": 64, "threads": 128, "min_blocks": 4},
    "v64-t128-b5": {"block_v": 64, "threads": 128, "min_blocks": 5},
    "v64-t128-b7": {"block_v": 64, "threads": 128, "min_blocks": 7},
    "v128-t256-b2": {"block_v": 128, "threads": 256, "min_blocks": 2},
    "v128-t256-b3": {"block_v": 128, "threads": 256, "min_blocks": 3},
    "v128-t128-b4": {"block_v": 128, "threads": 128, "min_blocks": 4},
    "v128-t128-b5": {"block_v": 128, "threads": 128, "min_blocks": 5},
    "v32-t128-b8": {"block_v": 32, "threads": 128, "min_blocks": 8},
}
"""Those that spill for want of registers are built too, and say so."""


def prepare(root: Path, options: argparse.Namespace) -> None:
    from kda_tl.compiler.build import build
    from kda_tl.registry import Registry

    specs: list[Any] = []
    for rule, base in itertools.product(options.rules, options.bases):
        spec = DeltaLogDecodeSpec(state_dtype=str(BASES[base]).removeprefix("torch."), one_token=True, **RULES[rule])  # type: ignore[arg-type]
        specs.append(spec)
        if options.launches == 2:
            specs[-1] = dataclasses.replace(spec, one_token=False, prepared=True)
            specs.append(specs[-1].prep_spec)
    specs = list(dict.fromkeys(specs))
    for name in options.variants:
        schedules: dict[Any, Any] = {
            spec: dataclasses.replace(schedule_for(spec, ARCH), **VARIANTS[name])
            for spec in specs
            if spec.kernel == "deltalog_decode"
        }
        registry = Registry(root / name)
        for result in build(ARCH, specs, registry, schedules=schedules):
            usage = registry.load_meta(registry.root / "artifacts" / result.id)["resources"][0]
            spilled = f", {usage['spill_stores']} bytes spilled" if usage["spill_stores"] else ""
            print(f"{name}: {result.spec.key} {result.seconds:.0f} s, {usage['registers']} registers{spilled}", flush=True)


def bandwidths() -> tuple[float, float]:
    """Bytes per second of a copy of 4 GiB (read and written), and of a read-only sum over as much."""
    source = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / (time_ms(lambda: target.copy_(source)) * 1e-3)
    read = source.nbytes / (time_ms(lambda: source.sum()) * 1e-3)
    return copy, read


def step_cost(rule: str, state_dtype: torch.dtype, batch: int, merge_every: int) -> Cost:
    """Of one step of one layer."""
    spec = DeltaLogDecodeSpec(K, V, state_dtype=str(state_dtype).removeprefix("torch."), **RULES[rule])  # type: ignore[arg-type]
    return cost(spec, Problem(batch, 1, HEADS[rule], HV, V=V), DeltaLogDecodeSchedule(merge_every=merge_every))


def inputs_of(rule: str, batch: int, seed: int) -> dict[str, Any]:
    return tokens(batch, 1, HEADS[rule], HV, rule, "bounded", "cuda", seed, fused=True)


def check(rule: str, state_dtype: torch.dtype, batch: int, merge_every: int | None, launches: int) -> float:
    """The largest error of o and of the state over two merge cycles, for the first, a middle and the last request."""
    made = {"state_dtype": state_dtype, "device": "cuda", "merge_every": merge_every, "launches": launches}
    cache = DeltaLogCache(batch, HV, K, V, rule, **made)  # type: ignore[arg-type]
    indices = torch.randperm(batch, device="cuda").to(torch.int32)
    some = [0, batch // 2, batch - 1]
    truth = torch.zeros(3, HV, K, V, dtype=torch.float64, device="cuda")
    error = 0.0
    for step in range(2 * cache.merge_every + 1):
        x = inputs_of(rule, batch, step)
        o = OPS[rule](**x, cache=cache, state_indices=indices)
        few = {name: y[some] if isinstance(y, torch.Tensor) and y.shape[:1] == (batch,) else y for name, y in x.items()}
        o_true, states = recurrence(rule, few, truth)
        truth = states[-1]
        error = max(error, relative_error(o[some], o_true) / 4e-3)
    limit = 1e-4 if state_dtype == torch.float32 else 5e-3
    error = max(error, relative_error(cache.read_state(indices[some].long()), truth) / limit)
    if not error < 1:
        raise SystemExit(f"{rule} {state_dtype}: error is {error:.2f} times its limit: not timed")
    return error


def captured_cycle(
    rule: str, state_dtype: torch.dtype, batch: int, merge_every: int | None, launches: int
) -> tuple[Callable[[], None], int]:
    """Replays a graph of one merge cycle of all layers; and the interval."""
    made = {"state_dtype": state_dtype, "device": "cuda", "merge_every": merge_every, "launches": launches}
    caches = [DeltaLogCache(batch, HV, K, V, rule, **made) for _ in range(LAYERS)]  # type: ignore[arg-type]
    calls = [inputs_of(rule, batch, seed) for seed in range(LAYERS)]
    indices = [torch.randperm(batch, device="cuda").to(torch.int32) for _ in range(LAYERS)]
    every = caches[0].merge_every
    for cache in caches:
        cache.base.normal_()

    def cycle() -> None:
        for _ in range(every):
            for cache, x, slots in zip(caches, calls, indices):
                OPS[rule](**x, cache=cache, state_indices=slots)

    cycle()  # and another one before it is captured: from then on a step folds one request in `every`
    return captured(cycle), every


def measure(root: Path | None, options: argparse.Namespace) -> None:
    copy, read = bandwidths()
    rates = f"a copy moves {copy / 1e12:.2f} TB/s, a read-only stream {read / 1e12:.2f}"
    print(f"{torch.cuda.get_device_name()}: {rates}; milliseconds")
    print(f"{'variant':14s} {'rule':6s} base launches every     B  error/limit     time    floor  times floor")
    rows = []
    names = [name for name in options.variants if (root / name).is_dir()] if root is not None else ["registry"]
    for name, rule, base in itertools.product(names, options.rules, options.bases):
        if root is not None:
            os.environ["KDA_TL_REGISTRY"] = str(root / name)
        for interval in options.merge_every:
            error = check(rule, BASES[base], 64, interval, options.launches)
            for batch in options.batches:
                replay, every = captured_cycle(rule, BASES[base], batch, interval, options.launches)
                ms = time_ms(replay) / (every * LAYERS)
                floor = floor_ms(step_cost(rule, BASES[base], batch, every), ARCH, max(copy, read))
                row = {"variant": name, "rule": rule, "base": base, "launches": options.launches, "merge_every": every}
                rows.append({**row, "batch": batch, "error_of_limit": error, "ms": ms, "floor_ms": floor})
                print(
                    f"{name:14s} {rule:6s} {base:4s} {options.launches:8d} {every:5d} {batch:5d} {error:12.2f} {ms:8.4f} "
                    f"{floor:8.4f} {ms / floor:12.2f}",
                    flush=True,
                )
                if options.out is not None:  # after every row: a run that is cut short leaves what it has
                    content = {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": copy, "read_bytes_per_s": read}
                    options.out.write_text(json.dumps({**content, "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("prepare", "measure"))
    parser.add_argument("dir", type=Path, nargs="?")
    parser.add_argument("--rules", nargs="+", choices=list(OPS), default=list(OPS))
    parser.add_argument("--bases", nargs="+", choices=list(BASES), default=list(BASES))
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--merge-every", type=int, nargs="+", default=[None], help="default: the schedule's")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--launches", type=int, choices=(1, 2), default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.step == "measure":
        need_gpu()
        with torch.no_grad():
            measure(options.dir, options)
    elif options.dir is None:
        parser.error("prepare needs DIR")
    else:
        prepare(options.dir, options)


if __name__ == "__main__":
    main()
