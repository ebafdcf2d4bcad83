"""Times the prefill ops as callers meet them: fused gate, l2 norm and sigmoid, packed, states in and out, dispatcher included.

    python tools/bench_prefill.py [--heads 96 32] [--rules kda] [--peer] [--out FILE]

On the device, with `kda-tl build` artifacts on the registry search path. --peer times flash-linear-attention beside it, on the
same tensors, where it is installed; it compiles for a minute or two per head count.

Per case: the error of two heads against the float64 recurrence, then medians in milliseconds of CUDA events around the call and
of a CUDA graph's replays, with the plan's cut into segments and with sequences in one piece, and the planned graph's time over
the op's floor (`kda_tl.specs.floors`: inputs read once, outputs written once); last, the host's time per call.
bfloat16, K = V = 128, random inputs. Gates: "strong" (A_log = log U(1, 16)) and "weak" (dt_bias = -8) are bounded at -5.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu"), str(ROOT / "tools")]

import torch  # noqa: E402
from chunk_kda_cases import TOLERANCE, relative_error  # noqa: E402
from timing import captured, need_gpu, time_ms  # noqa: E402

import kda_tl  # noqa: E402
from kda_tl.reference import beta_sigmoid, gdn_gate, kda_gate, l2norm, recurrent_rule  # noqa: E402
from kda_tl.specs.floors import Problem, floor_ms, prefill_cost  # noqa: E402
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec  # noqa: E402
from kda_tl.specs.rules import RULES  # noqa: E402

OPS = {"kda": kda_tl.chunk_kda, "gdn": kda_tl.chunk_gdn}
CASES = [  # rule, lengths, H, HV, gate
    *(("kda", [8192], heads, heads, gate) for heads in (96, 64, 32, 16, 8, 4) for gate in ("strong", "weak")),
    ("kda", [8192], 32, 32, "softplus"),
    ("kda", [32768], 8, 8, "weak"),
    ("kda", [1024] * 8, 64, 64, "weak"),
    ("kda", [1300, 547, 2048, 963, 271, 3063], 64, 64, "weak"),
    ("gdn", [8192], 16, 32, "softplus"),
    ("gdn", [1024] * 8, 16, 32, "softplus"),
    ("gdn", [32768], 2, 8, "softplus"),
]


def make_inputs(rule: str, lengths: list[int], H: int, HV: int, gate: str) -> tuple[dict[str, Any], dict[str, Any]]:
    T, bf16 = sum(lengths), {"device": "cuda", "dtype": torch.bfloat16}
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    per_key = rule == "kda"
    bias = torch.full((HV * 128,) if per_key else (HV,), -8.0 if gate == "weak" else 0.0, device="cuda")
    x: dict[str, Any] = {
        "q": torch.randn(1, T, H, 128, **bf16), "k": torch.randn(1, T, H, 128, **bf16), "v": torch.randn(1, T, HV, 128, **bf16),
        "g": torch.randn(1, T, HV, 128, **bf16) if per_key else torch.randn(1, T, HV, **bf16),
        "beta": torch.randn(1, T, HV, **bf16), "initial_state": torch.randn(len(lengths), HV, 128, 128, device="cuda"),
        "A_log": torch.empty(HV, device="cuda").uniform_(1, 16).log(), "dt_bias": bias,
        "cu_seqlens": offsets.cuda(), "cu_seqlens_cpu": offsets,
    }  # fmt: skip
    options: dict[str, Any] = {
        "output_final_state": True, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip
    if gate != "softplus":
        options["lower_bound"] = -5.0
    return x, options


def error_of_two_heads(rule: str, x: dict[str, Any], options: dict[str, Any], o: torch.Tensor, state: torch.Tensor) -> float:
    group = x["v"].shape[2] // x["q"].shape[2]
    v, g, beta = (x[name][:, :, :2].double() for name in ("v", "g", "beta"))
    q, k = (l2norm(x[name][:, :, torch.arange(2, device="cuda") // group].double()) for name in ("q", "k"))
    A_log, bias = x["A_log"][:2].double(), x["dt_bias"].double()
    g = (
        kda_gate(g, A_log, bias.view(-1, 128)[:2], options.get("lower_bound"))
        if rule == "kda"
        else gdn_gate(g, A_log, bias[:2])
    )
    o_true, state_true = recurrent_rule(
        q, k, v, g, beta_sigmoid(beta, False), initial_state=x["initial_state"][:, :2].double(), cu_seqlens=x["cu_seqlens"],
        **RULES[rule].as_dict(),
    )  # fmt: skip
    return max(relative_error(o[:, :, :2], o_true), relative_error(state[:, :2], state_true))


def op_floor_ms(rule: str, lengths: list[int], H: int, HV: int) -> float:
    """Tokens of a pack count as those of sequences of equal length."""
    wy, scan = ChunkWySpec(gate_dtype="bfloat16", decay=RULES[rule].decay), ChunkScanSpec()
    problem = Problem(len(lengths), -(-sum(lengths) // len(lengths)), H, HV)
    found = floor_ms(prefill_cost(wy, scan, problem), "sm_90")
    assert found is not None
    return found


def peer_ms(rule: str, x: dict[str, Any], flags: dict[str, Any]) -> tuple[float, float]:
    """(error, milliseconds) of flash-linear-attention's op of the same name."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    op = {"kda": chunk_kda, "gdn": chunk_gated_delta_rule}[rule]
    bounded = {"safe_gate": True} if "lower_bound" in flags else {}

    def call() -> Any:
        return op(**x, **flags, **bounded)

    return error_of_two_heads(rule, x, flags, *call()), time_ms(call)


