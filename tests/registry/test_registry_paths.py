"""Where registries are looked for, and where a build goes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kda_tl.registry import (
    ManifestError,
    Registry,
    RegistryError,
    checkout_root,
    default_root,
    install_command,
    paths,
    search_path,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package as it lies in an environment, with nothing set."""
    package = tmp_path / "site-packages" / "kda_tl"
    package.mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE", package)
    monkeypatch.setattr(paths, "_SHIPPED", package / "_artifacts")
    monkeypatch.delenv("KDA_TL_REGISTRY", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return package


def make_checkout(package: Path, name: str = "kda-tl") -> Path:
    (package.parent / "pyproject.toml").write_text(f'[build-system]\n\n[project]\nname = "{name}"\n')
    return package.parent


def test_installed_package(installed: Path, tmp_path: Path) -> None:
    assert checkout_root() is None
    assert search_path() == [tmp_path / "home" / ".cache" / "kda-tl", installed / "_artifacts"]
    assert default_root() == tmp_path / "home" / ".cache" / "kda-tl"


def test_order(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = make_checkout(installed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert search_path() == [checkout / "build", tmp_path / "cache" / "kda-tl", installed / "_artifacts"]
    assert default_root() == checkout / "build"

    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("KDA_TL_REGISTRY", os.pathsep.join([str(first), "", str(second), " ", str(first), ""]))
    assert search_path() == [
        first,
        second,
        checkout / "build",
        tmp_path / "cache" / "kda-tl",
        installed / "_artifacts",
    ]
    assert default_root() == first


def test_relative_and_home_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KDA_TL_REGISTRY", os.pathsep.join(["here", "~/there"]))
    assert search_path()[:2] == [tmp_path / "here", tmp_path / "home" / "there"]
    monkeypatch.delenv("KDA_TL_REGISTRY")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert search_path()[0] == tmp_path / "home" / ".cache" / "kda-tl"


def test_somebody_elses_project_is_no_checkout(installed: Path) -> None:
    make_checkout(installed, "their-project")
    assert checkout_root() is None
    make_checkout(installed, "kda-tl-plugin")
    assert checkout_root() is None


def test_what_installs_the_package_names_the_repository(installed: Path) -> None:
    assert install_command("build") == "pip install 'CHECKOUT[build]' (CHECKOUT: the path of the kda-tl repository)"
    checkout = make_checkout(installed)
    assert install_command("build,nvcc") == f"pip install '{checkout}[build,nvcc]'"


def test_no_message_takes_the_package_for_one_of_an_index() -> None:
    files = (file for folder in ("kda_tl", "tools") for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".sh"))
    assert not [str(file) for file in files if re.search(r"pip install\W+kda-tl\b", file.read_text())]


def test_default_root_skips_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("KDA_TL_REGISTRY", str(file / "registry"))
    assert default_root() == tmp_path / "home" / ".cache" / "kda-tl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(RegistryError, match=r"file/registry, .*file/kda-tl\): set KDA_TL_REGISTRY"):
        default_root()


def test_this_checkout_knows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert checkout_root() == ROOT
    assert ROOT / "build" in search_path()


def test_a_file_in_the_way_is_no_registry(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "registry"):
        assert Registry(root).classes("cpu", "k[one]") == () and Registry(root).entries() == []
    (tmp_path / "manifest").touch()  # but this folder was to be one
    with pytest.raises(ManifestError, match=f"cannot read the manifest {tmp_path}/manifest/cpu.json: Not a directory"):
        Registry(tmp_path).classes("cpu", "k[one]")
