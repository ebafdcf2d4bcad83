"""The compilers that a build calls, and their versions: part of every artifact's hash."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from importlib import metadata

from kda_tl.compiler.errors import ToolchainError

__all__ = ["TILELANG_VERSION", "cxx_compiler", "nvcc_compiler", "require_tilelang", "version_line"]

TILELANG_VERSION = "0.1.15"
"""The one version whose output is tested; another one lowers the same program to another kernel."""


def require_tilelang() -> str:
    """The installed TileLang's version. Raises ToolchainError where it is absent, another version, or beside apache-tvm."""
    try:
        version = metadata.version("tilelang")
    except metadata.PackageNotFoundError:
        raise ToolchainError("building needs TileLang: pip install 'kda-tl[build]'") from None
    if version.split("+")[0] != TILELANG_VERSION:
        raise ToolchainError(
            f"building needs tilelang {TILELANG_VERSION}, found {version}: pip install tilelang=={TILELANG_VERSION}"
        )
    return version


def nvcc_compiler() -> str:
    """Path of nvcc, as TileLang finds it (CUDA_HOME, PATH, the nvidia-cuda-nvcc package)."""
    from tilelang.env import CUDA_HOME

    path = os.path.join(CUDA_HOME, "bin", "nvcc") if CUDA_HOME else None
    path = path if path and os.path.exists(path) else shutil.which("nvcc")
    if path is None:
        raise ToolchainError(
            "a GPU arch needs nvcc 13: install the CUDA toolkit or pip install 'kda-tl[nvcc]'; --arch cpu needs none"
        )
    return path


def cxx_compiler() -> str:
    """Path of the C++ compiler: $CXX, else g++, c++ or clang++."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise ToolchainError("building needs a C++ compiler: install g++ or clang++, or set CXX")


@functools.cache
def version_line(compiler: str) -> str:
    """The line of `COMPILER --version` that holds the version."""
    lines = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.strip().splitlines()
    return lines[-1] if "nvcc" in os.path.basename(compiler) else lines[0]
