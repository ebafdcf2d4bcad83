"""What a call costs the host: microseconds from entering an op to its return, nothing waited for, and which part takes them.

    python tools/bench_host.py [--device cuda|cpu] [--out FILE]

On a GPU, with `kda-tl build` artifacts: the calls as they are, at sizes so small that the host is what takes long. On the cpu
calls are planned as for sm_90, and an empty tvm-ffi function stands for every kernel: all but the driver's part is measured. It
needs a C++ compiler there, for the native part of a launch.

Columns: the whole call; what recognises it in native code; results allocated; the kernels launched, workspace included; what is
left; and the whole call where it is not recognised, but was decided before. Medians of several runs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tvm_ffi

import kda_tl
from kda_tl.compiler.support import compile_helper
from kda_tl.ops import repeated
from kda_tl.runtime import dispatcher

PARTS = ("call", "recognise", "allocate", "kernels", "rest", "known")


def microseconds(call: Callable[[], Any], device: torch.device, calls: int = 50, runs: int = 21) -> float:
    def run() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken = time.perf_counter() - start
        if device.type == "cuda":
            torch.cuda.synchronize()  # between runs: within one, the queue of launches never fills
        return taken / calls * 1e6

    run()
    return statistics.median(run() for _ in range(runs))


def cases(device: torch.device) -> dict[str, tuple[Any, dict[str, Any]]]:
    """name -> (op, arguments): gate, l2 norm and sigmoid in the kernel, bfloat16, K = V = 128."""
    heads, half = 4, {"device": device, "dtype": torch.bfloat16}
    fused = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
             "A_log": torch.rand(heads, device=device), "dt_bias": torch.randn(heads * 128, device=device)}  # fmt: skip

    def tokens(B: int, T: int) -> dict[str, Any]:
        x = {name: torch.randn(B, T, heads, 128, **half) for name in ("q", "k", "v", "g")}
        return x | {"beta": torch.randn(B, T, heads, **half)} | fused | {"lower_bound": -5.0}

    def pack(T: int) -> dict[str, Any]:
        offsets = torch.tensor([0, T], dtype=torch.int32)
        return {"cu_seqlens": offsets.to(device, copy=True), "cu_seqlens_cpu": offsets}

    state = {"initial_state": torch.randn(1, heads, 128, 128, device=device), "output_final_state": True}
    pool = torch.randn(8, heads, 128, 128, device=device)
    slots = torch.tensor([3, 1, 2], dtype=torch.int32, device=device)
    found: dict[str, tuple[Any, dict[str, Any]]] = {
        "chunk_kda": (kda_tl.chunk_kda, tokens(1, 64)),
        "chunk_kda packed, states": (kda_tl.chunk_kda, tokens(1, 64) | pack(64) | state),
        "chunk_kda packed, pool": (
            kda_tl.chunk_kda, tokens(1, 64) | pack(64) | {"initial_state": pool, "state_indices": slots[:1]},
        ),
        "chunk_kda packed, in segments": (kda_tl.chunk_kda, tokens(1, 2048) | pack(2048) | state | {"intracard_segments": 4}),
        "recurrent_kda, pool": (
            kda_tl.recurrent_kda,
            tokens(3, 1) | {"initial_state": pool, "state_indices": slots, "state_v_first": True, "inplace": True},
        ),
    }  # fmt: skip
    cache = kda_tl.DeltaLogCache(8, heads, device=device)
    gdn = {name: x for name, x in (tokens(1, 64) | state).items() if name != "lower_bound"}
    gdn |= {"g": torch.randn(1, 64, heads, **half), "dt_bias": torch.randn(heads, device=device)}
    found["chunk_gdn, states"] = (kda_tl.chunk_gdn, gdn)
    found["deltalog_decode_kda"] = (kda_tl.deltalog_decode_kda, tokens(3, 1) | {"cache": cache, "state_indices": slots})
    return found


def parts(op: Any, x: dict[str, Any], device: torch.device) -> dict[str, float]:
    find = dispatcher.kernel
    empty = tvm_ffi.get_global_func("testing.nop")

    def stand_in(*which: Any) -> Any:
        dispatcher._kernels.get(which)  # as long as the look-up takes
        return empty

    if device.type == "cpu":
        dispatcher.kernel = stand_in
    kept: list[tuple[Any, Any, tuple[Any, ...]]] = []
    keep = repeated.Candidate.settle

    def settle(self: Any, results: Any) -> None:
        keep(self, results)
        kept.append((self._table, self._table.kept.get(self._number), self._values))

    repeated.Candidate.settle = settle
    for _ in range(3):
        op(**x)
    repeated.Candidate.settle = keep
    row = {"call": microseconds(lambda: op(**x), device)}
    table, repeat, values = kept[0] if kept else (None, None, ())
    if repeat is not None:

        def allocate() -> list[Any]:
            return [None if like is None else repeated.empty_like(like)
                    for like in (repeat.o, repeat.final)]  # fmt: skip

        results = allocate()
        row["recognise"] = microseconds(lambda: table.find(*values), device)
        row["allocate"] = microseconds(allocate, device)
        row["kernels"] = microseconds(lambda: repeat.run(table.find(*values), *results), device) - row["recognise"]
        row["rest"] = row["call"] - row["recognise"] - row["allocate"] - row["kernels"]
    recognise, op.repeated.call = op.repeated.call, lambda *_: None
    row["known"] = microseconds(lambda: op(**x), device)
    op.repeated.call = recognise
    dispatcher.kernel = find
    return row


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        with tempfile.TemporaryDirectory() as folder:
            helper = Path(folder) / "helper.so"
            helper.write_bytes(compile_helper())
            ctypes.CDLL(str(helper), mode=ctypes.RTLD_GLOBAL)
    torch.set_num_threads(1)
    alone = microseconds(lambda: torch.empty((1, 64, 4, 128), dtype=torch.bfloat16, device=device), device)
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}: torch.empty takes {alone:.2f} microseconds")
    print(f"{'microseconds':32s}" + "".join(f"{name:>11s}" for name in PARTS))
    rows = {}
    with dispatcher.assume_arch("sm_90") if device.type == "cpu" else nullcontext():
        for name, (op, x) in cases(device).items():
            rows[name] = parts(op, x, device)
            print(f"{name:32s}" + "".join(f"{rows[name][p]:11.2f}" if p in rows[name] else " " * 11 for p in PARTS), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"device": str(device), "torch.empty": alone, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
