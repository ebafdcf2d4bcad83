"""kda-tl doctor: what this machine can do with the package, what stands in the way, and the command that helps."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click
import torch

from kda_tl import __version__
from kda_tl.cli.shared import build_command, json_option, registries, size
from kda_tl.ops.plan import counted
from kda_tl.registry import Registry, RegistryError, default_root, install_command, named_roots
from kda_tl.runtime import dispatcher, driver, environment
from kda_tl.runtime.errors import UnsupportedDevice
from kda_tl.specs import schedules
from kda_tl.specs.archs import ARCHS
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.kernels import KernelSpec
from kda_tl.specs.schedule_file import ScheduleFileError, read_schedule_file

__all__ = ["Check", "doctor", "examine"]

PYTHONS = ((3, 10), (3, 13))
TVM_FFI = ((0, 1, 11), (0, 1, 13))  # from, below: what libtvm_runtime.so of TileLang 0.1.15 links against
KNOWN_VARIABLES = (*environment.VARIABLES, "KDA_TL_VENV", "KDA_TL_TORCH")
OTHER_VARIABLES = ("XDG_CACHE_HOME", "CXX", "CUDA_HOME", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Check:
    """One line. status: "ok"; "warning": something is slower, or only some use needs it; "problem": calls or builds will fail.

    fix: the command or the change that helps; empty where nothing has to be done.
    """

    subject: str
    status: str
    detail: str
    fix: str = ""


EPILOG = """\b
Examples:
  kda-tl doctor
  kda-tl doctor --json

