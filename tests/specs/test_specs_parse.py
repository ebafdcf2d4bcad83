from __future__ import annotations

import pytest

from kda_tl.specs.archs import ARCHS
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.kernels import ChunkWySpec
from kda_tl.specs.parse import parse_spec


@pytest.mark.parametrize("spec", sorted({spec for arch in ARCHS for spec in default_specs(arch)}, key=lambda spec: spec.key))
def test_every_key_leads_back_to_its_spec(spec) -> None:
    assert parse_spec(spec.key) == spec


def test_fields_left_out_take_their_defaults() -> None:
    assert parse_spec("chunk_wy") == parse_spec(" chunk_wy[] ") == ChunkWySpec()
    assert parse_spec("chunk_wy[dtype=float32]") == ChunkWySpec(dtype="float32")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("chunk_way[dtype=float32]", "one of the kernels .*chunk_wy"),
        ("chunk_wy[dtype=float32", "KERNEL"),
        ("", "KERNEL"),
        ("chunk_wy[kind=float32]", "chunk_wy has the fields .*dtype.*, got 'kind'"),
        ("chunk_wy[dtype]", "dtype must be one of"),
        ("chunk_wy[dtype=float64]", "dtype must be one of .*float32.*, got 'float64'"),
    ],
)
def test_what_is_no_key(key: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_spec(key)
