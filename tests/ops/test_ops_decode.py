"""Recurrent decode on the cpu, against the token recurrence in float64."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from decode_cases import CASES, SERVING, DecodeCase, run_decode_case

import kda_tl

pytestmark = [pytest.mark.tilelang, pytest.mark.usefixtures("cpu_kernels")]

TOLERANCE = 2e-6
ROUNDING = {torch.float32: TOLERANCE, torch.float16: 6e-4, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_the_recurrence(case: DecodeCase) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    errors = run_decode_case(replace(case, dtype=torch.float32), "cpu", seed)
    assert max(errors.values()) < TOLERANCE, (errors, seed)
