"""Spec, device and size of the problem to kernel: which registry, which arch, which artifact, and why.

A kernel is looked for once per (spec, arch, device, KDA_TL_REGISTRY) and size class, and then kept for the life of the process;
every key is a value, never an address. Looking again costs a fraction of a microsecond and reads no file. The logger "kda_tl"
tells each choice once, `kda_tl.counters()` how often each outcome came.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kda_tl.registry import DamagedArtifact, Registry, RegistryError, Served, search_path
from kda_tl.runtime import driver, environment
from kda_tl.runtime.build_on_miss import build_command, build_missing
from kda_tl.runtime.counters import count_fallback, counts
from kda_tl.runtime.errors import ArtifactMissing, DriverTooOld, UnsupportedDevice
from kda_tl.runtime.loader import KernelFunction, load
from kda_tl.runtime.ranges import annotate
from kda_tl.specs.archs import ARCHS, ProvisionalArch, arch, archs_for_capability, provisional_arch
from kda_tl.specs.kernels import KernelSpec
from kda_tl.specs.schedules import SCHEDULES, SizeClass
from kda_tl.specs.schedules import schedule_classes as scheduled_classes

__all__ = [
    "LARGEST",
    "Choice",
    "assume_arch",
    "assumed_arch",
    "choose",
    "device_arch",
    "device_guard",
    "kernel",
    "provisional",
    "schedule_classes",
    "size_class",
]

LARGEST = sys.maxsize
"""As a size (`kda_tl.specs.sizes`): more than any class has a limit for."""

log = logging.getLogger("kda_tl")


@dataclass(frozen=True)
class Choice:
    """The dispatcher's answer for one spec and size. `path` is None on a miss, and `reason` then names what was looked at.

    classes: all artifacts of the spec in that registry, smallest problems first; `path` is that of number `index`.
    """

    spec: KernelSpec
    arch: str
    registry: Registry | None
    path: Path | None
    reason: str
    classes: tuple[Served, ...] = ()
    index: int = 0

    @property
    def bounds(self) -> tuple[int, ...]:
        """Largest sizes of all classes but the last."""
        return _bounds(self.classes)


def _bounds(classes: Sequence[Served] | Sequence[SizeClass]) -> tuple[int, ...]:
    return tuple(one.up_to for one in classes if one.up_to is not None)


_assumed: ContextVar[str | None] = ContextVar("kda_tl_assumed_arch", default=None)
assumed_arch = _assumed.get
"""What `assume_arch` says here, None outside of it."""


@contextmanager
def assume_arch(name: str) -> Iterator[None]:
    """Inside, every device counts as one of this arch: for plans of a machine that is not here. Overrides KDA_TL_ARCH."""
    token = _assumed.set(arch(name).name)
    try:
        yield
    finally:
        _assumed.reset(token)


_archs: dict[tuple[torch.device, object], str] = {}


def device_arch(device: torch.device) -> str:
    """The arch whose artifacts a device runs; KDA_TL_ARCH overrides it, to run what was built for another one.

    Raises:
        UnsupportedDevice: no arch serves the device.
        ValueError: KDA_TL_ARCH names no arch that runs on a GPU.
    """
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    key = (device, environment.arch_setting())
    found = _archs.get(key)
    if found is None:
        found = _find_arch(device)
        if device.index is not None or device.type == "cpu":  # cuda alone is whichever device is current
            _archs[key] = found
    return found


def _find_arch(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise UnsupportedDevice(f"no kernels for {device.type} tensors: kda-tl runs on cuda and cpu")
    forced = os.environ.get("KDA_TL_ARCH")
    if forced and arch(forced).is_cpu:
        raise ValueError("KDA_TL_ARCH=cpu cannot serve cuda tensors: move them to the cpu, or name a GPU arch")
    return forced if forced else _cuda_arch(_index(device))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _cuda_arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    loadable = archs_for_capability(capability, _block_shared_memory(index))
    if not loadable:
        rows = ", ".join(name for name, row in ARCHS.items() if not row.is_cpu)
        raise UnsupportedDevice(
            f"no arch serves {properties.name} (compute capability {capability[0]}.{capability[1]}); archs: {rows}"
        )
    if unknown := provisional(index):
        _tell(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}, which no arch is made for: it counts "
            f"as a {unknown}, and runs {loadable[0]}'s artifacts with {loadable[0]}'s schedules. "
            f"`kda-tl autotune --arch {loadable[0]}` on it finds better ones"
        )
    return loadable[0]


def provisional(index: int) -> ProvisionalArch | None:
    """What a CUDA device counts as where its compute capability is in no row of the arch table; else None."""
    properties = torch.cuda.get_device_properties(index)
    return provisional_arch(
        (properties.major, properties.minor),
        _block_shared_memory(index),
        getattr(properties, "multi_processor_count", None),
        getattr(properties, "regs_per_multiprocessor", None),
    )


_told: set[str] = set()


def _tell(notice: str) -> None:
    """Once per process."""
    if notice not in _told:
        _told.add(notice)
        log.warning("%s", notice)


def _block_shared_memory(index: int) -> int | None:
    """Bytes that one block may use; None where this torch does not tell."""
    value = getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", None)
    return None if value is None else int(value)


_NO_GUARD: AbstractContextManager[None] = nullcontext()


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """For the launches of one op: a launcher makes its tensors' device the current one and leaves it so. Costs nothing where
    `device` is the current one already, or no GPU."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(device)


