"""Real input: flash-linear-attention's KimiDeltaAttention layer at Kimi-Linear-48B's sizes, with our op in place of its own.

    python tools/fla_layer.py [--tokens 1000] [--out results.json]

Text bytes are embedded and go through one layer with random weights (hidden size 2304, 32 heads of 128, softplus gate, l2norm
and sigmoid in the op, state [.., V, K]) twice: with the layer's own chunk_kda, and with ours. Prints the relative difference of
the layer's outputs and of the states in its cache, and both errors against the float64 recurrence on the op's own inputs.
Needs flash-linear-attention 0.6 and an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

try:
    import fla.layers.kda as layer_module
except ImportError as error:
    raise SystemExit(f"flash-linear-attention 0.6 must be installed beside kda-tl: {error}") from None

import kda_tl  # noqa: E402
from kda_tl.reference import beta_sigmoid, kda_gate, l2norm, recurrent_kda  # noqa: E402

HIDDEN, HEADS, HEAD_DIM = 2304, 32, 128
TOLERANCE = 0.005


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    text = (ROOT / "README.md").read_bytes() + (ROOT / "LICENSE").read_bytes()
    tokens = torch.tensor(list(text[: options.tokens]), device="cuda")
    embedding = torch.nn.Embedding(256, HIDDEN, device="cuda", dtype=torch.bfloat16)
    layer = layer_module.KimiDeltaAttention(hidden_size=HIDDEN, head_dim=HEAD_DIM, num_heads=HEADS, layer_idx=0)
    layer = layer.to("cuda").bfloat16().eval()
    layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
    hidden = embedding(tokens)[None]

    theirs = layer_module.chunk_kda
    captured: dict[str, Any] = {}
    outputs: dict[str, torch.Tensor] = {}
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "tokens": len(tokens), "seed": options.seed}

    def recording(op: Any, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            captured["arguments"] = dict(arguments)
            captured[name] = op(**{**arguments, "output_final_state": True})
            return captured[name]

        return call

    with torch.no_grad():
        for name, op in (("fla", theirs), ("kda_tl", kda_tl.chunk_kda)):
            layer_module.chunk_kda = recording(op, name)
            start = time.perf_counter()
            outputs[name] = layer(hidden)[0]
            torch.cuda.synchronize()
            results[f"{name} first forward, seconds"] = round(time.perf_counter() - start, 3)
        layer_module.chunk_kda = theirs
        a = captured["arguments"]
        o, state = recurrent_kda(
            l2norm(a["q"].double()), l2norm(a["k"].double()), a["v"],
            kda_gate(a["g"].double(), a["A_log"].double(), a["dt_bias"].double(), a["lower_bound"]),
            beta_sigmoid(a["beta"].double(), a["allow_neg_eigval"]), state_v_first=True,
        )  # fmt: skip
    results["layer output, kda_tl against fla"] = relative(outputs["kda_tl"], outputs["fla"])
    results["final state, kda_tl against fla"] = relative(captured["kda_tl"][1], captured["fla"][1])
    for name in outputs:
        results[f"{name} op against float64"] = {
            "o": relative(captured[name][0], o),
            "state": relative(captured[name][1], state),
        }
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    good = results["layer output, kda_tl against fla"] < TOLERANCE and bool(outputs["kda_tl"].isfinite().all())
    print("agrees" if good else f"DIFFERS by more than {TOLERANCE}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
