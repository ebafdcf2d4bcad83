"""Programs and kernels for the cpu beside the default set."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from kda_tl.registry import Registry
from kda_tl.runtime.loader import ARTIFACT_FORMAT, load
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.kernels import KernelSpec
from kda_tl.specs.schedules import Schedule


@pytest.fixture(scope="session")
def compile_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], Any]:
    """compile_cpu(id, program): the kernel, loaded from a registry of its own."""
    lower_program = importlib.import_module("kda_tl.compiler.lower").lower_program
    registry = Registry(tmp_path_factory.mktemp("programs"))
    loaded: dict[str, Any] = {}

    def compiled(id: str, program: Any) -> Any:
        if id not in loaded:
            result = lower_program(program, ARCHS["cpu"], id)
            meta = {**result.meta, "format": ARTIFACT_FORMAT, "spec_key": id, "arch": "cpu"}
            loaded[id] = load(registry, registry.put("artifacts", id, result.files, meta), "cpu", id)
        return loaded[id]

    return compiled


@pytest.fixture(scope="session")
def compile_spec(compile_cpu: Callable[[str, Any], Any]) -> Callable[[KernelSpec, Schedule], Any]:
    """compile_spec(spec, schedule): that kernel for the cpu."""

    @functools.cache
    def compiled(spec: KernelSpec, schedule: Schedule) -> Any:
        id = "-".join([spec.kernel, *map(str, {**spec.as_dict(), **schedule.as_dict()}.values())])
        module = importlib.import_module(f"kda_tl.kernels.{spec.kernel}")
        return compile_cpu(id, module.program(spec, schedule, "cpu"))

    return compiled


@pytest.fixture(scope="session")
def kernel_of(cpu_registry: Registry, compile_spec: Callable[[KernelSpec, Schedule], Any]) -> Callable[..., Any]:
    """kernel_of(spec): the kernel of the default set; kernel_of(spec, schedule): compiled here."""

    def kernel(spec: KernelSpec, schedule: Schedule | None = None) -> Any:
        if schedule is not None:
            return compile_spec(spec, schedule)
        path = cpu_registry.find("cpu", spec.key)
        assert path is not None
        return load(cpu_registry, path, "cpu", spec.key)

    return kernel