Exits 1 where a line is a problem, else 0: warnings concern only some uses.
"""


@click.command(epilog=EPILOG, short_help="Check what is here, missing or in the way.")
@json_option("A JSON array of objects: subject, status (ok, warning, problem), detail, fix.")
def doctor(as_json: bool) -> None:
    """Check what kernels need here: to be built, to be found and to run.

    Looks at Python and its packages, compilers, the NVIDIA driver, devices and which arch serves each, the registries on the
    search path, the schedules of what is built, environment variables, and packages that clash. Changes nothing.
    """
    checks = list(examine())
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.subject) for check in checks)
        for check in checks:
            click.echo(f"{check.status:<8} {check.subject:<{width}}  {check.detail}")
            if check.fix:
                click.echo(f"{'':<8} {'':<{width}}  -> {check.fix}")
        problems, warnings = (sum(check.status == status for check in checks) for status in ("problem", "warning"))
        click.echo(f"\n{counted(problems, 'problem')}, {counted(warnings, 'warning')}")
    if any(check.status == "problem" for check in checks):
        raise click.exceptions.Exit(1)


def examine() -> Iterator[Check]:
    """Every check, in the order in which they are printed."""
    yield from _python()
    yield from _packages()
    yield from _compilers()
    yield from _devices()
    yield from _registries()
    yield from _schedules()
    yield from _variables()


def _python() -> Iterator[Check]:
    yield Check("kda-tl", "ok", f"{__version__} in {Path(__file__).resolve().parents[1]}")
    version, name = sys.version_info[:2], platform.python_version()
    if PYTHONS[0] <= version <= PYTHONS[1]:
        yield Check("python", "ok", f"{name}, {sys.executable}")
    else:
        yield Check("python", "warning", f"{name}; tested with 3.10 to 3.13", "use one of these in a virtual environment")
    if platform.system() != "Linux":
        yield Check("system", "problem", f"{platform.system()}: artifacts are Linux libraries", "use a Linux machine")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Check]:
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Check("torch", "ok", f"{torch.__version__} ({kind})")
    ffi = _version("apache-tvm-ffi")
    command = "pip install 'apache-tvm-ffi>=0.1.11,<0.1.13'"
    if ffi is None:
        yield Check("apache-tvm-ffi", "problem", "not installed: GPU kernels are called through it", command)
    elif not TVM_FFI[0] <= _numbers(ffi) < TVM_FFI[1]:
        yield Check("apache-tvm-ffi", "problem", f"{ffi}, and the TVM runtime of the kernels needs 0.1.11 or 0.1.12", command)
    else:
        yield Check("apache-tvm-ffi", "ok", ffi)
    if tvm := _version("apache-tvm"):
        detail = f"{tvm} is installed: beside GPU kernels it aborts the process (apache-tvm-ffi is something else and stays)"
        yield Check("apache-tvm", "problem", detail, "pip uninstall apache-tvm")
    yield from _tilelang()


def _tilelang() -> Iterator[Check]:
    from kda_tl.compiler.toolchain import TILELANG_VERSION

    found = _version("tilelang")
    if found is None:
        yield Check("tilelang", "warning", "not installed: calling needs none, building does", install_command("build"))
    elif found.split("+")[0] != TILELANG_VERSION:
        detail = f"{found}: calling works beside it, building needs {TILELANG_VERSION}"
        yield Check("tilelang", "warning", detail, f"pip install tilelang=={TILELANG_VERSION}")
    else:
        yield Check("tilelang", "ok", found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _compilers() -> Iterator[Check]:
    from kda_tl.compiler.errors import ToolchainError
    from kda_tl.compiler.toolchain import NVCC_MAJOR, cxx_compiler, version_line

    try:
        path = cxx_compiler()
        yield Check("C++ compiler", "ok", f"{path}: {version_line(path)}")
    except (ToolchainError, OSError) as error:
        fix = "unset CXX" if os.environ.get("CXX") else "apt-get install g++, or dnf install gcc-c++"
        yield Check("C++ compiler", "warning", f"{error}", fix)
    nvcc = find_nvcc()
    fix = f"install a CUDA 13 toolkit, or {install_command('build,nvcc')}"
    if nvcc is None:
        yield Check("nvcc", "warning", "not found: GPU kernels cannot be built here; the cpu's can", fix)
        return
    try:
        line = version_line(nvcc)
    except Exception as error:
        yield Check("nvcc", "warning", f"{nvcc} does not run: {error}", fix)
        return
    release = re.search(r"\d+\.\d+", line)
    if release is None or int(release[0].split(".")[0]) != NVCC_MAJOR:
        yield Check("nvcc", "warning", f"{nvcc}: {line}; a build takes nvcc {NVCC_MAJOR} alone", fix)
    else:
        yield Check("nvcc", "ok", f"{nvcc}: {line}")


def find_nvcc() -> str | None:
    """Where TileLang would find nvcc, without importing it: $CUDA_HOME, PATH, NVIDIA's wheels, /usr/local/cuda."""
    folders = [Path(value) for name in ("CUDA_HOME", "CUDA_PATH") if (value := os.environ.get(name))]
    if on_path := shutil.which("nvcc"):
        folders.append(Path(on_path).parents[1])
    wheel = importlib.util.find_spec("nvidia")
    for root in (wheel.submodule_search_locations or []) if wheel else []:
        folders += [Path(root) / "cu13", Path(root) / "cuda_nvcc"]
    folders.append(Path("/usr/local/cuda"))
    return next((str(path) for folder in folders if (path := folder / "bin" / "nvcc").is_file()), None)


def _devices() -> Iterator[Check]:
    needed = max(row.min_driver or 0 for row in ARCHS.values())
    cuda = driver.cuda_version()
    if cuda is None:
        yield Check("driver", "warning", "no NVIDIA driver: kernels run on the cpu, for checking", "")
    else:
        detail = f"supports CUDA {cuda // 1000}.{cuda % 1000 // 10}"
        detail += f", kernel module {version}" if (version := driver.driver_version()) else ""
        reason = driver.too_old(needed)
        fix = f"install an NVIDIA driver of the R{needed} series or newer, or NVIDIA's cuda-compat package"
        yield Check("driver", "problem" if reason else "ok", reason or detail, fix if reason else "")
    if cuda is not None and not torch.version.cuda:
        yield Check("device", "warning", "torch is a CPU build and sees no GPU", "install a CUDA build of torch")
        return
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield _device(index)
    yield _coverage("cpu", "device cpu", "for checking")


