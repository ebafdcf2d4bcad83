"""Times chunk_kda's kernels, checked first: python tools/bench_chunk_kda.py [--out results.json]

Weak and strong gates, T 8192, several head counts; medians of CUDA events over kernels on random inputs, in milliseconds, next
to the byte floor of each kernel at the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import torch  # noqa: E402
from chunk_kda_cases import Case, make_inputs, relative_error  # noqa: E402

import kda_tl  # noqa: E402
from kda_tl.ops.chunk_kda import CHUNK_SIZE  # noqa: E402
from kda_tl.reference import recurrent_kda  # noqa: E402
from kda_tl.runtime import dispatcher  # noqa: E402
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec  # noqa: E402


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


def measure(heads: int, gate: str, tokens: int, bandwidth: float) -> dict[str, object]:
    """One row of the table: errors of two heads against the float64 recurrence, then the times."""
    case = Case("bench", T=tokens, H=heads, HV=heads, gate=gate)
    x = make_inputs(case, "cuda", seed=heads)
    x = {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in x.items()}
    with torch.no_grad():
        o, state = kda_tl.chunk_kda(**x, output_final_state=True)
        few = {
            n: t[:, :, :2] if t is not None and t.dim() > 2 and n != "initial_state" else t
            for n, t in x.items()
            if n != "state_v_first"
        }
        few["initial_state"] = x["initial_state"][:, :2]
        ref_o, ref_state = recurrent_kda(**few)
        error = max(relative_error(o[:, :, :2], ref_o), relative_error(state[:, :2], ref_state))
    slots = -(-tokens // CHUNK_SIZE)
    A_inv, P = torch.empty((2, slots, heads, CHUNK_SIZE, CHUNK_SIZE), dtype=torch.bfloat16, device="cuda")
    offsets = torch.empty(1, dtype=torch.int32, device="cuda")
    arch = dispatcher.device_arch(torch.device("cuda", 0))
    wy, scan = dispatcher.kernel(ChunkWySpec(), arch), dispatcher.kernel(ChunkScanSpec(), arch)
    wy_ms = time_ms(lambda: wy(x["q"], x["k"], x["g"], x["beta"], offsets, A_inv, P, 1))
    scan_ms = time_ms(
        lambda: scan(x["q"], x["k"], x["v"], x["g"], offsets, A_inv, P, o, x["initial_state"], state, 0.088, 1, 1, 1)
    )
    op_ms = time_ms(lambda: kda_tl.chunk_kda(**x, output_final_state=True))
    unit = tokens * heads * 128 * 2
    return {
        "heads": heads, "gate": gate, "error": error, "chunk_wy_ms": wy_ms, "chunk_scan_ms": scan_ms, "op_ms": op_ms,
        "chunk_wy_floor_ms": 5 * unit / bandwidth * 1e3, "chunk_scan_floor_ms": 7 * unit / bandwidth * 1e3,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[96, 32, 8])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s")
    rows = []
    for heads in options.heads:
        for gate in ("strong", "weak"):
            row = measure(heads, gate, options.tokens, bandwidth)
            rows.append(row)
            print({k: round(v, 4) if isinstance(v, float) and k != "error" else v for k, v in row.items()}, flush=True)
    if options.out:
        options.out.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "copy_bytes_per_s": bandwidth, "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
