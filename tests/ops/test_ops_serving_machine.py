"""Random sequences of prefill, dense decode and DeltaLog decode on the slots of one pool, against the float64 recurrence.

SERVING_EXAMPLES and SERVING_SEED choose how many sequences of 50 operations and which; the seed is printed.
"""

from __future__ import annotations

import os
import secrets

import pytest
import torch
from deltalog_cases import OPS
from deltalog_machine import run
from serving_machine import make_serving_machine

pytestmark = pytest.mark.usefixtures("cpu_kernels")

EXAMPLES = int(os.environ.get("SERVING_EXAMPLES", "4"))
SEED = int(os.environ.get("SERVING_SEED", secrets.randbelow(2**31)))


@pytest.mark.parametrize("rule", OPS)
def test_prefill_and_decode_share_the_slots(rule: str) -> None:
    run(make_serving_machine(rule, torch.float32), EXAMPLES, SEED, steps=50)


@pytest.mark.parametrize(("state_dtype", "launches"), [(torch.float16, 1), (torch.float32, 2)])
def test_with_narrow_bases_and_two_launches(state_dtype: torch.dtype, launches: int) -> None:
    run(make_serving_machine("kda", state_dtype, launches), -(-EXAMPLES // 2), SEED, steps=50)
