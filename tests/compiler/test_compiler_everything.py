"""Every default program of every arch: by hand, `pytest -m slow tests/compiler/test_compiler_everything.py`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from built_specs import may_spill

from kda_tl.registry import Registry
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.defaults import default_specs


@pytest.mark.slow
@pytest.mark.cuda_compile
@pytest.mark.parametrize("arch", ARCHS)
def test_the_default_set_compiles_within_the_arch(tmp_path: Path, arch: str) -> None:
    build = importlib.import_module("kda_tl.compiler.build").build
    registry, specs = Registry(tmp_path), default_specs(arch)
    assert {result.spec for result in build(arch, specs, registry)} == set(specs)
    spilled = []
    for spec in specs:
        metas = [registry.load_meta(one.path) for one in registry.classes(arch, spec.key)]
        assert metas
        for meta in metas:
            spilled += [spec.key for usage in meta.get("resources", ()) if usage["spill_loads"] > may_spill(meta)]
            assert all(launch["shared_memory"] <= ARCHS[arch].shared_memory for launch in meta.get("launches", ()))
    assert not spilled
