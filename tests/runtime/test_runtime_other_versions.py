"""The same artifacts in the environment of an inference engine: vLLM 0.33 and SGLang 0.5.23 pin apache-tvm-ffi 0.1.11 and
TileLang 0.1.12, two releases behind what builds here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kda_tl.compiler.toolchain import cxx_compiler
from kda_tl.registry import Registry

HERE = Path(__file__).parent
PINNED = {"apache-tvm-ffi": "0.1.11", "tilelang": "0.1.12"}

LOAD = """
import ctypes, json, sys
from importlib import metadata

when, arch, root = sys.argv[1:]
if arch != "cpu":
    ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)  # as importing a CUDA build of torch would
import torch
if when == "before":
    import tilelang
from kda_tl.registry import Registry
from kda_tl.runtime.loader import load
from kda_tl.specs.defaults import default_specs

registry = Registry(root)
for spec in default_specs(arch):
    assert callable(load(registry, registry.find(arch, spec.key), arch, spec.key))
if when == "after":
    import tilelang
libraries = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(json.dumps({
    "versions": {name: metadata.version(name) for name in ("apache-tvm-ffi", "tilelang")},
    "runtime": sorted(path for path in libraries if "libtvm_runtime" in path),
    "tilelang": "tilelang" in sys.modules,
}))
"""

pytestmark = [pytest.mark.slow, pytest.mark.cuda_compile]


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with these two packages alone; what they depend on comes from this environment."""
    folder = tmp_path_factory.mktemp("pinned")
    wanted = [f"{name}=={version}" for name, version in PINNED.items()]
    command = [sys.executable, "-m", "pip", "install", "-q", "--only-binary", ":all:", "--no-deps", "--target", str(folder)]
    ran = subprocess.run([*command, *wanted], capture_output=True, text=True, timeout=300, check=False)
    if ran.returncode != 0:
        pytest.skip(f"cannot install {', '.join(wanted)}: {ran.stderr.strip().splitlines()[-1:]}")
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1 and libcudart.so.13 that launch nothing."""
    folder = tmp_path_factory.mktemp("driver")
    for source, library in (("cuda.c", "libcuda.so.1"), ("cudart.c", "libcudart.so.13")):
        command = [cxx_compiler(), "-x", "c", "-shared", "-fPIC", "-w", "-o", str(folder / library)]
        subprocess.run([*command, str(HERE / "mock_driver" / source)], check=True)
    return folder


@dataclass(frozen=True)
class Engine:
    """Loads an arch's default set in a process that has the pinned packages and the mock driver."""

    pinned: Path
    driver: Path
    log: Path

    def load(self, when: str, arch: str, registry: Registry, script: str = LOAD) -> dict[str, Any]:
        # TileLang, imported by other tests, tells its children where its own libraries are.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("TVM_", "TILELANG_", "TL_"))}
        environment |= {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(self.driver), os.environ.get("LD_LIBRARY_PATH")])),
            "PYTHONPATH": os.pathsep.join([str(self.pinned), str(HERE.parents[1])]),
            "MOCK_CUDA_LOG": str(self.log),
        }
        command = [sys.executable, "-c", script, when, arch, str(registry.root)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, ran.stderr
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        assert found["versions"] == PINNED
        return found


@pytest.fixture
def engine(pinned: Path, driver: Path, tmp_path: Path) -> Engine:
    return Engine(pinned, driver, tmp_path / "log")


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_gpu_artifacts_load_beside_the_pinned_versions(built: Callable[[str], Registry], engine: Engine, when: str) -> None:
    """TileLang imported before, after, or not at all: one TVM runtime in the process, the one that TileLang brings there."""
    found = engine.load(when, "sm_90", built("sm_90"))
    assert found["runtime"] == [str(engine.pinned / "tilelang" / "lib" / "libtvm_runtime.so")]
    assert found["tilelang"] == (when != "never")


def test_cpu_artifacts_load_beside_the_pinned_versions(cpu_registry: Registry, engine: Engine) -> None:
    assert engine.load("never", "cpu", cpu_registry)["runtime"] == []


def test_support_libraries_load_beside_the_pinned_tvm_ffi(built: Callable[[str], Registry], engine: Engine) -> None:
    """A serving machine has no TileLang: the registry's runtime library, of TileLang 0.1.15, meets apache-tvm-ffi 0.1.11."""
    registry = built("sm_90")
    script = LOAD.replace("import torch\n", "import torch, importlib.util\nimportlib.util.find_spec = lambda name: None\n", 1)
    folder = registry.support_dir("sm_90")
    assert folder is not None
    assert engine.load("never", "sm_90", registry, script)["runtime"] == [str(folder / "libtvm_runtime.so")]
