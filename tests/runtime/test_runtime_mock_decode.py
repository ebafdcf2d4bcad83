"""The decode ops down to the launch, on a machine without a GPU: the artifacts take what the ops hand them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_cases import CASES, DecodeCase
from test_runtime_mock_driver import mock_driver  # noqa: F401

from kda_tl.registry import Registry
from kda_tl.specs.decode import RecurrentDecodeSchedule, RecurrentDecodeSpec
from kda_tl.specs.deltalog import DeltaLogDecodeSpec
from kda_tl.specs.kernels import KernelSpec
from kda_tl.specs.schedules import schedule_classes

pytestmark = pytest.mark.cuda_compile

HERE = Path(__file__).parent
DTYPES = ("float32", "bfloat16")  # of states


def classes(spec: KernelSpec) -> list[Any]:
    """Schedules, smallest sizes first."""
    return [one.schedule for one in schedule_classes(spec, "sm_90")]


def columns(case: DecodeCase, state_dtype: str, index: int) -> int:
    """Of V, that a block has in a size class; where a spec has fewer of them, in its last."""
    narrow = case.dtype == torch.bfloat16 and case.initial  # else states are float32
    found = classes(RecurrentDecodeSpec(state_dtype=state_dtype if narrow else "float32"))
    schedule = found[min(index, len(found) - 1)]
    assert isinstance(schedule, RecurrentDecodeSchedule)
    return schedule.block_v


def test_every_case_is_launched_once_per_size_class(
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
    count = max(len(classes(RecurrentDecodeSpec(state_dtype=dtype))) for dtype in DTYPES)
    command = [sys.executable, str(HERE / "mock_driver_decode.py"), str(built("sm_90").root), "sm_90", str(count)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    raised = json.loads(ran.stdout)
    assert not [f"{name}: {error}" for name, error in raised.items() if error is not None]
    launches = [line.split() for line in log.read_text().splitlines() if line.startswith("launch ")]
    blocks = [
        (case.N if case.lengths is None else len(case.lengths) + 1) * case.HV * -(-case.V // columns(case, dtype, index))
        for case in CASES
        if case.K != 64
        for dtype in DTYPES
        for index in range(count)
    ]
    recurrent, deltalog = launches[: len(blocks)], launches[len(blocks) :]
    assert [line[1] for line in recurrent] == len(blocks) * ["recurrent_decode_kernel"]
    assert [line[3:6] for line in recurrent] == [[str(number), "1", "1"] for number in blocks]

    step, drafts, append = (DeltaLogDecodeSpec(**field) for field in ({"one_token": True}, {}, {"prepared": True}))

    def grid(spec: DeltaLogDecodeSpec, n: int, HV: int) -> list[str]:
        """A spec has one class."""
        (schedule,) = classes(spec)
        return [str(n * spec.head_dim_v // schedule.block_v), str(HV), "1"]

    # A step in one launch; drafts, behind the fold of logs that lack room; a step in two; drafts again, which never are.
    assert [(line[1], line[3:6]) for line in deltalog] == [
        ("deltalog_decode_step_kernel", grid(step, 3, 4)),
        ("deltalog_decode_kernel", grid(drafts, 2, 4)),
        ("deltalog_decode_kernel", grid(drafts, 2, 4)),
        ("deltalog_prep_kernel", ["3", "2", "1"]),
        ("deltalog_decode_append_kernel", grid(append, 3, 2)),
        ("deltalog_decode_kernel", grid(drafts, 2, 2)),
        ("deltalog_decode_kernel", grid(drafts, 2, 2)),
    ]
