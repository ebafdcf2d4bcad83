"""Times recurrent decode inside a CUDA graph, over four layers' buffers in turn, so that no state is served from L2.

    python tools/bench_decode.py prepare DIR                            anywhere: builds every variant for sm_90 into DIR
    python tools/bench_decode.py measure [DIR] [--batch 64 ..] [--out FILE]   on the device: needs torch and apache-tvm-ffi only

Without DIR, `measure` times the artifacts of the registry on the search path. Each row is first checked against the float64
recurrence; then it prints milliseconds per layer and token (median over graph replays), bytes per second that were moved, and
the time over the floor (`kda_tl.specs.floors`). One token per request, K = V = 128, bfloat16 activations, gate, l2 norm and
sigmoid in the kernel, states updated in place in a pool; KDA with H = HV = 32, GDN with H 16, HV 32, RWKV6 with H = HV = 32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu"), str(ROOT / "tools")]

import torch  # noqa: E402
from decode_cases import OPS, DecodeCase, decode_truth, make_decode_inputs, relative  # noqa: E402
from timing import captured, need_gpu, time_ms  # noqa: E402

from kda_tl.registry import Registry  # noqa: E402
from kda_tl.specs.decode import RecurrentDecodeSchedule, RecurrentDecodeSpec  # noqa: E402
from kda_tl.specs.floors import Cost, Problem, decode_cost, floor_ms  # noqa: E402
from kda_tl.specs.rules import RULES as RULE_OF  # noqa: E402

ARCH = "sm_90"
LAYERS = 4
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RULES = {
    "kda": DecodeCase("kda", rule="kda", H=32, HV=32, gate="bounded", l2norm=True, beta="sigmoid", gate_dtype=torch.bfloat16),
    "gdn": DecodeCase("gdn", rule="gdn", H=16, HV=32, gate="softplus", l2norm=True, beta="sigmoid", gate_dtype=torch.bfloat16),
    "rwkv6": DecodeCase("rwkv6", rule="rwkv6", H=32, HV=32),
}
VARIANTS = {
    "lanes8-values4-min3": RecurrentDecodeSchedule(128, 8, 4, 3),
    "lanes8-values4-min4": RecurrentDecodeSchedule(128, 8, 4, 4),
    "lanes16-values4-min5": RecurrentDecodeSchedule(128, 16, 4, 5),
    "threads256-lanes16-values4-min2": RecurrentDecodeSchedule(256, 16, 4, 2),
    "threads64-lanes8-values4-min6": RecurrentDecodeSchedule(64, 8, 4, 6),
    "lanes16-values8-min3": RecurrentDecodeSchedule(128, 16, 8, 3),
}


def prepare(root: Path) -> None:
    from kda_tl.compiler.build import build

    specs = [RecurrentDecodeSpec(128, "bfloat16", str(dtype).removeprefix("torch.")) for dtype in STATES.values()]
    for name, schedule in VARIANTS.items():
        registry = Registry(root / name)
        for result in build(ARCH, specs, registry, jobs=1, schedules=dict.fromkeys(specs, schedule)):
            usage = registry.load_meta(registry.root / "artifacts" / result.id)["resources"]
            print(f"{name}: {result.spec.key} {result.seconds:.0f} s {usage}", flush=True)


def cost_of(case: DecodeCase) -> Cost:
    dtype, state, gate = (str(kind).removeprefix("torch.") for kind in (case.dtype, case.state_dtype, case.gate_dtype))
    problem = Problem(case.N, 1, case.H, case.HV, V=case.V)
    return decode_cost(RULE_OF[case.rule], RecurrentDecodeSpec(case.K, dtype, state), problem, gate)


def layers(case: DecodeCase) -> list[dict[str, Any]]:
    """Arguments of four layers, each with buffers and a pool of its own; the slots are a random order."""
    return [make_decode_inputs(replace(case, slots=case.N, inplace=True), "cuda", seed).args for seed in range(LAYERS)]


def check(case: DecodeCase) -> float:
    x = make_decode_inputs(replace(case, N=8, slots=12, inplace=True), "cuda", 99)
    o, final = OPS[case.rule](**x.args)
    truth_o, states = decode_truth(case, x)
    tolerance = 4e-3 if case.state_dtype == torch.bfloat16 else 1e-5
    found = [relative(final[slot].transpose(-1, -2), state) for slot, state in zip(x.slot, states, strict=True)]
    error = max(*found, relative(o, truth_o) if max(found) < tolerance else float("inf"))
    if not error < 4e-3:
        raise SystemExit(f"{case.name}: error {error:.1e} is over its tolerance: not timed")
    return error


def captured_steps(case: DecodeCase) -> tuple[Callable[[], None], int]:
    """Replays a graph of steps of all layers; how many calls it holds (many at small batches, to hide the host)."""
    arguments, op, rounds = layers(case), OPS[case.rule], max(1, 64 // case.N)

    def steps() -> None:
        for _ in range(rounds):
            for x in arguments:
                op(**x)

    return captured(steps), rounds * LAYERS


def measure(root: Path | None, batches: list[int], rules: list[str], out: Path | None) -> None:
    print(f"{torch.cuda.get_device_name()}; milliseconds per layer and token")
    print(f"{'variant':34s} rule   state     B     error        ms    TB/s  over floor")
    rows = []
    for name in [None] if root is None else VARIANTS:
        if root is not None and name is not None:
            os.environ["KDA_TL_REGISTRY"] = str(root / name)
        for rule in rules:
            for label, dtype in STATES.items():
                error = check(replace(RULES[rule], state_dtype=dtype))
                for batch in batches:
                    case = replace(RULES[rule], N=batch, state_dtype=dtype)
                    least, (replay, calls) = cost_of(case), captured_steps(case)
                    ms = time_ms(replay) / calls
                    moved, floor = least.bytes, floor_ms(least, ARCH)
                    rows.append({"variant": name, "rule": rule, "state": label, "batch": batch, "error": error, "ms": ms,
                                 "bytes": moved, "floor_ms": floor})  # fmt: skip
                    print(
                        f"{name or 'as scheduled':34s} {rule:6s} {label:5s} {batch:5d} {error:9.1e} {ms:9.4f} "
                        f"{moved / ms / 1e9:7.2f} {ms / floor:11.2f}",
                        flush=True,
                    )
                    torch.cuda.empty_cache()
    if out is not None:
        out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("prepare", "measure"))
    parser.add_argument("dir", type=Path, nargs="?")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["kda", "gdn"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.step == "prepare":
        if options.dir is None:
            parser.error("prepare needs DIR")
        prepare(options.dir)
    else:
        need_gpu()
        measure(options.dir, options.batch, options.rules, options.out)


if __name__ == "__main__":
    main()
