"""Building: what is there already, what is damaged, what does not compile, and what is not installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda_tl.compiler import resources, toolchain
from kda_tl.compiler.errors import BuildError, ToolchainError
from kda_tl.registry import ManifestError, Registry, RegistryError
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.deltalog import DeltaLogPrepSpec
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec
from kda_tl.specs.schedules import SizeClass

needs_tilelang = pytest.mark.tilelang
needs_nvcc = pytest.mark.cuda_compile
WY, SCAN = ChunkWySpec(dtype="float32"), ChunkScanSpec(dtype="float32")
SPECS = [SCAN, ChunkScanSpec(head_dim_v=64, dtype="float32"), DeltaLogPrepSpec(dtype="float32")]  # quickly traced


@pytest.fixture(scope="module")
def build() -> Any:
    """The module."""
    return importlib.import_module("kda_tl.compiler.build")


@pytest.fixture
def copied(cpu_registry: Registry, tmp_path: Path) -> Registry:
    """The default set for the cpu, to spoil."""
    return Registry(shutil.copytree(cpu_registry.root, tmp_path / "copied"))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """broken(name): chunk_wy's program is that of broken_programs instead."""

    def replace(name: str) -> None:
        program = getattr(importlib.import_module("broken_programs"), name)
        monkeypatch.setattr(importlib.import_module("kda_tl.kernels.chunk_wy"), "program", program)

    return replace


def refuse(*_: object) -> None:
    raise AssertionError("compiled, though everything was there")


@needs_tilelang
def test_a_build_with_everything_present_compiles_nothing(build, copied: Registry, monkeypatch) -> None:
    monkeypatch.setattr(build, "lower_program", refuse)
    before = {path: path.read_bytes() for path in copied.root.rglob("*") if path.is_file()}
    seen = []
    results = build.build("cpu", SPECS, copied, jobs=1, progress=seen.append)
    assert [(result.compiled, result.seconds) for result in results] == [(False, 0.0)] * len(SPECS)
    keys = sorted(spec.key for spec in SPECS)
    assert sorted(result.spec.key for result in seen) == [result.spec.key for result in results] == keys
    assert {path: path.read_bytes() for path in copied.root.rglob("*") if path.is_file()} == before


@needs_tilelang
def test_a_complete_registry_may_be_read_only(build, copied: Registry, monkeypatch) -> None:
    """No lock and no write, though worker processes look too."""
    results = build.build("cpu", SPECS, copied, jobs=1)
    before = {path: path.stat().st_mtime_ns for path in copied.root.rglob("*")}
    monkeypatch.setattr(Registry, "_lock", refuse)
    assert build.build("cpu", SPECS, copied, jobs=1, isolate=True) == results
    assert build.build("cpu", SPECS, copied, jobs=1) == results
    assert {path: path.stat().st_mtime_ns for path in copied.root.rglob("*")} == before


