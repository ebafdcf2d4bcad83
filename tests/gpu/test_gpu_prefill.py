"""Every prefill op on a device, against the float64 recurrence: `prefill_cases` for all archs that it loads."""

from __future__ import annotations

import os

import pytest
import torch
from prefill_cases import CASES, PrefillCase, limit, run_case

from kda_tl.specs.archs import ARCHS, archs_for_capability

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[name for name, row in ARCHS.items() if not row.is_cpu][::-1])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every arch whose artifacts this device can load, forced."""
    if request.param not in archs_for_capability(torch.cuda.get_device_capability()):
        pytest.skip(f"{torch.cuda.get_device_name()} runs no {request.param} artifacts")
    monkeypatch.setenv("KDA_TL_ARCH", request.param)
    return request.param


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_the_recurrence(arch: str, case: PrefillCase) -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    errors = run_case(case, seed=seed)
    assert all(error < limit(case, what) for what, error in errors.items()), (errors, seed)
