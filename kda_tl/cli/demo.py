"""kda-tl demo: one small call on the best device here, against the float64 recurrence."""

from __future__ import annotations

import importlib.util
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import click
import torch
from torch import Tensor

from kda_tl.cli.doctor import find_nvcc
from kda_tl.cli.shared import arch_option
from kda_tl.ops.chunk_kda import chunk_kda
from kda_tl.ops.explain import explain
from kda_tl.ops.plan import Plan
from kda_tl.reference import beta_sigmoid, kda_gate, l2norm, recurrent_kda
from kda_tl.registry import RegistryError, default_root, install_command
from kda_tl.runtime import dispatcher
from kda_tl.runtime.build_on_miss import MODULE, child_environment
from kda_tl.runtime.errors import KdaTlError

__all__ = ["demo"]

TOLERANCE_CPU = 1e-5  # ||out - reference|| / ||reference||
TOLERANCE_GPU = 5e-3  # bfloat16; rounding o alone costs 1.7e-3
HEAD_DIM = 128
REPEATS = 3

EPILOG = """\b
Examples:
  kda-tl demo
  kda-tl demo --tokens 2000 --heads 8
  kda-tl demo --device cpu --seed 1

Exits 1 where an error is too large, or kernels are missing and cannot be built here.
"""


@click.command(epilog=EPILOG, short_help="One call against the float64 recurrence.")
@click.option("--tokens", type=click.IntRange(1, 8192), default=300, show_default=True, help="T.")
@click.option("--heads", type=click.IntRange(1, 64), default=2, show_default=True, help="H; v has twice as many.")
@click.option("--device", "where", type=click.Choice(["cuda", "cpu"]), help="[default: cuda where there is one]")
@arch_option("Artifacts of this arch on a GPU, e.g. sm_80 on an H100.  [default: the device's own]")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Of the random inputs.  [default: another one each time]")
def demo(tokens: int, heads: int, where: str | None, arch: str | None, seed: int | None) -> None:
    """Run chunk_kda and compare it with the token recurrence in float64.

    Kernels that are missing are built first, where TileLang and a compiler are installed; a GPU whose kernels can neither be
    found nor built gives way to the cpu. Prints what was launched, the relative errors and the times.
    """
    if where == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no CUDA device here (kda-tl doctor tells more)")
    kind = where or ("cuda" if torch.cuda.is_available() and arch != "cpu" else "cpu")
    if arch is not None and (kind == "cpu") != (arch == "cpu"):
        raise click.UsageError(f"--arch {arch} does not serve the device {kind}")
    seed = torch.seed() % 2**32 if seed is None else seed
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    cpu = torch.device("cpu")
    try:
        with dispatcher.assume_arch(arch) if arch else nullcontext():
            inputs, plan = _problem(tokens, heads, device, seed)
            if not _provide(plan) and kind == "cuda" and where is None:
                click.echo(f"No kernels for {plan.arch}, and none can be built here: the cpu instead.\n", err=True)
                inputs, plan = _problem(tokens, heads, cpu, seed)
            if not _provide(plan):
                raise click.ClickException(
                    f"no kernels for {plan.arch}, and what builds them is not installed: {install_command('build')}, then "
                    f"`kda-tl build --arch {plan.arch}`; or build on another machine, and point KDA_TL_REGISTRY at the folder"
                )
            good = _call_and_compare(inputs, plan, seed)
    except (KdaTlError, RegistryError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if not good:
        raise click.exceptions.Exit(1)


def _problem(tokens: int, heads: int, device: torch.device, seed: int) -> tuple[dict[str, Tensor], Plan]:
    torch.manual_seed(seed)
    inputs = _inputs(tokens, heads, device)
    return inputs, explain("chunk_kda", **{name: inputs[name] for name in ("q", "k", "v", "g", "beta")})


def _provide(plan: Plan) -> bool:
    """Builds what the plan lacks, in a process of its own, its progress on stderr; False where nothing here could."""
    missing = [launch.spec for launch in plan.launches if dispatcher.choose(launch.spec, plan.arch).path is None]
    if not missing:
        return True
    if importlib.util.find_spec("tilelang") is None or (plan.arch != "cpu" and find_nvcc() is None):
        return False
    root = default_root()
    words = ["build", "--arch", plan.arch, "--registry", str(root)]
    words += [word for spec in missing for word in ("--spec", spec.key)]
    names = " and ".join(dict.fromkeys(spec.kernel for spec in missing))
    click.echo(
        f"Not built yet for {plan.arch}: {names}. Compiling into {root}, once (kda-tl build --arch {plan.arch})", err=True
    )
    if subprocess.run([sys.executable, "-m", MODULE, *words], env=child_environment(), stdout=subprocess.DEVNULL).returncode:
        raise click.ClickException("the build failed; `kda-tl doctor` tells what is amiss here")
    return True


def _inputs(T: int, H: int, device: torch.device) -> dict[str, Tensor]:
    HV = 2 * H
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return {
        **{name: torch.randn(1, T, H, HEAD_DIM, dtype=dtype, device=device) for name in ("q", "k")},
        "v": torch.randn(1, T, HV, HEAD_DIM, dtype=dtype, device=device),
        "g": torch.randn(1, T, HV, HEAD_DIM, dtype=dtype, device=device),
        "beta": torch.randn(1, T, HV, dtype=dtype, device=device),
        "initial_state": torch.randn(1, HV, HEAD_DIM, HEAD_DIM, device=device),
        "A_log": (1 + 15 * torch.rand(HV, device=device)).log(),
        "dt_bias": torch.randn(HV, HEAD_DIM, device=device),
    }


def _call_and_compare(inputs: dict[str, Any], plan: Plan, seed: int) -> bool:
    results: list[tuple[Tensor, Tensor | None]] = []

    def call() -> None:
        with torch.no_grad():
            result = chunk_kda(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                               use_beta_sigmoid_in_kernel=True)  # fmt: skip
        results.append(result)

    first, *times = (_milliseconds(call, inputs["q"].device) for _ in range(1 + REPEATS))
    remark = " (the cpu is for checking, not for speed)" if plan.arch == "cpu" else ""
    click.echo(f"{plan}\n")
    click.echo(f"random inputs, seed {seed}: raw gate, l2 norm, sigmoid of beta, an initial state")
    click.echo(f"first call   {first:.4g} ms, the artifacts verified by hash and loaded in it")
    click.echo(f"then         {statistics.median(times):.4g} ms, median of {REPEATS}{remark}")
    expected = recurrent_kda(
        l2norm(inputs["q"].double()), l2norm(inputs["k"].double()), inputs["v"].double(),
        kda_gate(inputs["g"].double(), inputs["A_log"].double(), inputs["dt_bias"].double()),
        beta_sigmoid(inputs["beta"].double()), initial_state=inputs["initial_state"].double(),
    )  # fmt: skip
    tolerance = TOLERANCE_CPU if plan.arch == "cpu" else TOLERANCE_GPU
    good = True
    for name, out, reference in zip(("o", "final state"), results[-1], expected, strict=True):
        assert out is not None
        error = ((out.double() - reference).norm() / reference.norm()).item()
        good &= math.isfinite(error) and error < tolerance
        click.echo(f"{name:<12} {error:.1e}  ||out - reference|| / ||reference||, the token recurrence in float64")
    click.echo(f"\n{'Right' if good else 'WRONG'}: the errors have to stay under {tolerance:.0e}.")
    return good


def _milliseconds(call: Callable[[], None], device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now()
    call()
    return (now() - start) * 1e3