@functools.cache
def _registry(root: Path) -> Registry:
    return Registry(root)


def choose(spec: KernelSpec, arch_name: str, size: int = LARGEST) -> Choice:
    """Where the artifact of `spec` for `arch_name` and problems of `size` lies, without loading it."""
    roots = search_path()
    for root in roots:
        registry = _registry(root)
        classes = registry.classes(arch_name, spec.key)
        if classes:
            index = bisect_left(_bounds(classes), size)
            return Choice(spec, arch_name, registry, classes[index].path, f"listed in {root}", classes, index)
    return Choice(spec, arch_name, None, None, "in none of " + ", ".join(map(str, roots)))


_schedules: dict[tuple[KernelSpec, str, object], tuple[SizeClass, ...]] = {}


def schedule_classes(spec: KernelSpec, arch_name: str) -> tuple[SizeClass, ...]:
    """The schedules of a spec by size: those of the artifacts that serve it, and of what a build would make where none does.

    Kept for the life of the process once an artifact was found, as kernels are.

    Raises:
        DamagedArtifact: the metadata of an artifact is damaged, and KDA_TL_ON_MISS=build will not mend it.
        RegistryError: an artifact has a schedule that this version does not know.
    """
    key = (spec, arch_name, environment.registry_setting())
    found = _schedules.get(key)
    if found is not None:
        return found
    choice = choose(spec, arch_name)
    if choice.registry is None:
        return scheduled_classes(spec, arch_name)
    try:
        found = tuple(_scheduled(choice.registry, one, choice) for one in choice.classes)
    except DamagedArtifact as damage:
        if environment.on_miss() != "build":
            raise
        log.warning("%s", damage)
        return scheduled_classes(spec, arch_name)
    return _schedules.setdefault(key, found)


def size_class(spec: KernelSpec, arch_name: str, size: int = LARGEST) -> SizeClass:
    """That of a problem of `size`; as `schedule_classes`."""
    classes = schedule_classes(spec, arch_name)
    return classes[bisect_left(_bounds(classes), size)]


def _scheduled(registry: Registry, served: Served, choice: Choice) -> SizeClass:
    kind = SCHEDULES[choice.spec.kernel]
    given = registry.load_meta(served.path).get("schedule", {})
    try:
        return SizeClass(served.up_to, kind(**given), str(served.fields.get("source", "unknown")))
    except (TypeError, ValueError) as error:
        raise RegistryError(
            f"{served.path} has a schedule of {choice.spec.key} that this version of kda-tl does not know ({error}): run "
            f"`kda-tl build --arch {choice.arch}`"
        ) from None


_kernels: dict[tuple[str, str, torch.device, object], tuple[tuple[int, ...], list[KernelFunction | None]]] = {}
"""By spec.key, a string, which knows its hash: largest sizes of all classes but the last, and the kernel of every class that
was used."""
_lock = threading.Lock()

os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))  # as in the loader


