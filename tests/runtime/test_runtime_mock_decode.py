"""The decode ops down to the launch, on a machine without a GPU: the artifacts take what the ops hand them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decode_cases import CASES, DecodeCase
from test_runtime_mock_driver import mock_driver  # noqa: F401

from kda_tl.registry import Registry
from kda_tl.specs.decode import RecurrentDecodeSchedule, RecurrentDecodeSpec
from kda_tl.specs.schedules import schedule_for

pytestmark = pytest.mark.cuda_compile

HERE = Path(__file__).parent


def columns(case: DecodeCase, state_dtype: str) -> int:
    """Of V, that a block has in the class of the largest sizes, whose artifacts the launches take."""
    narrow = case.dtype == torch.bfloat16 and case.initial  # else states are float32
    schedule = schedule_for(RecurrentDecodeSpec(state_dtype=state_dtype if narrow else "float32"), "sm_90")
    assert isinstance(schedule, RecurrentDecodeSchedule)
    return schedule.block_v


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
        (case.N if case.lengths is None else len(case.lengths) + 1) * case.HV * -(-case.V // columns(case, dtype))
        for case in CASES
        if case.K != 64
        for dtype in ("float32", "bfloat16")
    ]
    assert [line[3:6] for line in launches] == [[str(count), "1", "1"] for count in blocks]
