"""Times chunk_kda's kernels under several schedules, each checked before it is timed.

    python tools/bench_chunk_kda.py prepare DIR               anywhere: builds every variant for sm_90 into DIR
    python tools/bench_chunk_kda.py measure DIR [--out FILE]  on the device: needs torch and apache-tvm-ffi only

Prints, per variant, head count and gate: the error against the float64 recurrence, and medians of CUDA events in milliseconds
on random inputs (bfloat16, B 1, T 8192, K = V = 128, g in float32, states in and out), next to each kernel's floor
(`kda_tl.specs.floors`) at the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import torch  # noqa: E402
from chunk_kda_cases import TOLERANCE, Case, make_inputs, relative_error  # noqa: E402

from kda_tl.ops.prefill_launch import GateOptions, Workspace, launch_chunk_scan, launch_chunk_wy  # noqa: E402
from kda_tl.reference import recurrent_kda  # noqa: E402
from kda_tl.registry import Registry  # noqa: E402
from kda_tl.runtime.loader import load  # noqa: E402
from kda_tl.specs.floors import Problem, cost, floor_ms  # noqa: E402
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec  # noqa: E402
from kda_tl.specs.schedules import ChunkScanSchedule, ChunkWySchedule  # noqa: E402

ARCH = "sm_90"
WY, SCAN = ChunkWySpec(), ChunkScanSpec()
Kernels = dict[str, Callable[..., Any]]
WY_VARIANTS = {"4 parts": ChunkWySchedule(), "2 parts, 3 blocks": ChunkWySchedule(parts=2, min_blocks=3)}
WIDE = {"state_registers": 208, "value_registers": 152, "output_registers": 104, "load_registers": 40}
SCAN_VARIANTS = {
    "plain": ChunkScanSchedule(),
    "V tile 128": ChunkScanSchedule("warp_specialized", block_v=128, **WIDE),
    "V tile 64": ChunkScanSchedule("warp_specialized", block_v=64),
    "V tile 32, 3 stages": ChunkScanSchedule("warp_specialized", block_v=32, stages=3),
}


def folder(root: Path, name: str) -> Path:
    return root / name.replace(", ", "-").replace(" ", "-")


def prepare(root: Path) -> None:
    from kda_tl.compiler.build import build

    for spec, variants in ((WY, WY_VARIANTS), (SCAN, SCAN_VARIANTS)):
        for name, schedule in variants.items():
            for result in build(ARCH, [spec], Registry(folder(root, name)), schedules={spec: schedule}):
                print(f"{name}: {result.seconds:.0f} s", flush=True)


def time_ms(call: Callable[[], object], repeats: int = 20) -> float:
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


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a 4 GiB device-to-device copy."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (time_ms(lambda: target.copy_(source)) * 1e-3)


def kernels(root: Path, spec: KernelSpec, variants: Iterable[str]) -> dict[str, Callable[..., Any]]:
    found = {}
    for name in variants:
        registry = Registry(folder(root, name))
        path = registry.find(ARCH, spec.key)
        if path is None:
            raise SystemExit(f"{registry.root} lacks {spec.key}: run `python tools/bench_chunk_kda.py prepare {root}` first")
        found[name] = load(registry, path, ARCH, spec.key)
    return found


def measure_rows(wys: Kernels, scans: Kernels, heads: int, gate: str, tokens: int) -> Iterator[dict[str, Any]]:
    """Per variant the error of two heads, then its time. Raises where one is over its tolerance: a time means nothing then."""
    x: dict[str, Any] = make_inputs(Case("bench", T=tokens, H=heads, HV=heads, gate=gate), "cuda", seed=heads)
    x = {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in x.items()}
    workspace = Workspace.empty(-(-tokens // WY.chunk_size), heads, 128, torch.float16, True, x["q"].device)
    o, state = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
    few = {name: x[name][:, :, :2] for name in ("q", "k", "v", "g", "beta")}
    ref_o, ref_state = recurrent_kda(**few, initial_state=x["initial_state"][:, :2])

    def run_wy(wy: Callable[..., Any]) -> None:
        launch_chunk_wy(wy, x["q"], x["k"], x["g"], x["beta"], GateOptions(), None, workspace)

    def run_scan(scan: Callable[..., Any]) -> None:
        launch_chunk_scan(scan, x["v"], workspace, o, 128**-0.5, None, x["initial_state"], state)

    pairs = [(name, wy, next(iter(scans.values()))) for name, wy in wys.items()]
    pairs += [(name, next(iter(wys.values())), scan) for name, scan in scans.items()]
    for name, wy, scan in pairs:
        for tensor in (*workspace, o, state):
            tensor.fill_(float("nan"))
        run_wy(wy), run_scan(scan)
        error = max(relative_error(o[:, :, :2], ref_o), relative_error(state[:, :2], ref_state))
        if not error < TOLERANCE:
            raise SystemExit(f"{name}: error {error:.1e} is over {TOLERANCE}: not timed")
        is_wy = name in wys
        yield {
            "variant": name, "heads": heads, "gate": gate, "error": error, "spec": WY if is_wy else SCAN,
            "ms": time_ms(functools.partial(run_wy, wy) if is_wy else functools.partial(run_scan, scan)),
        }  # fmt: skip


def measure(root: Path, heads: list[int], tokens: int, out: Path | None) -> None:
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, a copy moves {bandwidth / 1e12:.2f} TB/s; milliseconds")
    print(f"{'variant':24s} heads    gate    error      ms   floor  over floor")
    wys, scans = kernels(root, WY, WY_VARIANTS), kernels(root, SCAN, SCAN_VARIANTS)
    rows = []
    for count in heads:
        problem = Problem(tokens=tokens, H=count, HV=count)
        for gate in ("strong", "weak"):
            for row in measure_rows(wys, scans, count, gate, tokens):
                row["floor"] = floor_ms(cost(row.pop("spec"), problem), ARCH, bandwidth)
                rows.append(row)
                print(
                    f"{row['variant']:24s} {count:5d} {gate:>7s} {row['error']:8.1e} {row['ms']:7.3f} {row['floor']:7.3f} "
                    f"{row['ms'] / row['floor']:11.2f}",
                    flush=True,
                )
    if out is not None:
        content = {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": bandwidth, "tokens": tokens, "rows": rows}
        out.write_text(json.dumps(content, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("prepare", "measure"))
    parser.add_argument("dir", type=Path)
    parser.add_argument("--heads", type=int, nargs="+", default=[96, 32, 8])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.step == "prepare":
        prepare(options.dir)
    else:
        measure(options.dir, options.heads, options.tokens, options.out)


if __name__ == "__main__":
    main()
