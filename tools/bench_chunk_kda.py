"""Times chunk_kda's kernels under several schedules, each checked before it is timed.

    python tools/bench_chunk_kda.py prepare DIR               anywhere: builds every variant for sm_90 into DIR
    python tools/bench_chunk_kda.py measure DIR [--out FILE]  on the device: needs torch and apache-tvm-ffi only

Prints, per variant, head count and gate: the error against the float64 recurrence, and medians of CUDA events in milliseconds
on random inputs (bfloat16, B 1, T 8192, K = V = 128, g in float32, states in and out), next to each kernel's byte floor at the
copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
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
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec  # noqa: E402
from kda_tl.specs.schedules import ChunkScanSchedule, ChunkWySchedule  # noqa: E402

ARCH = "sm_90"
WY, SCAN = ChunkWySpec(), ChunkScanSpec()
VARIANTS = {
    "plain": (ChunkWySchedule(), ChunkScanSchedule()),
    "warp specialized, V tile 128": (ChunkWySchedule(), ChunkScanSchedule("warp_specialized", block_v=128)),
    "warp specialized, V tile 64": (ChunkWySchedule(), ChunkScanSchedule("warp_specialized", block_v=64)),
    "warp specialized, V tile 32": (ChunkWySchedule(), ChunkScanSchedule("warp_specialized", block_v=32)),
    "warp specialized, V tile 32, 3 stages": (ChunkWySchedule(), ChunkScanSchedule("warp_specialized", block_v=32, stages=3)),
}


def folder(root: Path, name: str) -> Path:
    return root / name.replace(", ", "-").replace(" ", "-")


def prepare(root: Path) -> None:
    from kda_tl.compiler.build import build

    for name, (wy, scan) in VARIANTS.items():
        for result in build(ARCH, [WY, SCAN], Registry(folder(root, name)), schedules={WY: wy, SCAN: scan}):
            print(f"{name}: {result.spec.kernel} {result.seconds:.0f} s", flush=True)


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


def measure_row(wy: Callable[..., Any], scan: Callable[..., Any], heads: int, gate: str, tokens: int) -> dict[str, Any]:
    """The errors of two heads, then the times. Raises where an error is over its tolerance: such a time would mean nothing."""
    x: dict[str, Any] = make_inputs(Case("bench", T=tokens, H=heads, HV=heads, gate=gate), "cuda", seed=heads)
    x = {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in x.items()}
    workspace = Workspace.empty(-(-tokens // WY.chunk_size), heads, 128, torch.float16, True, x["q"].device)
    for tensor in vars(workspace).values():
        tensor.fill_(float("nan"))
    o, state = torch.full_like(x["v"], float("nan")), torch.full_like(x["initial_state"], float("nan"))

    def run_wy() -> None:
        launch_chunk_wy(wy, x["q"], x["k"], x["g"], x["beta"], GateOptions(), None, workspace)

    def run_scan() -> None:
        launch_chunk_scan(scan, x["v"], workspace, o, 128**-0.5, None, x["initial_state"], state)

    run_wy(), run_scan()
    few = {name: x[name][:, :, :2] for name in ("q", "k", "v", "g", "beta")}
    ref_o, ref_state = recurrent_kda(**few, initial_state=x["initial_state"][:, :2])
    error = max(relative_error(o[:, :, :2], ref_o), relative_error(state[:, :2], ref_state))
    if not error < TOLERANCE:
        raise SystemExit(f"error {error:.1e} is over {TOLERANCE}: not timed")
    return {"heads": heads, "gate": gate, "error": error, "chunk_wy": time_ms(run_wy), "chunk_scan": time_ms(run_scan)}


def measure(root: Path, heads: list[int], tokens: int, out: Path | None) -> None:
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, a copy moves {bandwidth / 1e12:.2f} TB/s; milliseconds")
    print(f"{'variant':30s} heads    gate    error  chunk_wy  floor  chunk_scan  floor     sum")
    rows = []
    for name in VARIANTS:
        registry = Registry(folder(root, name))
        paths = [registry.find(ARCH, spec.key) for spec in (WY, SCAN)]
        if None in paths:
            raise SystemExit(f"{registry.root} lacks a kernel: run `python tools/bench_chunk_kda.py prepare {root}` first")
        wy, scan = (load(registry, path, ARCH, spec.key) for path, spec in zip(paths, (WY, SCAN)) if path is not None)
        for count in heads:
            # chunk_wy reads q, k and g (float32: two units) and writes four units; chunk_scan reads these and v, and writes o.
            unit = tokens * count * 128 * 2 / bandwidth * 1e3
            for gate in ("strong", "weak"):
                row = measure_row(wy, scan, count, gate, tokens)
                rows.append({"variant": name, **row, "chunk_wy_floor": 8 * unit, "chunk_scan_floor": 6 * unit})
                print(
                    f"{name:30s} {count:5d} {gate:>7s} {row['error']:8.1e} {row['chunk_wy']:9.3f} {8 * unit:6.3f} "
                    f"{row['chunk_scan']:11.3f} {6 * unit:6.3f} {row['chunk_wy'] + row['chunk_scan']:7.3f}",
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
