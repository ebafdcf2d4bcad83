"""What all tests share: who is skipped where, and registries that are built once per session."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from built_specs import built_specs

from kda_tl.compiler.errors import BuildError
from kda_tl.registry import Registry, install_command
from kda_tl.registry.locks import exclusive
from kda_tl.specs.archs import ARCHS

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "gpu"))  # chunk_kda_cases, which the CPU tests draw on too


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "tilelang: needs TileLang")
    import torch

    torch.set_num_threads(1)  # tensors here are small: threads that wait for each other take nine tenths of the time


@functools.cache
def missing(need: str) -> str | None:
    """Why tests marked `need` cannot run here; None where they can."""
    if need == "gpu":
        import torch

        return None if torch.cuda.is_available() else "no CUDA device"
    if importlib.util.find_spec("tilelang") is None:
        return f"TileLang is not installed: {install_command('build')}"
    if need == "cuda_compile":
        from kda_tl.compiler.errors import ToolchainError
        from kda_tl.compiler.toolchain import nvcc_compiler

        try:
            nvcc_compiler()
        except ToolchainError as error:
            return str(error)
    return None


@pytest.fixture(scope="session", name="missing")
def _missing() -> Callable[[str], str | None]:
    return missing


def pytest_runtest_setup(item: pytest.Item) -> None:
    for need in ("gpu", "tilelang", "cuda_compile"):
        if item.get_closest_marker(need) and (reason := missing(need)):
            pytest.skip(reason)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all pytest processes of this run have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def built(shared_folder: Path) -> Callable[[str], Registry]:
    """built(arch): a registry with `built_specs(arch)`, built once per run; skips where it cannot be built."""

    @functools.cache
    def outcome(arch: str) -> Registry | BuildError:
        from kda_tl.compiler.build import build

        registry, told = Registry(shared_folder / f"registry-{arch}"), shared_folder / f"registry-{arch}.outcome"
        with exclusive(shared_folder / f"registry-{arch}.lock"):
            if not told.exists():
                try:
                    build(arch, built_specs(arch), registry, jobs=2)
                    told.write_text("")
                except BuildError as error:
                    told.write_text(str(error))
        message = told.read_text()
        return BuildError(message) if message else registry

    def built_once(arch: str) -> Registry:
        if reason := missing("tilelang" if ARCHS[arch].is_cpu else "cuda_compile"):
            pytest.skip(reason)
        found = outcome(arch)
        if isinstance(found, BuildError):
            raise found
        return found

    return built_once


@pytest.fixture(scope="session")
def native_helper(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The native functions of this process, compiled as a build for a GPU arch does."""
    import tvm_ffi

    from kda_tl.compiler.support import compile_helper

    if tvm_ffi.get_global_func("kda_tl.calls", allow_missing=True) is None:
        path = tmp_path_factory.mktemp("native") / "libkda_tl_native.so"
        path.write_bytes(compile_helper())
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@pytest.fixture(scope="session")
def cpu_registry(built: Callable[[str], Registry]) -> Registry:
    """The default set for the cpu."""
    return built("cpu")


@pytest.fixture(scope="module")
def cpu_kernels(cpu_registry: Registry) -> Iterator[Registry]:
    """The dispatcher finds the default set for the cpu; module-wide, so that hypothesis tests can use it too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDA_TL_REGISTRY", str(cpu_registry.root))
        yield cpu_registry
