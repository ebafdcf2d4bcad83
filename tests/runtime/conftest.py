from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kda_tl.runtime import counters, dispatcher


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has loaded, counted and told nothing yet."""
    from kda_tl.runtime import loader

    for cache in ("_kernels", "_schedules"):
        monkeypatch.setattr(dispatcher, cache, {})
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(counters, "_told", set())
    counters.reset_counters()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[torch.device]]]:
    """gpus((9, 0), (8, 9)): CUDA devices of these compute capabilities, the first one current, with a driver for CUDA 13.0."""
    dispatcher._archs.clear()

    def describe(*capabilities: tuple[int, int], cuda: int | None = 13000) -> list[torch.device]:
        properties = [SimpleNamespace(name=f"GPU {n}", major=c[0], minor=c[1]) for n, c in enumerate(capabilities)]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr("kda_tl.runtime.driver.cuda_version", lambda: cuda)
        return [torch.device("cuda", index) for index in range(len(properties))]

    yield describe
    dispatcher._archs.clear()


@pytest.fixture
def registry_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the whole search path, and where builds go."""
    root = tmp_path / "registry"
    monkeypatch.setattr(dispatcher, "search_path", lambda: [root])
    monkeypatch.setattr("kda_tl.runtime.build_on_miss.default_root", lambda: root)
    return root
