"""The tuner's problems on the host side of GPU artifacts: what the programs' launchers check of arguments, with no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kda_tl.compiler.toolchain import cxx_compiler
from kda_tl.registry import Registry
from kda_tl.specs.kernels import spec_of_key
from kda_tl.tuning.problems import problems

HERE = Path(__file__).parent


@pytest.mark.cuda_compile
def test_launchers_take_the_problems(built: Callable[[str], Registry], tmp_path: Path) -> None:
    registry = built("sm_90")
    for source, library in (("cuda.c", "libcuda.so.1"), ("cudart.c", "libcudart.so.13")):
        path = HERE.parent / "runtime" / "mock_driver" / source
        command = [cxx_compiler(), "-x", "c", "-shared", "-fPIC", "-w", "-o", str(tmp_path / library), str(path)]
        subprocess.run(command, check=True)
    ids = {
        entry.spec_key: entry.path.name for entry in registry.entries("sm_90") if problems(spec_of_key(entry.spec_key), "sm_90")
    }
    assert {spec_of_key(key).kernel for key in ids} == {
        "chunk_wy", "chunk_scan", "intracard_pre_scan", "intracard_merge", "recurrent_decode",
    }  # fmt: skip
    libraries = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")]))
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "PYTHONPATH": str(HERE.parents[1])}
    environment["MOCK_CUDA_LOG"] = str(tmp_path / "log")
    script = str(HERE / "mock_driver_problems.py")
    command = [sys.executable, script, str(registry.root), "sm_90", *(f"{key}={id}" for key, id in ids.items())]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == dict.fromkeys(ids)
    log = (tmp_path / "log").read_text()
    assert all(f"launch {spec_of_key(key).kernel}" in log for key in ids)
