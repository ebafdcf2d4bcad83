"""Prefill, dense decode and DeltaLog decode on the slots of one pool, in random order, on a device: `serving_machine`.

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

pytestmark = pytest.mark.gpu

EXAMPLES = int(os.environ.get("SERVING_EXAMPLES", "70"))
SEED = int(os.environ.get("SERVING_SEED", secrets.randbelow(2**31)))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", OPS)
def test_prefill_and_decode_share_the_slots(rule: str, state_dtype: torch.dtype) -> None:
    run(make_serving_machine(rule, state_dtype, device="cuda"), EXAMPLES, SEED, steps=50)
