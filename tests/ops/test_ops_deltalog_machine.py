"""Random sequences of operations on a cache, on the cpu. DELTALOG_EXAMPLES and DELTALOG_SEED choose how many and which."""

from __future__ import annotations

import os
import secrets

import pytest
import torch
from deltalog_cases import OPS
from deltalog_machine import run_machine

pytestmark = pytest.mark.usefixtures("cpu_kernels")

EXAMPLES = int(os.environ.get("DELTALOG_EXAMPLES", "20"))
SEED = int(os.environ.get("DELTALOG_SEED", secrets.randbelow(2**31)))


@pytest.mark.parametrize("rule", OPS)
def test_random_sequences(rule: str) -> None:
    run_machine(rule, torch.float32, "cpu", -(-EXAMPLES // 3), SEED)


@pytest.mark.parametrize(("state_dtype", "launches"), [(torch.float16, 1), (torch.bfloat16, 1), (torch.float32, 2)])
def test_random_sequences_with_narrow_bases_and_two_launches(state_dtype: torch.dtype, launches: int) -> None:
    run_machine("kda", state_dtype, "cpu", -(-EXAMPLES // 6), SEED, launches)


@pytest.mark.slow
def test_many_random_sequences() -> None:
    run_machine("kda", torch.float32, "cpu", max(EXAMPLES, 200), SEED + 1)
