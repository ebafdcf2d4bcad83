"""Calls that are recognised, down to the launch, on a machine without a GPU: the artifacts take what native code hands them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_runtime_mock_driver import mock_driver  # noqa: F401

from kda_tl.registry import Registry

pytestmark = pytest.mark.cuda_compile

HERE = Path(__file__).parent
PREFILL = ["chunk_wy", "chunk_scan"]
KERNELS = {
    "dense": PREFILL,
    "pack": PREFILL,
    "pool": PREFILL,
    "segments": ["chunk_wy", "intracard_pre_scan", "intracard_merge", "chunk_scan"],
    "decode": ["recurrent_decode"],
    "deltalog": ["deltalog_decode"],
}


def test_kernels_get_what_they_got_the_first_time(
    built: Callable[[str], Registry],
    mock_driver: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(mock_driver), os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": str(HERE.parents[1]),
        "MOCK_CUDA_LOG": str(log),
    }
    command = [sys.executable, str(HERE / "mock_driver_repeated.py"), str(built("sm_90").root)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    for name, kernels in KERNELS.items():
        assert report[name] == {"recognised": True, "kernels": kernels, "same": True, "raised": []}, name
    launched = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("launch")]
    expected = [kernel for kernels in KERNELS.values() for kernel in kernels * 4]
    assert all(name.startswith(kernel) for name, kernel in zip(launched, expected, strict=True))