def _device(index: int) -> Check:
    properties = torch.cuda.get_device_properties(index)
    subject = f"device cuda:{index}"
    about = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    try:
        arch = dispatcher.device_arch(torch.device("cuda", index))
    except (UnsupportedDevice, ValueError) as error:
        return Check(subject, "problem", f"{about}: {error}", "use another device, or unset KDA_TL_ARCH")
    if unknown := dispatcher.provisional(index):
        about += f", a {unknown}"
    row = ARCHS[arch]
    ptx = row.capability is not None and row.capability[0] != properties.major
    return _coverage(arch, subject, about + (", through PTX: right, not tuned" if ptx else ""))


def _coverage(arch: str, subject: str, about: str) -> Check:
    """Whether the registries hold the default set of a device's arch."""
    specs = default_specs(arch)
    try:
        found = sum(dispatcher.choose(spec, arch).path is not None for spec in specs)
    except RegistryError as error:
        fix = "mend that registry, or name another with KDA_TL_REGISTRY"
        return Check(subject, "problem", f"{about}; served by {arch}: {error}", fix)
    detail = f"{about}; served by {arch}, {found} of {len(specs)} kernels built"
    whole = found == len(specs)
    return Check(subject, "ok" if whole else "warning", detail, "" if whole else f"kda-tl build --arch {arch}")


def _registries() -> Iterator[Check]:
    for registry in registries(None):
        yield _registry(registry)
    try:
        yield Check("builds go to", "ok", str(default_root()))
    except RegistryError as error:
        yield Check("builds go to", "warning", str(error), "export KDA_TL_REGISTRY=/a/folder/of/yours")


def _registry(registry: Registry) -> Check:
    try:
        return _found_in(registry)
    except (RegistryError, OSError) as error:
        fix = "make it readable, or restore or remove it and run kda-tl build --arch ARCH"
        return Check("registry", "problem", f"{registry.root}: {error}", fix)


def _found_in(registry: Registry) -> Check:
    """Raises RegistryError or OSError for what cannot be read."""
    root, subject = registry.root, "registry"
    if not root.is_dir():
        named = root in named_roots()
        in_the_way = next((path for path in (root, *root.parents) if path.exists()), root)
        why = "not there" if in_the_way.is_dir() else f"{in_the_way} is a file"
        if not named:
            return Check(subject, "ok", f"{root}: {why}")
        fix = build_command(None, root) if in_the_way.is_dir() else "name another folder with KDA_TL_REGISTRY"
        return Check(subject, "warning", f"{root}: {why}, though KDA_TL_REGISTRY names it", fix)
    counts = {arch: len(registry.entries(arch)) for arch in registry.archs()}
    gone = [entry for arch in counts for entry in registry.entries(arch) if not entry.path.is_dir()]
    files = (file for kind in ("artifacts", "support", "quarantine") for file in (root / kind).rglob("*"))
    stored = sum(file.stat().st_size for file in files if file.is_file())
    listed = ", ".join(f"{arch} {count}" for arch, count in counts.items()) or "empty"
    access = "writable" if os.access(root, os.W_OK | os.X_OK) else "read-only"
    detail = f"{root}: {listed}; {size(stored)}, {access}"
    if gone:
        archs = " ".join(f"--arch {arch}" for arch in dict.fromkeys(entry.arch for entry in gone))
        command = f"kda-tl build {archs} --registry {shlex.quote(str(root))}"
        return Check(subject, "problem", f"{detail}; {len(gone)} listed, but gone", command)
    if (root / "quarantine").is_dir() and any((root / "quarantine").iterdir()):
        remove = f"rm -r {shlex.quote(str(root / 'quarantine'))}"
        return Check(subject, "warning", f"{detail}; quarantine/ holds damaged ones", remove)
    return Check(subject, "ok", detail)


