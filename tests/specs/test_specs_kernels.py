"""Specs are keys: unique, stable, frozen; and the table of archs."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from kda_tl.registry.manifest import check_name
from kda_tl.specs.archs import ARCHS, arch, archs_for_capability
from kda_tl.specs.defaults import MAX_PROGRAMS, default_specs
from kda_tl.specs.kernels import KERNEL_SPECS, ChunkScanSpec, ChunkWySpec, KernelSpec, spec_of_key
from kda_tl.specs.rules import RULES

DTYPES = ("bfloat16", "float16", "float32")
EVERY_SPEC: list[KernelSpec] = [
    *(
        ChunkWySpec(K, 64, dtype, gate_dtype, **rule.as_dict())
        for K, dtype, gate_dtype, rule in itertools.product((64, 128), DTYPES, DTYPES, RULES.values())
    ),
    *(
        ChunkScanSpec(K, V, 64, dtype, state_dtype, delta)
        for K, V, dtype, state_dtype, delta in itertools.product((64, 128), (64, 128), DTYPES, DTYPES, (True, False))
    ),
]


def test_keys_are_unique() -> None:
    assert len({spec.key for spec in EVERY_SPEC}) == len(EVERY_SPEC) == len(set(EVERY_SPEC))


def test_keys_are_stable() -> None:
    """Manifests and schedules files on disk name specs by these."""
    assert (
        ChunkWySpec().key
        == "chunk_wy[head_dim_k=128,chunk_size=64,dtype=bfloat16,gate_dtype=float32,decay=per_key,delta=True,read_first=False]"
    )
    assert (
        ChunkScanSpec(64, 128, dtype="float32").key
        == "chunk_scan[head_dim_k=64,head_dim_v=128,chunk_size=64,dtype=float32,state_dtype=float32,delta=True]"
    )
    assert ChunkWySpec().key == ChunkWySpec(128, 64, "bfloat16", "float32", "per_key", True, False).key


def test_a_spec_survives_as_a_dict() -> None:
    for spec in EVERY_SPEC:
        fields = spec.as_dict()
        again = KERNEL_SPECS[str(fields.pop("kernel"))](**fields)
        assert again == spec and hash(again) == hash(spec) and again.key == spec.key


def test_a_key_names_its_spec() -> None:
    assert [spec_of_key(spec.key) for spec in EVERY_SPEC] == EVERY_SPEC


@pytest.mark.parametrize("name", ARCHS)
def test_the_key_of_every_default_names_its_spec(name: str) -> None:
    assert [spec_of_key(spec.key) for spec in default_specs(name)] == default_specs(name)


def test_keys_may_leave_fields_out() -> None:
    assert spec_of_key("chunk_wy") == spec_of_key(" chunk_wy[] ") == ChunkWySpec()
    assert spec_of_key("chunk_scan[ head_dim_v = 64 , dtype=float16]") == ChunkScanSpec(head_dim_v=64, dtype="float16")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("", "KERNEL one of chunk_wy"),
        ("scan[]", "KERNEL one of chunk_wy"),
        ("chunk_wy[dtype=float16", "a spec is"),
        ("chunk_wy[type=float16]", "takes each of head_dim_k"),
        ("chunk_wy[dtype=float16,dtype=float16]", "once"),
        ("chunk_wy[head_dim_k=96]", "head_dim_k must be one of"),
        ("chunk_wy[head_dim_k=True]", "head_dim_k"),
    ],
)
def test_a_key_of_no_spec(key: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        spec_of_key(key)


def test_specs_are_frozen() -> None:
    for spec in (ChunkWySpec(), ChunkScanSpec()):
        for field in dataclasses.fields(spec):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(spec, field.name, getattr(spec, field.name))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *((kind, "dtype", value) for kind in (ChunkWySpec, ChunkScanSpec) for value in ("bf16", "float64", None, "")),
        *((ChunkWySpec, "decay", value) for value in ("vector", None, "")),
        *((ChunkWySpec, "gate_dtype", value) for value in ("bf16", None)),
        *((ChunkScanSpec, "state_dtype", value) for value in ("float64", None)),
        *((kind, "chunk_size", value) for kind in (ChunkWySpec, ChunkScanSpec) for value in (0, 32, 128, "64")),
        *((kind, "head_dim_k", value) for kind in (ChunkWySpec, ChunkScanSpec) for value in (0, 96, 256, "128", None)),
        *((ChunkScanSpec, "head_dim_v", value) for value in (0, 96, 256, "128")),
    ],
)
def test_bad_values_are_refused_by_name(kind: type[KernelSpec], field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be one of .*, got {re.escape(repr(value))}$"):
        kind(**{field: value})


def test_no_rule_reads_first_and_corrects() -> None:
    with pytest.raises(ValueError, match="read_first must be False where delta is True"):
        ChunkWySpec(read_first=True)
    with pytest.raises(ValueError, match="read_first must be False where decay is scalar"):
        ChunkWySpec(read_first=True, delta=False, decay="scalar")


@pytest.mark.parametrize(("dtype", "operands"), [("bfloat16", "float16"), ("float16", "float16"), ("float32", "float32")])
def test_operands_of_products(dtype: str, operands: str) -> None:
    assert ChunkWySpec(dtype=dtype).operand_dtype == ChunkScanSpec(dtype=dtype).operand_dtype == operands


@pytest.mark.parametrize("name", ARCHS)
def test_the_default_set_of_an_arch(name: str) -> None:
    specs = default_specs(name)
    assert {spec.kernel for spec in specs} == set(KERNEL_SPECS)
    assert len({spec.key for spec in specs}) == len(specs) <= MAX_PROGRAMS == 120
    if name == "cpu":  # the C target has no bfloat16; one kernel has a float16 base
        assert {spec.as_dict()["dtype"] for spec in specs} == {"float32"}
        assert "bfloat16" not in {spec.as_dict().get("state_dtype") for spec in specs}
    rules = {(spec.decay, spec.delta, spec.read_first) for spec in specs if isinstance(spec, ChunkWySpec)}
    assert rules == {(rule.decay, rule.delta, rule.read_first) for rule in RULES.values()}


def test_archs() -> None:
    assert list(ARCHS) == ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "cpu"]
    for name, row in ARCHS.items():
        assert arch(name) is row and row.name == check_name("arch", name)
        assert row.is_cpu == (name == "cpu")
        assert (row.min_driver is None) == row.is_cpu
    for name in ("sm_86", "sm_90a", "SM_90", ""):
        with pytest.raises(ValueError, match=r"^arch must be one of sm_80, sm_89, sm_90, sm_100, sm_120, cpu, got "):
            arch(name)
    with pytest.raises(ValueError, match="arch must be one of"):
        default_specs("sm_70")


KIB = 1024


@pytest.mark.parametrize(
    ("capability", "shared_memory", "archs"),
    [
        ((7, 5), 64 * KIB, []),
        ((8, 0), 163 * KIB, ["sm_80"]),
        ((8, 0), None, ["sm_80"]),
        ((8, 6), 99 * KIB, ["sm_80"]),  # it runs no sm_89 code
        ((8, 7), 163 * KIB, ["sm_80"]),
        ((8, 9), 99 * KIB, ["sm_89", "sm_80"]),
        ((8, 9), None, ["sm_89", "sm_80"]),
        ((9, 0), 227 * KIB, ["sm_90", "sm_89", "sm_80"]),
        ((9, 0), 100 * KIB, ["sm_89", "sm_90", "sm_80"]),  # what surely fits comes first
        # Never sm_90: its code has no PTX for newer GPUs. What was never measured comes last.
        ((10, 0), 227 * KIB, ["sm_89", "sm_80", "sm_100"]),
        ((10, 3), 227 * KIB, ["sm_89", "sm_80", "sm_100"]),
        ((12, 0), 99 * KIB, ["sm_89", "sm_80", "sm_120", "sm_100"]),
        ((12, 1), None, ["sm_89", "sm_80", "sm_120", "sm_100"]),
        ((15, 0), 227 * KIB, ["sm_89", "sm_80", "sm_120", "sm_100"]),  # a GPU that nobody knows yet
    ],
)
def test_archs_for_a_device(capability: tuple[int, int], shared_memory: int | None, archs: list[str]) -> None:
    assert archs_for_capability(capability, shared_memory) == archs
