"""Programs compiled ahead of time, for every GPU arch and the cpu: resources, metadata, reproducible bytes."""

from __future__ import annotations

import hashlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from built_specs import CUDA_ARCHS, built_specs, may_spill
from kernel_parameters import expected_parameters

from kda_tl.registry import Registry
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.kernels import KernelSpec
from kda_tl.specs.schedules import schedule_classes

KERNELS = [pytest.param(arch, spec, id=f"{arch}-{spec.key}") for arch in [*CUDA_ARCHS, "cpu"] for spec in built_specs(arch)]
CUDA_KERNELS = [kernel for kernel in KERNELS if kernel.values[0] in CUDA_ARCHS]

Built = Callable[[str], Registry]


def artifacts(built: Built, arch: str, spec: KernelSpec) -> list[tuple[Path, dict[str, Any]]]:
    """Of every size class."""
    registry = built(arch)
    found = [one.path for one in registry.classes(arch, spec.key)]
    assert found
    return [(path, registry.load_meta(path)) for path in found]


@pytest.mark.cuda_compile
@pytest.mark.parametrize(("arch", "spec"), CUDA_KERNELS)
def test_resources_stay_within_the_arch(built: Built, arch: str, spec: KernelSpec) -> None:
    for _, meta in artifacts(built, arch, spec):
        assert len(meta["launches"]) == len(meta["resources"]) >= 1
        for usage in meta["resources"]:
            assert max(usage["spill_stores"], usage["spill_loads"]) <= may_spill(meta)
            assert 0 < usage["registers"] <= 255
        for launch in meta["launches"]:
            assert (launch["shared_memory"] > 0) == (spec.kernel != "intracard_merge" or spec.as_dict()["delta"])
            assert launch["shared_memory"] <= ARCHS[arch].shared_memory
            threads = int(launch["extents"]["threadIdx.x"])
            assert threads % 128 == 0 and threads <= 1024
            # All registers of a multiprocessor, whatever the schedule: more, and the launch fails.
            assert threads * max(usage["registers"] for usage in meta["resources"]) <= 65536


@pytest.mark.parametrize(("arch", "spec"), KERNELS)
def test_metadata_is_complete(built: Built, arch: str, spec: KernelSpec) -> None:
    found = artifacts(built, arch, spec)
    assert [meta["schedule"] for _, meta in found] == [one.schedule.as_dict() for one in schedule_classes(spec, arch)]
    path, meta = found[0]
    assert meta["arch"] == arch and meta["spec_key"] == spec.key and meta["spec"] == spec.as_dict()
    is_cpu = arch == "cpu"
    assert meta["abi"] == ("c" if is_cpu else "tvm_ffi")
    assert meta["entry"].startswith(spec.kernel)
    assert {"kda_tl", "tilelang", "cxx"} | (set() if is_cpu else {"nvcc"}) == set(meta["versions"])
    assert all(meta["versions"].values())
    assert meta.get("min_driver") == (None if is_cpu else 580)

    found = {p["name"]: (len(p.get("shape", ())), p["dtype"]) for p in meta["parameters"]}
    assert list(found.items()) == list(expected_parameters(spec).items())
    assert all(len(p.get("shape", ())) == len(p.get("strides", ())) for p in meta["parameters"])

    source = "kernel.c" if is_cpu else "kernel.cu"
    assert set(meta["files"]) == {"lib.so", source} == {file.name for file in path.iterdir()} - {"meta.json"}
    for name, listed in meta["files"].items():
        content = (path / name).read_bytes()
        assert listed == {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)} and content


@pytest.mark.cuda_compile
@pytest.mark.parametrize(("arch", "spec"), CUDA_KERNELS)
def test_what_is_in_a_gpu_artifact(built: Built, arch: str, spec: KernelSpec) -> None:
    path, meta = artifacts(built, arch, spec)[0]
    library, source = (path / "lib.so").read_bytes(), (path / "kernel.cu").read_text()
    for launch in meta["launches"]:
        assert f"{launch['name']}(" in source and launch["name"].encode() in library
    on_tensor_cores = spec.kernel in ("chunk_wy", "chunk_scan", "intracard_pre_scan") and spec.operand_dtype == "float16"
    assert ("wgmma" in source) == (arch == "sm_90" and on_tensor_cores)
    fat_binary = b"\x50\xed\x55\xba"  # with PTX beside the cubin, for newer GPUs; an exact arch is one cubin
    assert (fat_binary in library) == (not ARCHS[arch].exact)
    assert b"libtilelang" not in library and b"libcuda" not in library  # it needs libc alone
    assert str(Path(__file__).parents[2]).encode() not in library and tempfile.gettempdir().encode() + b"/" not in library


@pytest.mark.cuda_compile
@pytest.mark.parametrize("arch", CUDA_ARCHS)
def test_the_manifest_and_the_support_libraries(built: Built, arch: str) -> None:
    registry = built(arch)
    assert set(registry.manifest(arch).artifacts) == {spec.key for spec in built_specs(arch)}
    folder = registry.support_dir(arch)
    assert folder is not None
    registry.verify(folder)
    meta = registry.load_meta(folder)
    assert {meta["runtime"], meta["helper"]} <= {file.name for file in folder.iterdir()}


def test_what_tests_build_is_shipped() -> None:
    for arch in ARCHS:
        assert set(built_specs(arch)) <= set(default_specs(arch))


@pytest.mark.cuda_compile
def test_every_arch_has_artifacts_of_its_own(built: Built) -> None:
    entries = [entry for arch in CUDA_ARCHS for entry in built(arch).entries(arch)]
    assert len(entries) == sum(len(schedule_classes(spec, arch)) for arch in CUDA_ARCHS for spec in built_specs(arch))
    # Two classes of a spec may have the same schedule, and nothing else shares an artifact.
    owners = {(entry.id, entry.arch, entry.spec_key) for entry in entries}
    assert len({of_whom[0] for of_whom in owners}) == len(owners)


@pytest.fixture(scope="module")
def built_again(
    missing: Callable[[str], str | None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Registry]]:
    """built_again(arch): chunk_scan alone in a second registry, from scratch, all archs at once."""
    from kda_tl.compiler.build import build

    folder = tmp_path_factory.mktemp("again")
    archs = ["cpu"] if missing("cuda_compile") else ["cpu", "sm_80", "sm_90"]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        registries = {arch: Registry(folder / arch) for arch in archs}
        futures = {arch: pool.submit(build, arch, [chunk_scan(arch)], registries[arch], 1) for arch in archs}

        def finished(arch: str) -> Registry:
            assert all(result.compiled for result in futures[arch].result())
            return registries[arch]

        yield finished


def chunk_scan(arch: str) -> KernelSpec:
    return next(spec for spec in built_specs(arch) if spec.kernel == "chunk_scan")


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param("cpu", marks=pytest.mark.tilelang),
        pytest.param("sm_80", marks=pytest.mark.cuda_compile),
        pytest.param("sm_90", marks=pytest.mark.cuda_compile),
    ],
)
def test_a_build_from_scratch_gives_identical_bytes(built: Built, built_again: Built, arch: str) -> None:
    first, again = built(arch), built_again(arch)
    one, two = (registry.find(arch, chunk_scan(arch).key) for registry in (first, again))
    assert one is not None and two is not None and one.name == two.name and one != two
    assert sorted(file.name for file in one.iterdir()) == sorted(file.name for file in two.iterdir())
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name
    assert first.manifest(arch).support == again.manifest(arch).support
