"""What is installed is what was tested: wheel and sdist hold schedules, notices and, where built, artifacts; no file asks for a
Python or a package that pyproject.toml does not."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kda_tl.registry import Registry
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.schedules import schedule_for

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["kda_tl", "schedules", "tools", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "NOTICE", ".gitignore"]

USE = """
import json, sys
import kda_tl, torch
from kda_tl.registry import checkout_root, search_path
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.schedules import schedule_for
from kda_tl.runtime import dispatcher

found = {
    "file": kda_tl.__file__,
    "checkout": str(checkout_root()),
    "search": [str(path) for path in search_path()],
    "schedules": {arch: {spec.key: schedule_for(spec, arch).as_dict() for spec in default_specs(arch)} for arch in ARCHS},
    "served": [str(dispatcher.choose(spec, "cpu").path) for spec in default_specs("cpu")],
}
if len(sys.argv) > 1:
    from kda_tl.compiler.support import NOTICES, notice
    found["notices"] = [str(notice(name)) for name in NOTICES]
    q, k, v, g = (torch.randn(1, 70, 2, 128) for _ in range(4))
    g, beta = -g.abs(), torch.rand(1, 70, 2)
    k = torch.nn.functional.normalize(k, dim=-1)
    o, state = kda_tl.chunk_kda(q, k, v, g, beta, output_final_state=True)
    expected, _ = kda_tl.reference.recurrent_kda(*(x.double() for x in (q, k, v, g, beta)))
    found["error"] = ((o - expected).norm() / expected.norm()).item()
print(json.dumps(found))
"""


def python(*words: str | Path, cwd: Path, **environment: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("KDA_TL_", "PYTHONPATH"))}
    ran = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env={**env, **environment}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def sources(folder: Path) -> Path:
    """A copy of what a release is made from."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "_artifacts"))
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def package(source: Path, kind: str, out: Path) -> Path:
    pytest.importorskip("hatchling")
    python("-m", "hatchling", "build", "-t", kind, "-d", out, cwd=source)
    (made,) = out.iterdir()
    return made


def install(wheel: Path, target: Path) -> Path:
    python("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target, wheel, cwd=wheel.parent)
    return target


def schedules() -> dict[str, dict[str, object]]:
    return {arch: {spec.key: schedule_for(spec, arch).as_dict() for spec in default_specs(arch)} for arch in ARCHS}


def test_a_wheel_with_artifacts_serves_them(cpu_registry: Registry, tmp_path: Path) -> None:
    source = sources(tmp_path / "source")
    shutil.copytree(cpu_registry.root, source / "kda_tl" / "_artifacts")
    wheel = package(source, "wheel", tmp_path / "out")
    assert f"-py3-none-linux_{os.uname().machine}.whl" in wheel.name  # it holds machine code
    target = install(wheel, tmp_path / "target")
    environment = {"PYTHONPATH": str(target), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = json.loads(python("-c", USE, "call", cwd=tmp_path, **environment))
    package_folder = target / "kda_tl"
    assert found["file"] == str(package_folder / "__init__.py") and found["checkout"] == "None"
    assert found["search"] == [str(tmp_path / "cache" / "kda-tl"), str(package_folder / "_artifacts")]
    assert found["schedules"] == schedules()
    assert all(path.startswith(f"{package_folder}/_artifacts/artifacts/") for path in found["served"])
    assert found["notices"] == [str(package_folder / "_notices" / name) for name in ("NOTICE", "LICENSE")]
    assert found["error"] < 1e-5
    listed = json.loads(python("-m", "kda_tl.cli.main", "list", "--json", cwd=tmp_path, **environment))
    assert {entry["spec"] for entry in listed} == {spec.key for spec in default_specs("cpu")}
    (info,) = target.glob("kda_tl-*.dist-info")
    assert sorted(path.name for path in (info / "licenses").iterdir()) == ["LICENSE", "NOTICE"]


def test_the_sdist_makes_the_same_wheel(tmp_path: Path) -> None:
    source = sources(tmp_path / "source")
    (source / "kda_tl" / "_artifacts").mkdir()
    (source / "kda_tl" / "_artifacts" / "stray").write_text("the sdist is source alone")
    sdist = package(source, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {"NOTICE", "LICENSE", "README.md", "pyproject.toml"} <= {path.name for path in unpacked.iterdir()}
    assert not (unpacked / "kda_tl" / "_artifacts").exists()
    shutil.rmtree(source / "kda_tl" / "_artifacts")

    def content(wheel: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    direct, through = (content(package(folder, "wheel", tmp_path / f"out-{folder.name}")) for folder in (source, unpacked))
    assert direct == through
    assert all("-py3-none-any.whl" in path.name for path in tmp_path.glob("out-*/*"))
    files = {name for name in direct if name.startswith("kda_tl/")}
    assert {f"kda_tl/_schedules/{arch}.json" for arch in ARCHS} <= files
    assert {"kda_tl/compiler/native/tensormap.cc", "kda_tl/_notices/NOTICE", "kda_tl/_notices/LICENSE"} <= files
    assert not [name for name in direct if name.endswith(".pyc") or name.startswith(("tests/", "tools/", "schedules/"))]


def test_the_notice_names_all_that_is_redistributed() -> None:
    from kda_tl.compiler import support

    text = (ROOT / "NOTICE").read_text()
    for library in (*support.RUNTIME_LIBRARIES, support.HELPER_LIBRARY):
        assert library in text, library
    for words in ("MIT License", "BSD-3-Clause", "Apache TVM FFI", "Copyright (c) Tile-AI", "NVIDIA CORPORATION"):
        assert words in text, words


@pytest.mark.parametrize("version", [(3, 10), (3, 11), (3, 12), (3, 13)], ids=lambda version: "{}.{}".format(*version))
def test_every_file_is_of_every_python(version: tuple[int, int]) -> None:
    """By grammar; ruff holds the library calls to its target version, the oldest of these."""
    for path in sorted((ROOT / "kda_tl").rglob("*.py")):
        ast.parse(path.read_text(), str(path), feature_version=version)
    text = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in text and 'target-version = "py310"' in text
    assert f'"Programming Language :: Python :: {version[0]}.{version[1]}"' in text


def test_the_dependency_on_tvm_ffi_is_what_the_runtime_library_links_against() -> None:
    """TileLang 0.1.15's libtvm_runtime.so has undefined symbols with any other apache-tvm-ffi."""
    assert re.search(r'"apache-tvm-ffi>=0\.1\.11,<0\.1\.13"', (ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("script", ["env.sh", "test.sh", "demo.sh"])
def test_scripts_say_that_another_system_will_not_do(tmp_path: Path, script: str) -> None:
    uname = tmp_path / "uname"
    uname.write_text("#!/bin/sh\necho Darwin\n")
    uname.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "KDA_TL_VENV": str(tmp_path / "venv")}
    ran = subprocess.run(["sh", ROOT / "tools" / script], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and ran.stdout == "" and "this is Darwin" in ran.stderr and len(ran.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()
