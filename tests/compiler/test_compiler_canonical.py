"""One program, one source, one set of bytes: whatever the process, its addresses and its folders."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda_tl.compiler import lower
from kda_tl.compiler.canonical import distinct_names
from kda_tl.specs.archs import ARCHS


@given(st.lists(st.sampled_from(["a", "b", "a_1", "a_2", "a_1_1"])))
def test_names_are_distinct_and_the_first_of_each_kept(names: list[str]) -> None:
    result = distinct_names(names)
    assert len(set(result)) == len(result) == len(names)
    assert all(new.startswith(old) for new, old in zip(result, names, strict=True))
    for name in set(names):
        assert result[names.index(name)] == name
    assert distinct_names(result) == result


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """lowered(): the program of four reductions, with nvcc left out."""
    programs = importlib.import_module("reduction_programs")
    monkeypatch.setattr(lower, "_nvcc", lambda code, arch: (b"\x7fELF", ""))
    return lambda: lower.lower_program(programs.four_maxima(), ARCHS["sm_80"], "four_maxima")


@pytest.mark.tilelang
def test_workspaces_are_told_apart(lowered: Any) -> None:
    source = lowered().files["kernel.cu"].decode()
    places = dict(re.findall(r"void\* (workspace\w*) = .*buf_dyn_shmem \+ (\d+)", source))
    used = [re.findall(r"\b(workspace\w*)\)\[", line) for line in source.splitlines() if "AllReduce" in line]
    order = [names[0] for names in used if names]
    assert len(places) == len(order) == 4 and order == list(places)  # in the order of the program, not of addresses
    assert list(map(int, places.values())) == sorted(map(int, places.values()))


@pytest.mark.tilelang
def test_lowering_again_gives_the_same_source(lowered: Any) -> None:
    keep: list[Any] = []
    sources = set()
    for n in range(4):
        keep.append([bytearray(100 + n) for _ in range(5000)])  # other addresses each time
        sources.add(lowered().files["kernel.cu"])
    assert len(sources) == 1


@pytest.mark.tilelang
def test_what_a_worker_hands_back_is_plain(lowered: Any) -> None:
    def kinds(value: Any) -> set[type]:
        parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        return {type(value)}.union(*map(kinds, parts))

    compiled = lowered()
    assert kinds(compiled.meta) <= {dict, list, str, int, float, bool, type(None)}
    assert pickle.loads(pickle.dumps(compiled)) == compiled


@pytest.mark.cuda_compile
def test_the_folder_does_not_show_in_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of internal symbols hold a hash of the source's path, unless nvcc is told another one."""
    code = """
#include <cuda/std/tuple>
namespace { __device__ int hidden = 3; }
extern "C" __global__ void kernel(int *x) {
  cuda::std::tuple<int, int> pair{x[0], hidden};
  x[1] = cuda::std::get<1>(pair) + static_cast<int>(reinterpret_cast<size_t>(&cuda::std::ignore));
  hidden = x[0];
}
"""
    images = {}
    for name in ("one", "another/that/is/longer"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        monkeypatch.setattr(lower.tempfile, "tempdir", str(folder))
        with contextlib.suppress(AttributeError):
            images[name], _ = lower._nvcc(code, ARCHS["sm_80"])
        assert list(folder.iterdir()) == []
    one, another = images.values()
    assert b"_INTERNAL_" in one and one == another
