"""The host side of GPU artifacts on a machine without a GPU: a mock driver records what would have been launched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda_tl.compiler.toolchain import cxx_compiler
from kda_tl.registry import Registry
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec

pytestmark = pytest.mark.cuda_compile

HERE = Path(__file__).parent
SPECS = {spec.kernel: spec for spec in (ChunkWySpec(), ChunkScanSpec())}

# The calls of mock_driver_calls.py: N, slots of the workspace, HV, packed.
SHAPES = [(1, 16, 4, 0), (3, 3, 1, 0), (6, 200 // 64 + 6, 4, 1)]


@pytest.fixture(scope="session")
def mock_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1 and libcudart.so.13."""
    folder = tmp_path_factory.mktemp("driver")
    for source, library in (("cuda.c", "libcuda.so.1"), ("cudart.c", "libcudart.so.13")):
        command = [
            cxx_compiler(),
            "-x",
            "c",
            "-shared",
            "-fPIC",
            "-w",
            "-o",
            str(folder / library),
            str(HERE / "mock_driver" / source),
        ]
        subprocess.run(command, check=True)
    return folder


def calls(mock_driver: Path, log: Path, registry: Registry, arch: str, *options: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(mock_driver), os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": str(HERE.parents[1]),
        "MOCK_CUDA_LOG": str(log),
    }
    command = [sys.executable, str(HERE / "mock_driver_calls.py"), str(registry.root), arch, *options]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def evaluate(extent: str, N: int, slots: int, HV: int, packed: int) -> int:
    return int(
        eval(extent, {"__builtins__": {}}, {"num_seqs": N, "slots": slots, "HV": HV, "uniform": 1 - packed, "segments": 1})
    )


@pytest.mark.parametrize("options", [(), ("hide-tilelang",)], ids=["tilelang-installed", "tilelang-hidden"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_load_launch_and_check(
    built: Callable[[str], Registry], mock_driver: Path, tmp_path: Path, arch: str, options: tuple[str, ...]
) -> None:
    registry, log = built(arch), tmp_path / "log"
    report = calls(mock_driver, log, registry, arch, *options)
    assert not {"tilelang", "tvm"} & set(report["imported"])

    metas = {kernel: registry.load_meta(registry.find(arch, spec.key)) for kernel, spec in SPECS.items()}
    expected = []
    for N, slots, HV, packed in SHAPES:
        tiles_v = 128 // metas["chunk_scan"]["schedule"]["block_v"]
        for kernel, blocks in (("chunk_wy", slots * HV), ("chunk_scan", (N + packed) * HV * tiles_v)):
            (launch,) = metas[kernel]["launches"]
            extents = launch["extents"]
            assert evaluate(extents["blockIdx.x"], N, slots, HV, packed) == blocks
            threads = int(extents["threadIdx.x"])
            assert threads % 128 == 0 and extents["threadIdx.y"] == extents["threadIdx.z"] == "1"
            expected.append(f"launch {launch['name']} grid {blocks} 1 1 block {threads} 1 1 shared {launch['shared_memory']}")
    lines = log.read_text().splitlines()
    assert report["right"] == [None] * len(expected)
    # Then the first two in one native call, and nothing else: the wrong calls that came after launched nothing.
    assert report["fused"] is None
    assert [line for line in lines if line.startswith("launch")] == [*expected, *expected[:2]]
    maps = [line for line in lines if line.startswith("tensormap")]
    assert bool(maps) == any(meta["uses_tensormap"] for meta in metas.values())
    assert all(line.endswith("aligned 1") for line in maps)
    image = "load cubin" if arch == "sm_90" else "load fatbin"
    assert [line for line in lines if line.startswith("load")] == [image] * 2


@pytest.fixture(scope="session")
def refusals(built: Callable[[str], Registry], mock_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return calls(mock_driver, tmp_path_factory.mktemp("log") / "log", built("sm_90"), "sm_90")["wrong"]


@pytest.mark.parametrize("kernel", SPECS)
@pytest.mark.parametrize(
    ("fault", "words"),
    [("dtype", "dtype"), ("dimensions", "ndim"), ("size", "shape"), ("stride", "strides"), ("tokens", "shape[1]")],
)
def test_wrong_tensors_are_refused_by_name(refusals: dict[str, str | None], kernel: str, fault: str, words: str) -> None:
    tried = {key.split()[1]: error for key, error in refusals.items() if key.split()[::2] == [kernel, fault]}
    assert ({"q", "k", "g"} if kernel == "chunk_wy" else {"v", "o"}) <= set(tried)
    for name, error in tried.items():
        assert error is not None and kernel in error and words in error, (name, error)
        # Sizes are bound by the first tensor that shows them, so another one may be named.
        assert f"input {name} " in error or fault == "tokens", (name, error)


def test_a_registry_without_support_libraries_names_the_command(
    built: Callable[[str], Registry], mock_driver: Path, tmp_path: Path
) -> None:
    copied = Registry(shutil.copytree(built("sm_90").root, tmp_path / "copied"))
    shutil.rmtree(copied.root / "support")
    with pytest.raises(AssertionError, match=r"no support libraries for sm_90: run `kda-tl build --arch sm_90`"):
        calls(mock_driver, tmp_path / "log", copied, "sm_90")


def test_damaged_support_libraries_are_refused(built: Callable[[str], Registry], mock_driver: Path, tmp_path: Path) -> None:
    copied = Registry(shutil.copytree(built("sm_90").root, tmp_path / "copied"))
    library = copied.support_dir("sm_90") / "libkda_tl_native.so"
    library.write_bytes(library.read_bytes()[:-1] + b"\x00\x01")
    with pytest.raises(AssertionError, match=r"DamagedArtifact.*libkda_tl_native\.so has"):
        calls(mock_driver, tmp_path / "log", copied, "sm_90", "hide-tilelang")
    assert copied.support_dir("sm_90") is None and len(list((copied.root / "quarantine").iterdir())) == 1


@pytest.mark.parametrize(("cuda", "answer"), [("13000", "None"), ("12040", "an NVIDIA driver R580 or newer (CUDA 13.0)")])
def test_the_driver_is_asked_for_its_version(mock_driver: Path, cuda: str, answer: str) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(mock_driver), "MOCK_CUDA_VERSION": cuda}
    source = HERE.parents[1] / "kda_tl" / "runtime" / "driver.py"  # alone: the package would load torch
    code = f"import runpy; driver = runpy.run_path({str(source)!r}); print(driver['cuda_version'](), driver['too_old'](580))"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout.startswith(f"{cuda} {answer}"), ran.stderr
