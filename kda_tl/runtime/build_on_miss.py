"""KDA_TL_ON_MISS=build: one artifact, compiled by `kda-tl build` in a child process. This one never loads the compiler."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kda_tl.registry import checkout_root, default_root
from kda_tl.registry.locks import exclusive
from kda_tl.runtime.counters import counts
from kda_tl.runtime.errors import BuildOnMissFailed
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.kernels import KernelSpec

__all__ = ["build_command", "build_missing", "child_environment"]

log = logging.getLogger("kda_tl")

MODULE = "kda_tl.cli.main"
TAIL = 2000  # characters of the child's complaint that an error shows


def build_command(spec: KernelSpec, arch: str) -> str:
    """What to type to have the artifact: the arch's whole default set where that brings it, else the one spec."""
    if spec in default_specs(arch):
        return f"kda-tl build --arch {arch}"
    return f"kda-tl build --arch {arch} --spec {shlex.quote(spec.key)}"


def build_missing(spec: KernelSpec, arch: str, present: Callable[[], bool]) -> None:
    """Compiles `spec` for `arch` into the first writable registry of the search path, and says so on the logger "kda_tl".

    One process builds at a time in a registry, and those that waited look again before they build too. The child refuses a
    TileLang of another version than the package pins.

    Args:
        present: whether some registry has it by now.

    Raises:
        BuildOnMissFailed: the build failed, or a CUDA graph is being captured.
        RegistryError: no registry can be written.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise BuildOnMissFailed(
            f"no artifact of {spec.key} for {arch}, and none is built while a CUDA graph is captured: call kda_tl.warmup, or "
            f"the op itself, once before the capture, or run `{build_command(spec, arch)}`"
        )
    root = default_root()
    words = ["build", "--arch", arch, "--spec", spec.key, "--registry", str(root), "--jobs", "1"]
    with _alone(root):
        if present():
            return
        log.warning("KDA_TL_ON_MISS=build: compiling %s for %s into %s, in a child process", spec.key, arch, root)
        start = time.perf_counter()
        counts.builds += 1
        ran = subprocess.run(
            [sys.executable, "-m", MODULE, *words], env=child_environment(), capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    if ran.returncode != 0:
        said = (ran.stderr.strip() or ran.stdout.strip() or "it said nothing")[-TAIL:]
        raise BuildOnMissFailed(
            f"KDA_TL_ON_MISS=build: `kda-tl {shlex.join(words)}` failed with exit code {ran.returncode}: {said}"
        )
    log.warning("KDA_TL_ON_MISS=build: %s for %s is ready after %.1f s", spec.key, arch, time.perf_counter() - start)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Holds the registry's build lock, where its file system has locks; without one, two builders only do the work twice."""
    lock = exclusive(root / ".build-on-miss.lock")
    try:
        lock.__enter__()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def child_environment() -> dict[str, str]:
    """This process's, in which the child finds the same package and builds nothing on a miss of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "KDA_TL_ON_MISS"}
    checkout = checkout_root()
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(checkout), environment.get("PYTHONPATH")]))
    return environment
