"""From source to a checked result on any machine, no GPU needed: sh tools/demo.sh

Builds the kernels for the cpu into a temporary registry, calls kda_tl.chunk_kda on random inputs in a fresh process, and
compares the result with the float64 recurrence. Exits 1 where they differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5  # ||out - reference|| / ||reference||
T, H, HV, K, V = 300, 2, 4, 128, 128


def build_and_call() -> int:
    with tempfile.TemporaryDirectory(prefix="kda-tl-demo-") as folder:
        python = [sys.executable]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        print("1. Compile the kernels ahead of time, here for the cpu: kda-tl build --arch cpu\n", flush=True)
        start = time.perf_counter()
        command = [*python, "-m", "kda_tl.cli.main", "build", "--arch", "cpu", "--registry", folder]
        if subprocess.run(command, env=environment, check=False).returncode != 0:
            return 1
        print(f"\nBuilt in {time.perf_counter() - start:.1f} s, the compiler's start included.\n")
        print("2. Call kda_tl.chunk_kda from a fresh process, which never loads the compiler.\n", flush=True)
        environment["KDA_TL_REGISTRY"] = folder
        return subprocess.run([*python, __file__, "--call"], env=environment, check=False).returncode


def call_and_compare() -> int:
    import torch

    import kda_tl
    from kda_tl.reference import beta_sigmoid, kda_gate, l2norm, recurrent_kda

    seed = torch.seed() % 2**32
    torch.manual_seed(seed)
    q, k = torch.randn(2, 1, T, H, K)
    v, g = torch.randn(1, T, HV, V), torch.randn(1, T, HV, K)
    beta, state = torch.randn(1, T, HV), torch.randn(1, HV, K, V)
    A_log, dt_bias = (1 + 15 * torch.rand(HV)).log(), torch.randn(HV, K)

    def call() -> tuple[torch.Tensor, torch.Tensor | None]:
        return kda_tl.chunk_kda(
            q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
        )  # fmt: skip

    start = time.perf_counter()
    o, final_state = call()
    first = time.perf_counter() - start
    start = time.perf_counter()
    call()
    again = time.perf_counter() - start
    assert final_state is not None and "tilelang" not in sys.modules
    print(f"{T} tokens, {H} heads of q and k, {HV} of v, random inputs (seed {seed})")
    print(f"first call   {first * 1e3:7.1f} ms, the artifacts verified by hash and loaded in it")
    print(f"second call  {again * 1e3:7.1f} ms (the cpu is for checking, not for speed)\n")

    print("3. Compare with the token recurrence in float64: ||out - reference|| / ||reference||\n")
    gate = kda_gate(g.double(), A_log.double(), dt_bias.double())
    expected = recurrent_kda(
        l2norm(q.double()), l2norm(k.double()), v, gate, beta_sigmoid(beta.double()), initial_state=state
    )  # fmt: skip
    errors = [((out.double() - ref).norm() / ref.norm()).item() for out, ref in zip((o, final_state), expected, strict=True)]
    print(f"o            {errors[0]:.1e}\nfinal state  {errors[1]:.1e}\n")

    print("4. What the call launched: print(kda_tl.explain(kda_tl.chunk_kda, q, k, v, g, beta))\n")
    print(kda_tl.explain(kda_tl.chunk_kda, q, k, v, g, beta, initial_state=state))
    good = all(math.isfinite(error) and error < TOLERANCE for error in errors)
    print(f"\n{'Right' if good else 'WRONG'}: the errors have to stay under {TOLERANCE:.0e}.")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", action="store_true", help="only the call, with what is built already")
    return call_and_compare() if parser.parse_args().call else build_and_call()


if __name__ == "__main__":
    sys.exit(main())
