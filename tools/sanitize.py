"""One small call of every kernel family, for NVIDIA's compute-sanitizer on the device:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck  python tools/sanitize.py
    compute-sanitizer --tool racecheck python tools/sanitize.py

Without the first variable torch hands out parts of larger allocations, whose ends memcheck does not see. The results are right
or wrong elsewhere (tests/gpu); here only the accesses count. KDA_TL_ARCH picks the artifacts.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import torch  # noqa: E402
from decode_cases import CASES as DECODE_CASES  # noqa: E402
from decode_cases import OPS as DECODE_OPS  # noqa: E402
from decode_cases import make_decode_inputs  # noqa: E402
from deltalog_cases import Walk  # noqa: E402
from prefill_cases import NAMES, OPS, PrefillCase, make_inputs  # noqa: E402
from timing import need_gpu  # noqa: E402

from kda_tl.specs.rules import RULES  # noqa: E402

PACK = (1, 0, 70, 129)


def prefill() -> None:
    cases = [PrefillCase(rule, lengths=PACK, tail=3) for rule in RULES]
    cases += [PrefillCase("kda", dtype, dtype, lengths=PACK, form="bounded") for dtype in (torch.bfloat16, torch.float32)]
    for case in cases:
        x = make_inputs(case, "cuda", 0)
        offsets = torch.tensor([0, 1, 1, 71, 200], device="cuda")
        pool = torch.randn(6, case.HV, case.K, case.V, device="cuda")
        names = NAMES.get(case.rule, {})
        options = {"normalize": False} if case.rule == "linear_attention" else {"return_intermediate_states": True}
        if case.form:
            options |= {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "lower_bound": -5.0}
            options |= {"use_beta_sigmoid_in_kernel": True}
        for segments in (1, 2):
            with torch.no_grad():
                arguments = {names.get(name, name): tensor for name, tensor in x.items()}
                OPS[case.rule](
                    **arguments, cu_seqlens=offsets, initial_state=pool[:4], output_final_state=True,
                    intracard_segments=segments, **options,
                )  # fmt: skip
                if case.rule != "linear_attention":
                    indices = torch.tensor([5, -1, 0, 2], device="cuda")
                    OPS[case.rule](
                        **arguments, cu_seqlens=offsets, initial_state=pool, state_indices=indices, null_index=-1,
                        intracard_segments=segments, **{k: v for k, v in options.items() if k != "return_intermediate_states"},
                    )  # fmt: skip
        torch.cuda.synchronize()
        print("prefill", case.name, flush=True)


def decode() -> None:
    for case in DECODE_CASES[:12]:
        with torch.no_grad():
            DECODE_OPS[case.rule](**make_decode_inputs(case, "cuda", 0).args)
        torch.cuda.synchronize()
        print("decode", case.name, flush=True)


def deltalog() -> None:
    for rule, dtype, launches in (
        ("kda", torch.float32, 1), ("kda", torch.bfloat16, 2), ("gdn", torch.float32, 1), ("rwkv6", torch.float16, 1),
    ):  # fmt: skip
        walk = Walk(rule, "cuda", dtype, merge_every=3, launches=launches)
        walk.write([0, 1, 2, 3])
        for _ in range(4):
            walk.decode([0, 3, -1, 2])
        walk.decode([1, 2], T=3)
        torch.cuda.synchronize()
        print("deltalog", rule, dtype, launches, flush=True)


if __name__ == "__main__":
    need_gpu()
    prefill()
    decode()
    deltalog()
