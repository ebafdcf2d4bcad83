"""The compilers that a build calls, and their versions: part of every artifact's hash."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from importlib import metadata

from kda_tl.compiler.errors import ToolchainError
from kda_tl.registry import install_command

__all__ = ["NVCC_MAJOR", "TILELANG_VERSION", "cxx_compiler", "nvcc_compiler", "require_tilelang", "version_line"]

TILELANG_VERSION = "0.1.15"
"""The one version whose output is tested; another one lowers the same program to another kernel."""
NVCC_MAJOR = 13
"""What the drivers that artifacts ask for, and the targets of specs.archs, go with."""


def require_tilelang() -> str:
    """The installed TileLang's version. Raises ToolchainError where it is absent, another version, or beside apache-tvm."""
    version = _installed("tilelang")
    if version is None:
        raise ToolchainError(f"building needs TileLang: {install_command('build')}")
    if version.split("+")[0] != TILELANG_VERSION:
        raise ToolchainError(
            f"building needs tilelang {TILELANG_VERSION}, found {version}: pip install tilelang=={TILELANG_VERSION}"
        )
    if (other := _installed("apache-tvm")) is not None:
        raise ToolchainError(
            f"the package apache-tvm {other} is installed: TileLang brings a TVM of its own, and a process that loads both is "
            "aborted. Run `pip uninstall apache-tvm` (apache-tvm-ffi stays)"
        )
    return version


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def nvcc_compiler() -> str:
    """Path of nvcc 13, as TileLang finds it (CUDA_HOME, PATH, the nvidia-cuda-nvcc package).

    Raises:
        ToolchainError: there is none, or it is of another major version.
    """
    from tilelang.env import CUDA_HOME

    path = os.path.join(CUDA_HOME, "bin", "nvcc") if CUDA_HOME else None
    path = path if path and os.path.exists(path) else shutil.which("nvcc")
    get = f"install the CUDA toolkit, or {install_command('build,nvcc')}"
    if path is None:
        raise ToolchainError(f"a GPU arch needs nvcc {NVCC_MAJOR}: {get}; --arch cpu needs none")
    found = _nvcc_release(path)
    if found is None or int(found.split(".")[0]) != NVCC_MAJOR:
        raise ToolchainError(
            f"a GPU arch needs nvcc {NVCC_MAJOR}, found {found or 'no version'} at {path}: {get}, and name it with CUDA_HOME"
        )
    return path


@functools.cache
def _nvcc_release(path: str) -> str | None:
    """13.0 of `Cuda compilation tools, release 13.0, V13.0.88`; None where it does not say."""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def cxx_compiler() -> str:
    """Path of the C++ compiler: $CXX, else g++, c++ or clang++.

    Raises:
        ToolchainError: there is none, or CXX names none.
    """
    if named := os.environ.get("CXX"):
        if path := shutil.which(named):
            return path
        raise ToolchainError(f"CXX must be the name or path of a C++ compiler, without options, got {named!r}")
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return path
    raise ToolchainError("building needs a C++ compiler: install g++ or clang++, or set CXX")


@functools.cache
def version_line(compiler: str) -> str:
    """The line of `COMPILER --version` that holds the version."""
    lines = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.strip().splitlines()
    return lines[-1] if "nvcc" in os.path.basename(compiler) else lines[0]