def _schedules() -> Iterator[Check]:
    """Of every arch that is built, or that a device here has."""
    needed = {"cpu"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        with suppress(UnsupportedDevice, ValueError):  # told with the device
            needed.add(dispatcher.device_arch(torch.device("cuda", index)))
    for registry in registries(None):
        with suppress(RegistryError):  # told with the registry
            needed |= set(registry.archs())
    for arch in ARCHS:
        if arch in needed:
            yield _schedule_file(arch)


def _schedule_file(arch: str) -> Check:
    subject, path = f"schedules {arch}", schedules.schedules_folder() / f"{arch}.json"
    anew = f"kda-tl autotune --arch {arch}"
    if not path.exists():
        detail = f"{path}: not there, so that every kernel has its default schedule"
        return Check(subject, "warning", detail, f"restore it, or {anew}")
    try:
        found, problems = read_schedule_file(path, arch)
    except ScheduleFileError as error:  # autotune overwrites none that it cannot read
        return Check(subject, "warning", str(error), f"restore it, or rm {shlex.quote(str(path))} && {anew}")
    if problems:
        detail = f"{path}: entries that are not used: {len(problems)}, the first {problems[0].removeprefix(f'{path}: ')}"
        return Check(subject, "warning", detail, f"correct or remove what is named, or {anew}")
    counts = Counter(one.source for classes in found.values() for one in classes)
    detail = f"{path}: {counted(len(found), 'kernel')}, schedules: "
    detail += ", ".join(f"{counts[name]} {name}" for name in sorted(counts)) or "none"
    built = [spec for spec in default_specs(arch) if _is_built(spec, arch)]
    stale = sum(_built_schedules(spec, arch) != _wanted_schedules(spec, arch) for spec in built)
    if stale:
        detail += f"; {stale} of {len(built)} that are built have others"
        return Check(subject, "warning", detail, f"kda-tl build --arch {arch}")
    return Check(subject, "ok", detail + (f"; all {len(built)} that are built have theirs" if built else ""))


Sizes = list[tuple[int | None, dict[str, object]]]  # by size class: the largest size, the schedule


def _wanted_schedules(spec: KernelSpec, arch: str) -> Sizes:
    return [(one.up_to, one.schedule.as_dict()) for one in schedules.schedule_classes(spec, arch)]


def _is_built(spec: KernelSpec, arch: str) -> bool:
    try:
        return dispatcher.choose(spec, arch).path is not None
    except RegistryError:  # told with the registry
        return False


def _built_schedules(spec: KernelSpec, arch: str) -> Sizes | None:
    """As the metadata say, read without what a look by the registry does to a damaged artifact; None where they cannot be."""
    try:
        metas = [(one.up_to, json.loads((one.path / "meta.json").read_text())) for one in dispatcher.choose(spec, arch).classes]
        return [(up_to, dict(meta["schedule"])) for up_to, meta in metas]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _variables() -> Iterator[Check]:
    for name in sorted(os.environ):
        if name in KNOWN_VARIABLES or name in OTHER_VARIABLES:
            yield _variable(name, os.environ[name])
        elif name.upper().replace("_", "").startswith("KDATL"):
            meant = _meant(name)
            fix = f"unset {name}" + (f", and set {meant}" if meant is not None and meant not in os.environ else "")
            yield Check(name, "warning", f"{os.environ[name]!r}, and nothing reads it", fix)


def _meant(name: str) -> str | None:
    """The variable that a name nobody reads was to be; None where none is close. What all names begin with tells nothing."""

    def told(name: str) -> str:
        return name.upper().replace("_", "").removeprefix("KDATL")

    close = difflib.get_close_matches(told(name), map(told, KNOWN_VARIABLES), 1, cutoff=0.75)
    return next((known for known in KNOWN_VARIABLES if [told(known)] == close), None)


def _variable(name: str, value: str) -> Check:
    gpus = [arch for arch, row in ARCHS.items() if not row.is_cpu]
    if name == "KDA_TL_ARCH" and value and value not in gpus:
        return Check(name, "problem", f"{value!r} is not one of {', '.join(gpus)}", "unset KDA_TL_ARCH")
    try:
        if name == "KDA_TL_ON_MISS":
            environment.on_miss()
        elif name == "KDA_TL_NVTX":
            environment.nvtx()
        elif name == "KDA_TL_CHECK":
            environment.values_checked()
    except ValueError as error:
        return Check(name, "problem", str(error), f"unset {name}")
    return Check(name, "ok", repr(value))
