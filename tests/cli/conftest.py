from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kda_tl.cli.main import cli
from kda_tl.registry import Registry

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """kda-tl with these words; an exception that no command turned into a message fails the test."""

    def invoke(*words: object) -> Result:
        return CliRunner().invoke(cli, [str(word) for word in words], prog_name="kda-tl", catch_exceptions=False)

    return invoke


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two registry folders that are the whole search path. Neither exists yet."""
    folders = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr("kda_tl.cli.shared.search_path", lambda: list(folders))
    monkeypatch.setattr("kda_tl.runtime.dispatcher.search_path", lambda: list(folders))
    return folders


@pytest.fixture
def fill() -> Callable[[Path], Registry]:
    """Puts two artifacts of the cpu, and one of sm_90 with its libraries, into a registry folder."""

    def make(root: Path) -> Registry:
        registry = Registry(root)
        for name in ("one", "two"):
            registry.put("artifacts", f"cpu-{name}", {"lib.so": name.encode() * 1024}, {"abi": "c"})
        registry.put("artifacts", "gpu-one", {"lib.so": b"gpu"}, {"abi": "tvm_ffi"})
        registry.put("support", "libraries", {"libtvm_runtime.so": b"tvm"}, {})
        built = {"kernel": "k", "built": "2026-01-02"}
        registry.publish("cpu", {f"k[{name}]": {"id": f"cpu-{name}", **built} for name in ("one", "two")})
        registry.publish("sm_90", {"k[one]": {"id": "gpu-one", **built}}, support="libraries")
        return registry

    return make
