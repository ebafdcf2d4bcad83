"""What all tests share: who is skipped where, and registries that are built once per session."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from kda_tl.registry import Registry
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
        return "TileLang is not installed: pip install 'kda-tl[build]'"
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
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Registry]:
    """built(arch): a registry with the arch's default set, built once per session; skips where it cannot be built.

    The first GPU arch that is asked for brings the others with it: their kernels take unlike times, and share two processes.
    """
    outcomes: dict[str, Registry | BaseException] = {}

    def build_all(archs: list[str]) -> None:
        from kda_tl.compiler.build import build
        from kda_tl.specs.defaults import default_specs

        registries = {arch: Registry(tmp_path_factory.mktemp(f"registry-{arch}")) for arch in archs}
        tasks = [(arch, spec) for arch in archs for spec in default_specs(arch)]
        tasks.sort(key=lambda task: task[1].kernel != "chunk_wy")  # the slow ones first
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            futures = [(arch, pool.submit(build, arch, [spec], registries[arch], 1)) for arch, spec in tasks]
        for arch, future in futures:
            outcomes[arch] = future.exception() or outcomes.get(arch, registries[arch])

    def built_once(arch: str) -> Registry:
        is_cpu = ARCHS[arch].is_cpu
        if reason := missing("tilelang" if is_cpu else "cuda_compile"):
            pytest.skip(reason)
        if arch not in outcomes:
            build_all([name for name, row in ARCHS.items() if row.is_cpu == is_cpu and (row.measured or name == arch)])
        outcome = outcomes[arch]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return built_once


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
