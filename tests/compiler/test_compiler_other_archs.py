"""Archs that nobody here has a device of: they compile, or lower to source, and that is all that these tests can tell."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from kda_tl.compiler import lower
from kda_tl.registry import Registry
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec
from kda_tl.specs.schedules import SCHEDULES


@pytest.mark.cuda_compile
def test_blackwell_compiles(tmp_path: Path) -> None:
    """One program per arch, since each takes seconds: with PTX, without spills, within the arch's shared memory."""
    build = importlib.import_module("kda_tl.compiler.build").build
    registry = Registry(tmp_path)
    for arch, spec in (("sm_100", ChunkScanSpec()), ("sm_120", ChunkScanSpec())):
        assert not ARCHS[arch].measured and not ARCHS[arch].exact
        build(arch, [spec], registry, jobs=1)
        path = registry.find(arch, spec.key)
        assert path is not None and registry.support_dir(arch) is not None
        meta = registry.load_meta(path)
        assert all(usage["spill_stores"] == usage["spill_loads"] == 0 for usage in meta["resources"])
        assert all(launch["shared_memory"] <= ARCHS[arch].shared_memory for launch in meta["launches"])
        assert b"\x50\xed\x55\xba" in (path / "lib.so").read_bytes()  # a fat binary


CANNOT: dict[type[KernelSpec], str] = {}
"""Programs that TileLang 0.1.15 cannot lower to HIP, and what it says."""


def hip_source(program: Any) -> str:
    from tilelang import tvm
    from tilelang.engine.lower import lower as lower_program

    target = tvm.target.Target({"kind": "hip", "mcpu": "gfx942"})
    configs = {**lower._own_pass_configs(program), **lower.PASS_CONFIGS}
    with tvm.transform.PassContext(opt_level=3, config=configs), target:
        return str(lower_program(program, target=target, enable_device_compile=False).kernel_source)


@pytest.mark.tilelang
@pytest.mark.parametrize("spec", [ChunkWySpec(), ChunkScanSpec()], ids=lambda spec: spec.kernel)
def test_hip_source_for_gfx942(spec: KernelSpec) -> None:
    """TileLang's hip target writes source with matrix cores (MFMA) for the plain programs, which find no mma there.

    Source is as far as it goes: there is no ROCm here, so whether hipcc takes it, whether it fits 64 KiB of LDS, and what it
    computes is unknown. No arch of specs.archs stands for it until a device has run it.
    """
    if type(spec) in CANNOT:
        pytest.xfail(CANNOT[type(spec)])
    program = importlib.import_module(f"kda_tl.kernels.{spec.kernel}").program(spec, SCHEDULES[spec.kernel](), "gfx942")
    source = hip_source(program)
    assert f"{spec.kernel}_kernel(" in source and "__global__" in source
    assert "tl_templates/hip/" in source and "tl_templates/cuda/" not in source
    assert "mfma" in source and "mma_sync" not in source and "asm volatile" not in source
