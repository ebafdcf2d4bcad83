"""Drivers and devices that differ: what is refused, what falls back, and what is kept per device."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

import kda_tl
from kda_tl.registry import Registry
from kda_tl.runtime import dispatcher, driver
from kda_tl.specs.kernels import ChunkWySpec

SPEC = ChunkWySpec()


def put(root: Path, arch: str, **meta: object) -> Path:
    registry = Registry(root)
    launches = [{"name": "chunk_wy", "shared_memory": 0}]
    path = registry.put("artifacts", f"wy-{arch}", {"lib.so": b"none"}, {"launches": launches, "min_driver": 580, **meta})
    registry.publish(arch, {SPEC.key: {"id": path.name, "kernel": "chunk_wy", "built": "2026-01-01"}})
    return path


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(folder, arch) of everything that would have been loaded."""
    seen: list[tuple[str, str]] = []

    def load(registry: Registry, path: Path, arch: str, key: str):
        seen.append((path.name, arch))
        return lambda: (path.name, len(seen))

    monkeypatch.setattr(dispatcher, "load", load)
    monkeypatch.delenv("KDA_TL_ARCH", raising=False)
    return seen


@pytest.mark.parametrize(
    ("min_driver", "cuda", "refused"),
    [(580, 13000, False), (580, 13020, False), (580, 12090, True), (580, 12040, True), (575, 12090, False), (581, 13000, False),
     (590, 13000, True), (None, 11000, False), (580, None, False), (400, 12000, False)],
)  # fmt: skip
def test_which_driver_is_too_old(min_driver: int | None, cuda: int | None, refused: bool, monkeypatch) -> None:
    monkeypatch.setattr(driver, "cuda_version", lambda: cuda)
    monkeypatch.setattr(driver, "driver_version", lambda: "550.54.14")
    reason = driver.too_old(min_driver)
    assert (reason is not None) == refused
    if reason:
        assert f"R{min_driver}" in reason and "550.54.14" in reason


@pytest.mark.parametrize(("status", "version", "expected"), [(0, 13000, 13000), (0, 0, None), (100, 13000, None)])
def test_the_driver_is_asked(status: int, version: int, expected: int | None, monkeypatch) -> None:
    class Library:
        @staticmethod
        def cuDriverGetVersion(pointer) -> int:
            pointer._obj.value = version
            return status

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert driver.cuda_version.__wrapped__() == expected
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert driver.cuda_version.__wrapped__() is None


def test_an_old_driver_is_refused_by_name(fresh, gpus, loads, registry_root: Path) -> None:
    (device,) = gpus((9, 0), cuda=12040)
    put(registry_root, "sm_90")
    with pytest.raises(
        kda_tl.DriverTooOld, match=r"on cuda:0: an NVIDIA driver R580 .*CUDA 13\.0.* supports CUDA 12\.4"
    ) as caught:
        dispatcher.kernel(SPEC, "sm_90", device)
    assert SPEC.key in str(caught.value) and "Update the driver" in str(caught.value)
    assert not loads


def test_an_artifact_without_a_minimum_loads_anywhere(fresh, gpus, loads, registry_root: Path) -> None:
    (device,) = gpus((9, 0), cuda=12040)
    put(registry_root, "sm_90", min_driver=None)
    dispatcher.kernel(SPEC, "sm_90", device)
    assert loads == [("wy-sm_90", "sm_90")]


def test_each_device_has_its_own_arch_and_kernel(fresh, gpus, loads, registry_root: Path) -> None:
    devices = gpus((9, 0), (8, 9), (9, 0))
    for arch in ("sm_90", "sm_89"):
        put(registry_root, arch)
    archs = [dispatcher.device_arch(device) for device in devices]
    assert archs == ["sm_90", "sm_89", "sm_90"]
    kernels = [dispatcher.kernel(SPEC, arch, device) for arch, device in zip(archs, devices)]
    assert loads == [("wy-sm_90", "sm_90"), ("wy-sm_89", "sm_89"), ("wy-sm_90", "sm_90")]
    assert [dispatcher.kernel(SPEC, arch, torch.device("cuda", n)) for n, arch in enumerate(archs)] == kernels
    assert kda_tl.counters().fallbacks == 0


@pytest.mark.parametrize(("capability", "arch", "counted"), [((8, 6), "sm_80", 0), ((12, 0), "sm_89", 1), ((9, 0), "sm_80", 1)])
def test_what_runs_through_its_ptx_is_a_fallback(
    fresh, gpus, loads, registry_root: Path, caplog, capability: tuple[int, int], arch: str, counted: int
) -> None:
    (device,) = gpus(capability)
    put(registry_root, arch)
    for _ in range(2):
        dispatcher.kernel(SPEC, arch, device)
    assert kda_tl.counters().fallbacks == counted
    told = [record.getMessage() for record in caplog.records if "fallback" in record.getMessage()]
    assert len(told) == counted and all("GPU 0" in line and f"of {arch} through its PTX" in line for line in told)


def test_a_device_without_an_index_is_the_current_one(gpus, monkeypatch) -> None:
    monkeypatch.delenv("KDA_TL_ARCH", raising=False)
    gpus((9, 0), (8, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert dispatcher.device_arch(torch.device("cuda")) == "sm_80"


def test_only_another_device_is_guarded(gpus, monkeypatch) -> None:
    first, second = gpus((9, 0), (9, 0))
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or dispatcher._NO_GUARD)
    for device in (first, torch.device("cpu"), second):
        with dispatcher.device_guard(device):
            pass
    assert entered == [second]


def test_assuming_an_arch(gpus, monkeypatch) -> None:
    monkeypatch.setenv("KDA_TL_ARCH", "sm_80")
    (device,) = gpus((9, 0))
    with dispatcher.assume_arch("sm_89"):
        assert dispatcher.device_arch(torch.device("cpu")) == dispatcher.device_arch(device) == "sm_89"
    assert dispatcher.device_arch(device) == "sm_80"
    with pytest.raises(ValueError, match="arch must be one of"), dispatcher.assume_arch("sm_70"):
        pass