def host_microseconds(calls: int = 500) -> float:
    x, options = make_inputs("kda", [64], 4, 4, "weak")
    for _ in range(20):
        kda_tl.chunk_kda(**x, **options)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        kda_tl.chunk_kda(**x, **options)
    return (time.perf_counter() - start) / calls * 1e6


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", help="only cases of these HV")
    parser.add_argument("--rules", nargs="+", choices=list(OPS), default=list(OPS))
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.peer and importlib.util.find_spec("fla") is None:
        parser.error("--peer needs flash-linear-attention: pip install flash-linear-attention==0.6.0")
    need_gpu()
    print(f"{torch.cuda.get_device_name()}, milliseconds: events and (graph)")
    print("rule  lengths            H  HV      gate    error   as planned         one piece    floor  over floor")
    rows = []
    for rule, lengths, H, HV, gate in CASES:
        if rule not in options.rules or (options.heads and HV not in options.heads):
            continue
        x, flags = make_inputs(rule, lengths, H, HV, gate)
        row: dict[str, Any] = {"rule": rule, "lengths": lengths, "H": H, "HV": HV, "gate": gate}
        for name, segments in (("planned", None), ("one piece", 1)):

            def call(x: Any = x, flags: Any = flags, rule: str = rule, segments: int | None = segments) -> Any:
                return OPS[rule](**x, **flags, intracard_segments=segments)

            error = error_of_two_heads(rule, x, flags, *call())
            if not error < TOLERANCE:
                raise SystemExit(f"{row}: error {error:.1e} is over {TOLERANCE}: not timed")
            row[f"error {name}"], row[f"ms {name}"] = error, time_ms(call)
            row[f"graph {name}"] = time_ms(captured(call))
        row["floor_ms"] = op_floor_ms(rule, lengths, H, HV)
        rows.append(row)
        shown = (
            f"{lengths[0]} x {len(lengths)}" if len(set(lengths)) == 1 else f"{len(lengths)} of {min(lengths)}-{max(lengths)}"
        )
        print(
            f"{rule:5s} {shown:16s} {H:3d} {HV:3d} {gate:>9s} {row['error planned']:8.1e} {row['ms planned']:7.3f} "
            f"({row['graph planned']:.3f}) {row['ms one piece']:9.3f} ({row['graph one piece']:.3f}) {row['floor_ms']:8.3f} "
            f"{row['graph planned'] / row['floor_ms']:11.2f}",
            flush=True,
        )
        if options.peer:
            row["error peer"], row["ms peer"] = peer_ms(rule, x, flags)
            print(f"      flash-linear-attention: {row['error peer']:8.1e} {row['ms peer']:7.3f}", flush=True)
    host = host_microseconds()
    print(f"host: {host:.0f} microseconds a call, launches included")
    if options.out is not None:
        content = {"device": torch.cuda.get_device_name(), "host_us": host, "rows": rows}
        options.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
