"""Runs the GPU cases from carried artifacts: needs torch and apache-tvm-ffi, no TileLang, no compiler, no pytest.

    python tools/gpu_check.py [--arch sm_90 ...] [--out results.json]

Prints one line per case (errors against the float64 recurrence), then the time of a first call in a fresh process with the
driver's cache off. Exits 1 where a case is over its tolerance. An arch other than the device's own runs through its PTX.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

FIRST_CALL = """
import json, time
import torch
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
start = time.perf_counter()
import kda_tl
imported = time.perf_counter()
q, k, v = (torch.randn(1, 1000, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
g, beta = -torch.rand(1, 1000, 32, 128, device="cuda"), torch.rand(1, 1000, 32, device="cuda")
torch.cuda.synchronize()
called = time.perf_counter()
kda_tl.chunk_kda(q, k, v, g, beta, output_final_state=True)
torch.cuda.synchronize()
done = time.perf_counter()
kda_tl.chunk_kda(q, k, v, g, beta, output_final_state=True)
torch.cuda.synchronize()
print(json.dumps({"import_s": imported - start, "first_call_s": done - called, "second_call_s": time.perf_counter() - done}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_90"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()

    import torch
    from chunk_kda_cases import CASES, TOLERANCE, run_case
    from timing import need_gpu

    need_gpu()

    results: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tilelang_installed": importlib.util.find_spec("tilelang") is not None,
        "seed": options.seed,
    }
    print(results)
    failed = 0
    for arch in options.arch:
        os.environ["KDA_TL_ARCH"] = arch
        rows = {}
        for case in CASES:
            start = time.perf_counter()
            try:
                errors = run_case(case, seed=options.seed)
                good = max(errors.values()) < TOLERANCE
                text = f"o {errors['o']:.2e}  state {errors['state']:.2e}"
            except Exception as error:
                errors, good, text = {"error": repr(error)}, False, repr(error)
            failed += not good
            rows[case.name] = errors
            print(
                f"{'ok  ' if good else 'FAIL'} {arch} {case.name:22s} {text}  ({time.perf_counter() - start:.2f} s)", flush=True
            )
        results[arch] = rows
        environment = {**os.environ, "CUDA_CACHE_DISABLE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        process = subprocess.run(
            [sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True, check=False
        )
        failed += process.returncode != 0
        results[f"{arch} first call"] = json.loads(process.stdout) if process.returncode == 0 else process.stderr[-2000:]
        print(arch, "first call in a fresh process, driver cache off:", results[f"{arch} first call"], flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
