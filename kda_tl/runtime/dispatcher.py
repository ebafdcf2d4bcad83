"""Spec and device to kernel: which registry, which arch, which artifact, and why."""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from kda_tl.registry import Registry, search_path
from kda_tl.runtime.errors import ArtifactMissing, UnsupportedDevice
from kda_tl.runtime.loader import KernelFunction, load
from kda_tl.specs.archs import ARCHS, arch, archs_for_capability
from kda_tl.specs.kernels import KernelSpec

__all__ = ["Choice", "choose", "device_arch", "kernel"]


@dataclass(frozen=True)
class Choice:
    """The dispatcher's answer for one spec. `path` is None on a miss, and `reason` then names what was looked at."""

    spec: KernelSpec
    arch: str
    registry: Registry | None
    path: Path | None
    reason: str


def device_arch(device: torch.device) -> str:
    """The arch whose artifacts a device runs; KDA_TL_ARCH overrides it, to run what was built for another one.

    Raises:
        UnsupportedDevice: no arch serves the device.
    """
    forced = os.environ.get("KDA_TL_ARCH")
    if device.type == "cuda":
        if forced and arch(forced).is_cpu:
            raise ValueError("KDA_TL_ARCH=cpu cannot serve cuda tensors: move them to the cpu, or name a GPU arch")
        return forced if forced else _cuda_arch(device.index or 0)
    if device.type == "cpu":
        return "cpu"
    raise UnsupportedDevice(f"no kernels for {device.type} tensors: kda-tl runs on cuda and cpu")


@functools.cache
def _cuda_arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    loadable = archs_for_capability(capability, _block_shared_memory(index))
    if not loadable:
        rows = ", ".join(name for name, row in ARCHS.items() if not row.is_cpu)
        raise UnsupportedDevice(
            f"no arch serves {properties.name} (compute capability {capability[0]}.{capability[1]}); archs: {rows}"
        )
    return loadable[0]


def _block_shared_memory(index: int) -> int | None:
    """Bytes that one block may use; None where this torch does not tell."""
    value = getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", None)
    return None if value is None else int(value)


@functools.cache
def _registry(root: Path) -> Registry:
    return Registry(root)


def choose(spec: KernelSpec, arch_name: str) -> Choice:
    """Where the artifact of `spec` for `arch_name` lies, without loading it."""
    roots = search_path()
    for root in roots:
        registry = _registry(root)
        path = registry.find(arch_name, spec.key)
        if path is not None:
            return Choice(spec, arch_name, registry, path, f"listed in {root}")
    return Choice(spec, arch_name, None, None, "in none of " + ", ".join(map(str, roots)))


_kernels: dict[tuple[KernelSpec, str, torch.device, str | None], KernelFunction] = {}
_lock = threading.Lock()


def kernel(spec: KernelSpec, arch_name: str, device: torch.device) -> KernelFunction:
    """The loaded kernel; kept for the life of the process.

    Raises:
        ArtifactMissing: no registry has it. The message names the build command.
        DamagedArtifact: its files fail verification.
        UnsupportedDevice: it needs more shared memory than the device has.
    """
    key = (spec, arch_name, device, os.environ.get("KDA_TL_REGISTRY"))
    found = _kernels.get(key)
    if found is not None:
        return found
    with _lock:
        choice = choose(spec, arch_name)
        if choice.registry is None or choice.path is None:
            raise ArtifactMissing(
                f"no artifact of {spec.key} for {arch_name} ({choice.reason}). Build it with `kda-tl build --arch {arch_name}` "
                "here or on another machine, and copy the registry; or point KDA_TL_REGISTRY at one that has it."
            )
        if device.type == "cuda":
            _check_shared_memory(choice.registry, choice.path, spec, device)
        return _kernels.setdefault(key, load(choice.registry, choice.path, arch_name, spec.key))


def _check_shared_memory(registry: Registry, path: Path, spec: KernelSpec, device: torch.device) -> None:
    limit = _block_shared_memory(device.index or 0)
    needed = max((launch["shared_memory"] for launch in registry.load_meta(path)["launches"]), default=0)
    if limit is not None and needed > limit:
        raise UnsupportedDevice(f"{spec.key} needs {needed} bytes of shared memory per block; {device} has {limit}")
