from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kda_tl.cli import doctor
from kda_tl.registry import Registry
from kda_tl.runtime import dispatcher, driver
from kda_tl.specs import schedules
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.defaults import default_specs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def plain_machine(roots, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, no variables, two empty registry folders, and nvcc where nobody looks."""
    for name in list(os.environ):
        if name.startswith("KDA_TL_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "default_root", lambda: roots[0])
    monkeypatch.setattr(doctor, "find_nvcc", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "cuda_version", lambda: None)
    monkeypatch.setattr(driver, "driver_version", lambda: None)


def checks(run, code: int | None = None) -> list[dict[str, str]]:
    result = run("doctor", "--json")
    found = json.loads(result.stdout)
    assert all(set(check) == {"subject", "status", "detail", "fix"} for check in found)
    assert {check["status"] for check in found} <= {"ok", "warning", "problem"}
    assert result.exit_code == int(any(check["status"] == "problem" for check in found))
    if code is not None:
        assert result.exit_code == code, result.stdout
    return found


def only(found: list[dict[str, str]], subject: str) -> dict[str, str]:
    (check,) = [check for check in found if check["subject"] == subject]
    return check


def test_a_machine_without_a_gpu(run, roots) -> None:
    found = checks(run, 0)
    assert only(found, "driver")["status"] == "warning" and only(found, "nvcc")["fix"]
    assert "CPU build" in only(found, "torch")["detail"] or "CUDA" in only(found, "torch")["detail"]
    cpu = only(found, "device cpu")
    assert cpu["status"] == "warning" and cpu["fix"] == "kda-tl build --arch cpu" and "served by cpu, 0 of" in cpu["detail"]
    assert only(found, "builds go to")["detail"] == str(roots[0])
    assert [check["detail"].split(":")[0] for check in found if check["subject"] == "registry"] == [str(root) for root in roots]


def test_the_lines_that_people_read(run, monkeypatch) -> None:
    monkeypatch.setenv("KDA_TL_ON_MIS", "build")
    result = run("doctor")
    lines = result.output.splitlines()
    line = next(number for number, text in enumerate(lines) if "KDA_TL_ON_MIS" in text)
    assert lines[line].startswith("warning") and "-> unset KDA_TL_ON_MIS, and set KDA_TL_ON_MISS" in lines[line + 1]
    warnings = sum(text.startswith("warning") for text in lines)
    assert lines[-1] == f"0 problems, {warnings} warning{'' if warnings == 1 else 's'}"


@pytest.mark.parametrize(
    ("package", "version", "status", "fix"),
    [
        ("apache-tvm", "0.25.0", "problem", "pip uninstall apache-tvm"),
        ("apache-tvm-ffi", None, "problem", "pip install 'apache-tvm-ffi>=0.1.11,<0.1.13'"),
        ("apache-tvm-ffi", "0.1.13", "problem", "pip install 'apache-tvm-ffi>=0.1.11,<0.1.13'"),
        ("apache-tvm-ffi", "0.1.9", "problem", "pip install 'apache-tvm-ffi>=0.1.11,<0.1.13'"),
        ("apache-tvm-ffi", "0.1.11", "ok", ""),
        ("apache-tvm-ffi", "0.1.12.post1", "ok", ""),
        ("tilelang", None, "warning", f"pip install '{ROOT}[build]'"),
        ("tilelang", "0.1.14", "warning", "pip install tilelang==0.1.15"),
        ("tilelang", "0.1.15+cu130", "ok", ""),
    ],
)
def test_packages(run, monkeypatch, package: str, version: str | None, status: str, fix: str) -> None:
    installed = metadata.version

    def look(name: str) -> str:
        if name != package:
            return installed(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", look)
    check = only(checks(run), package)
    assert (check["status"], check["fix"]) == (status, fix) and (version is None or version in check["detail"])


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("KDA_TL_ARCH", "sm_86", "problem"),
        ("KDA_TL_ARCH", "cpu", "problem"),
        ("KDA_TL_ARCH", "sm_80", "ok"),
        ("KDA_TL_ON_MISS", "bild", "problem"),
        ("KDA_TL_ON_MISS", "build", "ok"),
        ("KDA_TL_NVTX", "yes", "problem"),
        ("KDA_TL_CHECK", "yes", "problem"),
        ("KDA_TL_CHECK", "0", "ok"),
        ("KDA_TL_REGISTRY", "/nowhere", "ok"),
        ("KDA_TL_SOMETHING_ELSE", "1", "warning"),
        ("CXX", "g++", "ok"),
    ],
)
def test_variables(run, monkeypatch, name: str, value: str, status: str) -> None:
    monkeypatch.setenv(name, value)
    check = only(checks(run), name)
    assert check["status"] == status and repr(value) in check["detail"] and bool(check["fix"]) == (status != "ok")


def test_a_wrong_value_does_not_stop_the_command_that_names_it() -> None:
    environment = {**os.environ, "KDA_TL_NVTX": "2", "KDA_TL_ON_MISS": "2", "KDA_TL_ARCH": "2", "KDA_TL_CHECK": "2"}
    ran = subprocess.run([sys.executable, "-m", "kda_tl", "doctor", "--json"], cwd=ROOT, env=environment, capture_output=True,
                         text=True, timeout=300)  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    problems = {check["subject"] for check in json.loads(ran.stdout) if check["status"] == "problem"}
    assert {"KDA_TL_NVTX", "KDA_TL_ON_MISS", "KDA_TL_ARCH", "KDA_TL_CHECK"} <= problems


def test_registries(run, roots, fill, monkeypatch) -> None:
    registry = fill(roots[1])
    found = [check for check in checks(run, 0) if check["subject"] == "registry"]
    assert found[1]["status"] == "ok" and "cpu 2, sm_90 1" in found[1]["detail"] and "writable" in found[1]["detail"]
    monkeypatch.setenv("HOME", str(roots[0].parent))
    for named in (str(roots[0]), f"~/{roots[0].name}"):
        monkeypatch.setenv("KDA_TL_REGISTRY", named)
        first = next(check for check in checks(run, 0) if check["subject"] == "registry")
        assert first["status"] == "warning" and "KDA_TL_REGISTRY names it" in first["detail"] and "--registry" in first["fix"]
    shutil.rmtree(registry.root / "artifacts" / "cpu-one")
    found = [check for check in checks(run, 1) if check["subject"] == "registry"]
    assert found[1]["status"] == "problem" and "1 listed, but gone" in found[1]["detail"] and "--arch cpu" in found[1]["fix"]
    (registry.root / "manifest" / "cpu.json").write_text("{")
    found = checks(run, 1)
    assert "is damaged" in [check for check in found if check["subject"] == "registry"][1]["detail"]
    assert only(found, "device cpu")["status"] == "problem"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KDA_TL_REGISTERY", "KDA_TL_REGISTRY"),
        ("KDATL_REGISTRY", "KDA_TL_REGISTRY"),
        ("kda_tl_arch", "KDA_TL_ARCH"),
        ("KDA_TL_ARHC", "KDA_TL_ARCH"),
        ("KDA_TL_ONMISS", "KDA_TL_ON_MISS"),
        ("KDA_TL_NVTX_", "KDA_TL_NVTX"),
        ("KDA_TL_CACHE", None),
        ("KDA_TL_PATH", None),
        ("KDA_TL_TUNE", None),
        ("KDA_TL_CHUNK", None),
        ("KDA_TL_", None),
    ],
)
def test_a_name_that_nothing_reads(run, monkeypatch, name: str, meant: str | None) -> None:
    monkeypatch.setenv(name, "1")
    check = only(checks(run), name)
    assert check["status"] == "warning" and check["fix"] == f"unset {name}" + (f", and set {meant}" if meant else "")
    if meant:
        monkeypatch.setenv(meant, "")
        assert only(checks(run), name)["fix"] == f"unset {name}"


@pytest.fixture
def schedule_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """cpu.json of a folder of its own."""
    folder = tmp_path / "schedules"
    shutil.copytree(schedules.schedules_folder(), folder)
    monkeypatch.setattr(schedules, "schedules_folder", lambda: folder)
    return folder / "cpu.json"


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(path.read_text())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("break_it", "detail", "fix"),
    [
        (lambda path: path.unlink(), "not there", "kda-tl autotune --arch cpu"),
        (lambda path: path.write_text("{"), "it is not JSON", "&& kda-tl autotune --arch cpu"),
        (lambda path: path.write_text(edited(path, lambda c: c.update(format=1))), "its format is 1", "restore it, or rm "),
        (lambda path: path.write_text(edited(path, lambda c: c.update(arch="sm_90"))), "its arch is 'sm_90'", "restore it"),
        (
            lambda path: path.write_text(edited(path, lambda c: c["schedules"].update({"nothing[x=1]": {}}))),
            "entries that are not used: 1, the first nothing[x=1]: ",
            "correct or remove what is named, or kda-tl autotune --arch cpu",
        ),
    ],
)
def test_a_schedules_file_that_cannot_be_used(run, schedule_file: Path, break_it, detail: str, fix: str) -> None:
    break_it(schedule_file)
    check = only(checks(run, 0), "schedules cpu")
    assert check["status"] == "warning" and str(schedule_file) in check["detail"]
    assert detail in check["detail"] and fix in check["fix"]


def test_schedules_are_those_of_what_is_built(run, roots, schedule_file: Path) -> None:
    assert only(checks(run, 0), "schedules cpu")["status"] == "ok"
    registry, specs = Registry(roots[1]), default_specs("cpu")[:2]
    for number, spec in enumerate(specs):
        sizes = schedules.schedule_classes(spec, "cpu")
        classes = [{"up_to": one.up_to, "id": f"{number}-{index}", "source": one.source} for index, one in enumerate(sizes)]
        for one, size in zip(classes, sizes, strict=True):
            registry.put("artifacts", one["id"], {"lib.so": b""}, {"schedule": size.schedule.as_dict()})
        registry.publish("cpu", {spec.key: {"kernel": spec.kernel, "classes": classes}})
    check = only(checks(run, 0), "schedules cpu")
    assert check["status"] == "ok" and check["detail"].endswith("all 2 that are built have theirs")
    changed = schedules.schedule_classes(specs[0], "cpu")[0].schedule.as_dict()
    name = next(name for name, value in changed.items() if name in ("threads", "parts"))
    changed[name] = {"threads": 256, "parts": 8}[name]
    entry = {"classes": [{"up_to": None, "schedule": changed, "source": "model"}]}
    schedule_file.write_text(edited(schedule_file, lambda content: content["schedules"].update({specs[0].key: entry})))
    check = only(checks(run, 0), "schedules cpu")
    assert check["status"] == "warning" and check["fix"] == "kda-tl build --arch cpu"
    assert check["detail"].endswith("1 of 2 that are built have others")


def test_every_arch_that_is_built_has_its_schedules_told(run, roots, fill) -> None:
    fill(roots[1])
    told = [check["subject"] for check in checks(run, 0) if check["subject"].startswith("schedules ")]
    assert told == ["schedules sm_90", "schedules cpu"]


def test_a_compiler_that_is_not_there(run, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "g++ -O2")
    check = only(checks(run), "C++ compiler")
    assert check["status"] == "warning" and "CXX must be the name or path" in check["detail"] and check["fix"] == "unset CXX"


def test_a_file_where_a_registry_should_be(run, roots, monkeypatch) -> None:
    roots[1].write_text("")
    found = [check for check in checks(run, 0) if check["subject"] == "registry"]
    assert found[1]["status"] == "ok" and found[1]["detail"].endswith("is a file")
    monkeypatch.setenv("KDA_TL_REGISTRY", str(roots[1]))
    found = checks(run, 0)  # what the others have still serves
    check = [check for check in found if check["subject"] == "registry"][1]
    assert check["status"] == "warning" and check["detail"].endswith(f"{roots[1]} is a file, though KDA_TL_REGISTRY names it")
    assert check["fix"] == "name another folder with KDA_TL_REGISTRY"
    assert "0 of" in only(found, "device cpu")["detail"]


def test_quarantine_is_mentioned(run, roots, fill) -> None:
    registry = fill(roots[0])
    (registry.root / "quarantine" / "x-1").mkdir(parents=True)
    first = next(check for check in checks(run, 0) if check["subject"] == "registry")
    assert first["status"] == "warning" and first["fix"] == f"rm -r {roots[0] / 'quarantine'}"


@pytest.mark.parametrize(
    ("capability", "cuda", "device", "words"),
    [
        ((9, 0), 13000, "warning", "served by sm_90, 0 of"),
        ((12, 0), 13000, "warning", "through PTX: right, not tuned; served by sm_89"),
        (
            (12, 1),
            13000,
            "warning",
            "a provisional sm_121 (99 KiB of shared memory per block), through PTX: right, not tuned; served",
        ),
        ((7, 5), 13000, "problem", "no arch serves"),
        ((9, 0), 12040, "warning", "served by sm_90"),
    ],
)
def test_a_gpu(run, monkeypatch, capability: tuple[int, int], cuda: int, device: str, words: str) -> None:
    properties = SimpleNamespace(name="mock GPU", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(driver, "cuda_version", lambda: cuda)
    dispatcher._archs.clear()
    try:
        found = checks(run)
    finally:
        dispatcher._archs.clear()
    check = only(found, "device cuda:0")
    assert check["status"] == device and words in check["detail"] and "mock GPU" in check["detail"] and check["fix"]
    old = cuda < 13000
    assert only(found, "driver")["status"] == ("problem" if old else "ok")
    assert not old or ("R580" in only(found, "driver")["fix"] and "CUDA 12.4" in only(found, "driver")["detail"])


def test_a_gpu_that_torch_cannot_use(run, monkeypatch) -> None:
    monkeypatch.setattr(driver, "cuda_version", lambda: 13000)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert only(checks(run, 0), "device")["fix"] == "install a CUDA build of torch"


def test_nvcc_is_found_without_tilelang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert doctor.find_nvcc() == str(nvcc)


@pytest.mark.parametrize(
    ("release", "status"), [("13.0", "ok"), ("12.4", "warning"), ("14.0", "warning"), ("unknown", "warning")]
)
def test_the_version_of_nvcc(run, monkeypatch, release: str, status: str) -> None:
    from kda_tl.compiler import toolchain

    monkeypatch.setattr(doctor, "find_nvcc", lambda: "/opt/nvcc")
    monkeypatch.setattr(toolchain, "version_line", lambda path: f"Build cuda_{release}")
    check = only(checks(run), "nvcc")
    assert check["status"] == status and release in check["detail"]


def test_the_driver_that_is_needed_is_the_archs() -> None:
    assert {row.min_driver for row in ARCHS.values() if not row.is_cpu} == {580}


def test_every_variable_that_something_reads_is_known() -> None:
    root = Path(doctor.__file__).resolve().parents[1]
    used = {name for path in root.rglob("*.py") for name in re.findall(r"\bKDA_TL_[A-Z_]*[A-Z]\b", path.read_text())}
    assert used <= set(doctor.KNOWN_VARIABLES)
    assert set(doctor.KNOWN_VARIABLES) <= set(re.findall(r"`(KDA_TL_[A-Z_]*)` \|", (root.parent / "README.md").read_text()))
