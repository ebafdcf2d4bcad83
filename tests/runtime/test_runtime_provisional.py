"""GPUs that the arch table has no row for: what they count as, what they run, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kda_tl.ops.intracard import multiprocessors
from kda_tl.runtime import dispatcher
from kda_tl.specs.archs import ARCHS, Arch, arch, provisional_arch

KIB = 1024


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., torch.device]]:
    """gpu((8, 6), name=value, ...): what every CUDA device is, as torch tells it, in a process that has told nothing yet."""
    caches = (dispatcher._archs, multiprocessors)

    def clear() -> None:
        caches[0].clear()  # type: ignore[union-attr]
        multiprocessors.cache_clear()

    def describe(capability: tuple[int, int], **properties: Any) -> torch.device:
        told = SimpleNamespace(name="mock GPU", major=capability[0], minor=capability[1], **properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
        return torch.device("cuda", 0)

    clear()
    monkeypatch.setattr(dispatcher, "_told", set())
    monkeypatch.delenv("KDA_TL_ARCH", raising=False)
    yield describe
    clear()


@pytest.mark.parametrize(
    ("capability", "block", "nearest"),
    [
        ((8, 6), 99 * KIB, "sm_80"),
        ((8, 7), 163 * KIB, "sm_80"),
        ((9, 1), 227 * KIB, "sm_89"),  # sm_90's code runs on 9.0 alone
        ((10, 3), 227 * KIB, "sm_89"),
        ((11, 0), 227 * KIB, "sm_89"),
        ((12, 1), 99 * KIB, "sm_89"),
        ((13, 0), 64 * KIB, "sm_89"),
    ],
)
def test_an_unknown_gpu_takes_the_nearest_arch_and_says_so_once(
    gpu, caplog, capability: tuple[int, int], block: int, nearest: str
) -> None:
    device = gpu(
        capability, shared_memory_per_block_optin=block, multi_processor_count=84, regs_per_multiprocessor=65536
    )  # fmt: skip
    name = f"sm_{capability[0]}{capability[1]}"
    found = dispatcher.provisional(0)
    assert found is not None and found.nearest == nearest
    assert found.row == Arch(name, name, block, False, capability, 580, measured=False)
    assert (found.multiprocessors, found.registers) == (84, 65536)
    for _ in range(2):
        assert dispatcher.device_arch(device) == nearest
        dispatcher._archs.clear()
    (record,) = caplog.records
    assert record.name == "kda_tl"
    assert record.getMessage() == (
        f"mock GPU has compute capability {capability[0]}.{capability[1]}, which no arch is made for: it counts as a "
        f"provisional {name} ({block // KIB} KiB of shared memory per block, 84 multiprocessors, 65536 registers in each), and "
        f"runs {nearest}'s artifacts with {nearest}'s schedules. `kda-tl autotune --arch {nearest}` on it finds better ones"
    )
    assert multiprocessors(device, nearest) == 84  # plans count with the device's own


@pytest.mark.parametrize("name", [name for name, row in ARCHS.items() if not row.is_cpu])
def test_a_gpu_of_the_table_is_no_news(gpu, caplog, name: str) -> None:
    row = arch(name)
    assert row.capability is not None
    device = gpu(row.capability, shared_memory_per_block_optin=row.shared_memory)
    assert dispatcher.device_arch(device) in ARCHS and dispatcher.provisional(0) is None and not caplog.records


def test_what_an_old_torch_does_not_tell(gpu, caplog) -> None:
    gpu((8, 6))
    found = dispatcher.provisional(0)
    assert found is not None and str(found) == "provisional sm_86 (163 KiB of shared memory per block)"
    assert (found.row.shared_memory, found.multiprocessors, found.registers) == (163 * KIB, None, None)


def test_too_old_for_any_arch() -> None:
    assert provisional_arch((7, 5)) is None and provisional_arch((9, 0)) is None


def test_a_forced_arch_asks_no_device(gpu, caplog, monkeypatch) -> None:
    device = gpu((8, 6))
    monkeypatch.setenv("KDA_TL_ARCH", "sm_80")
    assert dispatcher.device_arch(device) == "sm_80" and not caplog.records
