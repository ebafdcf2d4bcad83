"""Every size class of every prefill kernel on a device, whatever the size of the call: right, and the same bits.

What else is in a batch decides which class a sequence falls into, so its outputs must not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chunk_kda_cases import Case, make_inputs, nan_filled_memory
from prefill_cases import BF16, F16, PACK, PrefillCase, limit, run_case

import kda_tl
from kda_tl.runtime import dispatcher
from kda_tl.specs.archs import ARCHS, archs_for_capability
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.schedule_file import MAX_CLASSES

pytestmark = pytest.mark.gpu

Force = Callable[[int], None]


@pytest.fixture(params=[name for name, row in ARCHS.items() if not row.is_cpu][::-1])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every arch whose artifacts this device can load, and which has classes at all, forced."""
    if request.param not in archs_for_capability(torch.cuda.get_device_capability()):
        pytest.skip(f"{torch.cuda.get_device_name()} runs no {request.param} artifacts")
    if all(len(dispatcher.schedule_classes(spec, request.param)) == 1 for spec in default_specs(request.param)):
        pytest.skip(f"every kernel of {request.param} has one schedule for all sizes")
    monkeypatch.setenv("KDA_TL_ARCH", request.param)
    return request.param


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """force(n): every launch takes the n-th class of its kernel, or the last one."""
    original = dispatcher.kernel

    def force_class(number: int) -> None:
        def kernel(spec: Any, arch: str, device: torch.device, size: int = dispatcher.LARGEST) -> Any:
            classes = dispatcher.schedule_classes(spec, arch)
            up_to = classes[min(number, len(classes) - 1)].up_to
            return original(spec, arch, device, dispatcher.LARGEST if up_to is None else up_to)

        monkeypatch.setattr(dispatcher, "kernel", kernel)

    return force_class


CASES = [
    *(PrefillCase(rule, dtype, lengths=PACK, tail=70) for rule in ("kda", "gdn", "gla", "rwkv6") for dtype in (BF16, F16)),
    *(PrefillCase("kda", BF16, lengths=PACK, pool=pool, state_v_first=True) for pool in (torch.float32, BF16, F16)),
    PrefillCase("kda", BF16, T=700, options=(("intracard_segments", 3),)),
]


@pytest.mark.parametrize("number", range(MAX_CLASSES))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_class_against_the_recurrence(arch: str, force: Force, case: PrefillCase, number: int) -> None:
    force(number)
    errors = run_case(case, seed=number)
    assert all(error < limit(case, what) for what, error in errors.items()), errors


@pytest.mark.parametrize("gate", ["strong", "weak"])
def test_all_classes_give_the_same_bits(arch: str, force: Force, gate: str) -> None:
    x = make_inputs(Case("classes", lengths=(1000, 64, 1, 0, 300), H=2, HV=4, gate=gate), "cuda", seed=7)
    found = []
    for number in range(MAX_CLASSES):
        force(number)
        with nan_filled_memory(), torch.no_grad():
            found.append(kda_tl.chunk_kda(**x, output_final_state=True))
    for o, state in found[1:]:
        assert torch.equal(o, found[0][0]) and torch.equal(state, found[0][1])
