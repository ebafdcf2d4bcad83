"""DeltaLog's specs, schedules and default set."""

from __future__ import annotations

import dataclasses

import pytest

from kda_tl.specs.archs import ARCHS
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.deltalog import (
    RULES,
    TWO_LAUNCHES,
    DeltaLogDecodeSchedule,
    DeltaLogDecodeSpec,
    DeltaLogPrepSchedule,
    DeltaLogPrepSpec,
    cpu_state_dtype,
)
from kda_tl.specs.kernels import DTYPES, KERNEL_SPECS
from kda_tl.specs.schedules import SCHEDULES, schedule_for


def test_keys_are_stable_and_specs_survive_as_a_dict() -> None:
    assert DeltaLogDecodeSpec().key == (
        "deltalog_decode[head_dim_k=128,head_dim_v=128,dtype=bfloat16,state_dtype=float32,decay=per_key,delta=True,"
        "read_first=False,capacity=16,state_v_first=True,prepared=False,one_token=False]"
    )
    for spec in (DeltaLogDecodeSpec(64, 64, **RULES["gdn"]), DeltaLogPrepSpec(**RULES["rwkv6"])):
        fields = spec.as_dict()
        again = KERNEL_SPECS[str(fields.pop("kernel"))](**fields)
        assert again == spec and again.key == spec.key
        assert spec.decay_size == (1 if spec.decay == "scalar" else spec.head_dim_k)
        with pytest.raises(dataclasses.FrozenInstanceError):
            spec.capacity = 8


@pytest.mark.parametrize("kind", [DeltaLogDecodeSpec, DeltaLogPrepSpec])
@pytest.mark.parametrize(
    ("field", "value"),
    [("head_dim_k", 96), ("dtype", "bf16"), ("decay", "none"), ("delta", 2), ("read_first", True), ("capacity", 7)],
)
def test_bad_values_are_refused_by_name(kind: type, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be one of "):
        kind(**{field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_v": 48}, "block_v must be 16, 32, 64 or 128"),
        ({"threads": 96}, "threads must be 128, 256 or 512"),
        ({"block_v": 16, "threads": 256}, "threads must be 128, 256 or 512, at most 8 per row"),
        ({"launches": 3}, "launches must be 1 or 2"),
        ({"merge_every": 17}, "merge_every must be at most 16"),
        ({"merge_every": 0}, "merge_every must be a positive integer"),
    ],
)
def test_bad_schedules_are_refused_by_name(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeltaLogDecodeSchedule(**changes)
    with pytest.raises(ValueError, match="threads must be 64, 128 or 256"):
        DeltaLogPrepSchedule(threads=96)


def test_both_tables_know_them() -> None:
    assert SCHEDULES["deltalog_decode"] is DeltaLogDecodeSchedule and SCHEDULES["deltalog_prep"] is DeltaLogPrepSchedule


@pytest.mark.parametrize("arch", ARCHS)
def test_every_cache_that_can_be_made_finds_its_kernels(arch: str) -> None:
    specs = default_specs(arch)
    dtype = "float32" if arch == "cpu" else "bfloat16"
    for rule, fields in RULES.items():
        for state_dtype in DTYPES:
            for launches in (1, 2):
                if launches == 2 and (rule, state_dtype) not in TWO_LAUNCHES:
                    continue
                kernel_state = cpu_state_dtype(rule, state_dtype, launches) if arch == "cpu" else state_dtype
                spec = DeltaLogDecodeSpec(dtype=dtype, state_dtype=kernel_state, prepared=launches == 2, **fields)
                assert spec in specs
                assert launches == 2 or dataclasses.replace(spec, one_token=True) in specs
                assert launches == 1 or spec.prep_spec in specs
                assert isinstance(schedule_for(spec, arch), DeltaLogDecodeSchedule)
