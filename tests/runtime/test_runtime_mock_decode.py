"""The decode ops down to the launch, on a machine without a GPU: the artifacts take what the ops hand them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from decode_cases import CASES
from test_runtime_mock_driver import mock_driver  # noqa: F401

from kda_tl.registry import Registry

pytestmark = pytest.mark.cuda_compile

HERE = Path(__file__).parent


def test_every_case_is_launched_once(built: Callable[[str], Registry], mock_driver: Path, tmp_path: Path) -> None:  # noqa: F811
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(mock_driver), os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": str(HERE.parents[1]),
        "MOCK_CUDA_LOG": str(log),
    }
    command = [sys.executable, str(HERE / "mock_driver_decode.py"), str(built("sm_90").root), "sm_90"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    raised = json.loads(ran.stdout)
    assert not [f"{name}: {error}" for name, error in raised.items() if error is not None]
    launches = [line.split() for line in log.read_text().splitlines() if line.startswith("launch recurrent_decode")]
    blocks = [
        ((len(case.lengths) + 1) if case.lengths is not None else case.N) * case.HV * -(-case.V // 64)
        for case in CASES
        if case.K != 64
        for _ in range(2)  # dtypes of the state
    ]
    assert [line[3:6] for line in launches] == [[str(count), "1", "1"] for count in blocks]