@needs_tilelang
def test_a_registry_that_cannot_be_written_shows_before_anything_is_compiled(build, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(build, "run_tasks", refuse)
    (tmp_path / "file").touch()
    with pytest.raises(RegistryError, match="file/registry cannot be written: name another folder with --registry"):
        build.build("cpu", SPECS, Registry(tmp_path / "file" / "registry"), jobs=2)


@needs_tilelang
def test_a_damaged_manifest_shows_before_anything_is_compiled(build, copied: Registry, monkeypatch) -> None:
    monkeypatch.setattr(build, "lower_program", refuse)
    (copied.root / "manifest" / "cpu.json").write_text("{")
    shutil.rmtree(copied.root / "artifacts")
    with pytest.raises(ManifestError, match=r"cpu\.json is damaged"):
        build.build("cpu", [SCAN], copied, jobs=1)


@needs_tilelang
def test_progress_tells_of_failures_too(build, broken, copied: Registry) -> None:
    broken("does_not_lower")
    seen = []
    with pytest.raises(BuildError) as caught:
        build.build("cpu", [WY, SCAN], copied, jobs=1, progress=seen.append)
    assert [(result.spec, result.compiled, result.error) for result in seen] == [
        (WY, False, str(caught.value)),
        (SCAN, False, None),
    ]


@needs_tilelang
def test_only_what_is_missing_is_built(build, copied: Registry) -> None:
    missing = copied.find("cpu", SCAN.key)
    shutil.rmtree(missing)
    results = build.build("cpu", SPECS, copied, jobs=2)
    assert {result.spec: result.compiled for result in results} == {spec: spec == SCAN for spec in SPECS}
    copied.verify(missing)


@needs_tilelang
def test_a_damaged_artifact_is_rebuilt(build, cpu_registry: Registry, copied: Registry) -> None:
    path = copied.find("cpu", SCAN.key)
    (path / "lib.so").write_bytes(b"spoilt")
    results = build.build("cpu", [SCAN], copied, jobs=1)
    assert [result.compiled for result in results] == [True]
    copied.verify(path)
    original = cpu_registry.find("cpu", SCAN.key)
    assert (path / "lib.so").read_bytes() == (original / "lib.so").read_bytes()
    (quarantined,) = (copied.root / "quarantine").iterdir()
    assert (quarantined / "lib.so").read_bytes() == b"spoilt"


@needs_tilelang
def test_another_schedule_or_compiler_is_another_artifact(build, cpu_registry: Registry, monkeypatch) -> None:
    spec, arch = SCAN, ARCHS["cpu"]
    schedule = build.schedule_classes(spec, "cpu")[-1].schedule

    def identity(schedule: Any) -> str:
        return build._identity(build._program(spec, schedule, "cpu"), spec, schedule, arch)

    ids = {cpu_registry.find("cpu", spec.key).name, identity(schedule)}
    assert len(ids) == 1
    ids.add(identity(type(schedule)(block_v=32)))
    monkeypatch.setattr(build, "version_line", lambda compiler: "another compiler")
    ids.add(identity(schedule))
    assert len(ids) == 3


@needs_nvcc
def test_support_libraries_are_reproducible(tmp_path: Path, monkeypatch) -> None:
    put_support = importlib.import_module("kda_tl.compiler.support").put_support
    registries = [Registry(tmp_path / name) for name in ("one", "two")]
    one, two = (registry.root / "support" / put_support(registry) for registry in registries)
    monkeypatch.setattr(importlib.import_module("kda_tl.compiler.support"), "compile_helper", refuse)
    assert put_support(registries[0]) == one.name, "nothing is compiled a second time"
    assert {"NOTICE", "LICENSE"} <= {file.name for file in one.iterdir()}
    assert "libtvm_runtime.so" in (one / "NOTICE").read_text() and "Apache License" in (one / "LICENSE").read_text()
    assert one.name == two.name
    assert {file.name: file.read_bytes() for file in one.iterdir()} == {file.name: file.read_bytes() for file in two.iterdir()}


@needs_nvcc
def test_too_much_shared_memory_names_spec_arch_and_limit(build, broken, tmp_path: Path) -> None:
    broken("needs_shared_memory")
    registry = Registry(tmp_path)
    with pytest.raises(BuildError) as caught:
        build.build("sm_89", [ChunkWySpec()], registry, jobs=1)
    message = str(caught.value)
    assert f"{ChunkWySpec().key} for sm_89: " in message
    assert f"needs {150 * 1024} bytes of shared memory per block; sm_89 allows {99 * 1024}" in message
    assert not registry.manifest("sm_89").artifacts


@needs_tilelang
@pytest.mark.parametrize(("arch", "spec"), [("sm_90", ChunkWySpec()), ("cpu", WY)])
def test_a_program_that_does_not_lower(build, broken, tmp_path: Path, arch: str, spec: ChunkWySpec) -> None:
    broken("does_not_lower")
    with pytest.raises(BuildError, match=r"chunk_wy\[.*\] for " + arch + ": ."):
        build.build(arch, [spec], Registry(tmp_path), jobs=1)


@needs_tilelang
def test_what_compiles_is_published_all_the_same(build, broken, tmp_path: Path) -> None:
    broken("does_not_lower")
    registry = Registry(tmp_path)
    with pytest.raises(BuildError) as caught:
        build.build("cpu", [WY, SCAN], registry, jobs=1)
    assert WY.key in str(caught.value) and SCAN.key not in str(caught.value)
    assert set(registry.manifest("cpu").artifacts) == {SCAN.key}
    registry.verify(registry.find("cpu", SCAN.key))


@needs_tilelang
def test_a_spec_of_which_a_class_failed_stays_as_it_was(build, copied: Registry, monkeypatch) -> None:
    program = build._program

    def fails(spec: Any, schedule: Any, arch: str) -> Any:
        if schedule.block_v == 128:
            raise ValueError("no luck")
        return program(spec, schedule, arch)

    monkeypatch.setattr(build, "_program", fails)
    before = copied.manifest("cpu").artifacts[SCAN.key]
    kind = type(build.schedule_classes(SCAN, "cpu")[0].schedule)
    classes = [SizeClass(8, kind(block_v=32), "model"), SizeClass(None, kind(block_v=128), "model")]
    seen: list[Any] = []
    with pytest.raises(BuildError, match="no luck"):
        build.build("cpu", [SCAN], copied, jobs=1, progress=seen.append, schedules={SCAN: classes})
    assert [(result.schedule.block_v, result.error is None) for result in seen] == [(32, True), (128, False)]
    assert copied.manifest("cpu").artifacts[SCAN.key] == before


@needs_tilelang
def test_a_schedules_file_that_cannot_be_used_is_told_of_and_defaults_are_built(
    build, tmp_path: Path, monkeypatch, caplog
) -> None:
    (tmp_path / "cpu.json").write_text('{"format": 1}')
    monkeypatch.setattr("kda_tl.specs.schedules.schedules_folder", lambda: tmp_path)
    spec = DeltaLogPrepSpec(dtype="float32", capacity=8)
    (result,) = build.build("cpu", [spec], Registry(tmp_path / "registry"), jobs=1)
    assert result.schedule == type(result.schedule)()
    (entry,) = Registry(tmp_path / "registry").manifest("cpu").artifacts.values()
    assert [(one["up_to"], one["source"]) for one in entry["classes"]] == [(None, "default")]
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith(f"{tmp_path / 'cpu.json'}: not a schedules file") and "every kernel for cpu" in warning


@pytest.fixture
def failing_compiler(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "failing-compiler"
    path.parent.mkdir()
    version = "[ \"$1\" = --version ] && { echo 'failing 1.0'; exit 0; }"
    path.write_text(f"#!/bin/sh\n{version}\necho 'x.c:1: error: no luck' >&2\nexit 3\n")
    path.chmod(0o755)
    return path


@needs_tilelang
def test_a_failing_cxx_compiler_is_quoted(build, failing_compiler: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", str(failing_compiler))
    with pytest.raises(BuildError) as caught:
        build.build("cpu", [SCAN], Registry(tmp_path / "registry"), jobs=1)
    assert f"{SCAN.key} for cpu: " in str(caught.value) and "x.c:1: error: no luck" in str(caught.value)


@needs_nvcc
def test_a_failing_nvcc_is_quoted(build, broken, failing_compiler: Path, tmp_path: Path, monkeypatch) -> None:
    broken("needs_shared_memory")  # small, so quickly lowered
    monkeypatch.setattr(importlib.import_module("kda_tl.compiler.lower"), "nvcc_compiler", lambda: str(failing_compiler))
    with pytest.raises(BuildError) as caught:
        build.build("sm_80", [ChunkWySpec()], Registry(tmp_path / "registry"), jobs=1)
    assert f"{ChunkWySpec().key} for sm_80: " in str(caught.value) and "x.c:1: error: no luck" in str(caught.value)


@needs_tilelang
def test_errors_reach_the_caller_through_worker_processes(build, failing_compiler: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", str(failing_compiler))
    one, other = (DeltaLogPrepSpec(dtype="float32", capacity=capacity) for capacity in (8, 16))  # quickly traced
    with pytest.raises(BuildError) as caught:
        build.build("cpu", [one, other], Registry(tmp_path / "registry"), jobs=2)
    assert one.key in str(caught.value) and other.key in str(caught.value) and "no luck" in str(caught.value)


@needs_tilelang
def test_an_unknown_arch(build, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arch must be one of sm_80, sm_89, sm_90, sm_100, sm_120, cpu, got 'sm_70'"):
        build.build("sm_70", [ChunkWySpec()], Registry(tmp_path))


# -- toolchain -----------------------------------------------------------------------------------------------------------


def test_tilelang_is_absent(monkeypatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ToolchainError, match=r"building needs TileLang: pip install '.*\[build\]'"):
        toolchain.require_tilelang()


def installed(**versions: str) -> Callable[[str], str]:
    """importlib.metadata.version where these packages alone are installed."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    return version


@pytest.mark.parametrize("version", ["0.1.14", "0.1.16", "0.1.150", "0.2.0"])
def test_tilelang_of_another_version(monkeypatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ToolchainError, match=rf"needs tilelang 0\.1\.15, found {version}: pip install tilelang==0\.1\.15"):
        toolchain.require_tilelang()


@pytest.mark.parametrize("version", ["0.1.15", "0.1.15+cu130"])
def test_tilelang_of_the_right_version(monkeypatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", installed(tilelang=version))
    assert toolchain.require_tilelang() == version


def test_apache_tvm_beside_tilelang(monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", installed(tilelang="0.1.15", apache_tvm="0.25.0"))
    with pytest.raises(ToolchainError, match=r"apache-tvm 0\.25\.0 is installed.*pip uninstall apache-tvm"):
        toolchain.require_tilelang()


@needs_tilelang
def test_nvcc_is_absent(build, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.import_module("tilelang.env"), "CUDA_HOME", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"needs nvcc 13: install the CUDA toolkit, or pip install '.*\[build,nvcc\]'"):
        toolchain.nvcc_compiler()


@needs_tilelang
def test_nvcc_of_a_cuda_home(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    monkeypatch.setattr(importlib.import_module("tilelang.env"), "CUDA_HOME", str(tmp_path))
    for release, right in (("13.0", True), ("13.2", True), ("12.9", False), ("14.0", False), (None, False)):
        toolchain._nvcc_release.cache_clear()
        nvcc.write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n" if release else "#!/bin/sh\n"
        )
        nvcc.chmod(0o755)
        if right:
            assert toolchain.nvcc_compiler() == str(nvcc)
            continue
        with pytest.raises(ToolchainError, match=rf"needs nvcc 13, found {release or 'no version'} at {nvcc}: install"):
            toolchain.nvcc_compiler()


def test_the_cxx_compiler(failing_compiler: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match=r"needs a C\+\+ compiler: install g\+\+ or clang\+\+, or set CXX"):
        toolchain.cxx_compiler()
    (tmp_path / "clang++").symlink_to(failing_compiler)
    assert toolchain.cxx_compiler() == str(tmp_path / "clang++")
    monkeypatch.setenv("CXX", str(failing_compiler))
    assert toolchain.cxx_compiler() == str(failing_compiler)
    for named in ("clang++ -O2", str(tmp_path / "nothing")):
        monkeypatch.setenv("CXX", named)
        with pytest.raises(ToolchainError, match=rf"^CXX must be the name or path of .*got {re.escape(repr(named))}$"):
            toolchain.cxx_compiler()


# -- resources -----------------------------------------------------------------------------------------------------------

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    96 bytes stack frame, 88 bytes spill stores, 192 bytes spill loads
ptxas info    : Used 255 registers, used 8 barriers, 96 bytes cumulative stack size
"""


def test_the_report_of_ptxas() -> None:
    assert resources.parse_ptxas(PTXAS) == [
        {"registers": 168, "stack": 0, "spill_stores": 0, "spill_loads": 0},
        {"registers": 255, "stack": 96, "spill_stores": 88, "spill_loads": 192},
    ]
    assert resources.parse_ptxas("") == []


@pytest.mark.parametrize(("arch", "limit"), [("sm_80", 166912), ("sm_89", 101376), ("sm_90", 232448)])
def test_the_limit_of_shared_memory(arch: str, limit: int) -> None:
    resources.check_shared_memory("chunk_wy_kernel", limit, ARCHS[arch])
    with pytest.raises(BuildError, match=f"chunk_wy_kernel needs {limit + 1} bytes .*; {arch} allows {limit}"):
        resources.check_shared_memory("chunk_wy_kernel", limit + 1, ARCHS[arch])