def kernel(spec: KernelSpec, arch_name: str, device: torch.device, size: int = LARGEST) -> KernelFunction:
    """The loaded kernel for problems of `size` (`kda_tl.specs.sizes`); kept for the life of the process. Safe to call from
    several threads.

    Raises:
        ArtifactMissing: no registry has it. The message names the build command.
        BuildOnMissFailed: nor could KDA_TL_ON_MISS=build make it.
        DamagedArtifact: its files fail verification; with KDA_TL_ON_MISS=build it is built again instead.
        DriverTooOld: the NVIDIA driver cannot load it.
        UnsupportedDevice: it needs more shared memory than the device has.
        ValueError: KDA_TL_ON_MISS or KDA_TL_NVTX has a value that does not exist.
    """
    found = _kernels.get((spec.key, arch_name, device, environment.registry_setting()))
    if found is not None:
        function = found[1][bisect_left(found[0], size)]
        if function is not None:
            counts.hits += 1
            return function
    return _first_use(spec, arch_name, device, size)


def _first_use(spec: KernelSpec, arch_name: str, device: torch.device, size: int) -> KernelFunction:
    build = environment.on_miss() == "build"
    key = (spec.key, arch_name, device, environment.registry_setting())
    with _lock:
        found = _kernels.get(key)
        function = None if found is None else found[1][bisect_left(found[0], size)]
        if function is not None:  # another thread was faster
            counts.hits += 1
            return function
        choice = choose(spec, arch_name, size)
        if choice.path is None:
            counts.misses += 1
            choice = _build(spec, arch_name, size) if build else _refuse(choice)
        try:
            function = _load(choice, device)
        except DamagedArtifact as damage:
            if not build:
                raise
            log.warning("%s", damage)
            choice = _build(spec, arch_name, size)
            function = _load(choice, device)
        counts.loads += 1
        if found is None or found[0] != choice.bounds:  # the registry may have other classes than when it was first asked
            found = choice.bounds, [None] * len(choice.classes)
        found[1][choice.index] = function
        _kernels[key] = found
        return function


def _refuse(choice: Choice) -> Choice:
    command = build_command(choice.spec, choice.arch)
    raise ArtifactMissing(
        f"no artifact of {choice.spec.key} for {choice.arch} ({choice.reason}). Build it with `{command}` here or on another "
        "machine, and copy the registry; or point KDA_TL_REGISTRY at one that has it; or set KDA_TL_ON_MISS=build, and the "
        "call compiles it first."
    )


def _build(spec: KernelSpec, arch_name: str, size: int) -> Choice:
    def whole() -> bool:
        found = choose(spec, arch_name)
        return found.registry is not None and (arch(arch_name).is_cpu or found.registry.support_dir(arch_name) is not None)

    build_missing(spec, arch_name, whole)
    choice = choose(spec, arch_name, size)
    if choice.path is None:
        raise ArtifactMissing(f"{spec.key} for {arch_name} was built, but is {choice.reason}: run `kda-tl doctor`")
    return choice


def _load(choice: Choice, device: torch.device) -> KernelFunction:
    assert choice.registry is not None and choice.path is not None
    if device.type == "cuda":
        _check_device(choice.registry.load_meta(choice.path), choice, device)
    function = load(choice.registry, choice.path, choice.arch, choice.spec.key)
    up_to = choice.classes[choice.index].up_to
    which = "" if len(choice.classes) == 1 else f" and sizes {'beyond' if up_to is None else f'up to {up_to}'}"
    log.info("%s on %s: artifact %s for %s%s, %s", choice.spec.key, device, choice.path.name, choice.arch, which, choice.reason)
    return annotate(function, f"kda_tl::{choice.spec.kernel}")


def _check_device(meta: Mapping[str, Any], choice: Choice, device: torch.device) -> None:
    """Refuses what the device or its driver would only fail on obscurely, and tells of what runs slower than it could."""
    index, key = _index(device), choice.spec.key
    if reason := driver.too_old(meta.get("min_driver")):
        raise DriverTooOld(f"{key} cannot be loaded on {device}: {reason}. Update the driver, or install NVIDIA's cuda-compat")
    limit = _block_shared_memory(index)
    needed = max((launch["shared_memory"] for launch in meta["launches"]), default=0)
    if limit is not None and needed > limit:
        raise UnsupportedDevice(f"{key} needs {needed} bytes of shared memory per block; {device} has {limit}")
    properties = torch.cuda.get_device_properties(index)
    row = arch(choice.arch)
    # Machine code runs on later minor versions of its compute capability; on a later major one the driver compiles the PTX.
    if row.capability is not None and row.capability[0] != properties.major:
        count_fallback(
            f"{properties.name} (compute capability {properties.major}.{properties.minor}) runs {choice.spec.kernel} of "
            f"{choice.arch} through its PTX: right, not tuned"
        )
