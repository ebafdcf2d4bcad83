"""The native libraries that every CUDA artifact needs beside itself, collected into the registry.

A machine that only calls has apache-tvm-ffi but no TileLang. So TVM's small runtime and its driver stubs are taken from
TileLang's wheel, and our own helpers are compiled beside them; with these a registry is complete.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

from kda_tl.compiler.errors import BuildError
from kda_tl.compiler.toolchain import cxx_compiler, require_tilelang, version_line
from kda_tl.registry import Registry

__all__ = ["NOTICES", "compile_helper", "notice", "put_support"]

RUNTIME_LIBRARIES = (
    "libtvm_runtime.so",
    "libstub_cuda.so",
    "libstub_cudart.so",
    "libstub_hip.so",
    "libstub_ascendcl.so",
    "libstub_nvrtc.so",
)
HELPER_SOURCES = tuple(Path(__file__).parent / "native" / name for name in ("tensormap.cc", "launches.cc"))
HELPER_LIBRARY = "libkda_tl_native.so"
HELPER_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC")
NOTICES = ("NOTICE", "LICENSE")
"""Files that lie beside the libraries, since these are other people's and travel with the registry."""


def put_support(registry: Registry) -> str:
    """Stores the support libraries and returns their id, the hash of what they are made from.

    Nothing is compiled or written where the registry has them.
    """
    import tilelang

    version = require_tilelang()
    folder = Path(tilelang.__file__).parent / "lib"
    files: dict[str, Path] = {}
    for name in RUNTIME_LIBRARIES:
        if not (folder / name).is_file():
            raise BuildError(f"TileLang's wheel has no {name}: reinstall tilelang=={version}")
        files[name] = folder / name
    files |= {name: notice(name) for name in NOTICES}
    meta = {
        "kind": "support",
        "tilelang": version,
        "tvm_ffi": metadata.version("apache-tvm-ffi"),
        "cxx": version_line(cxx_compiler()),
        "runtime": "libtvm_runtime.so",
        "helper": HELPER_LIBRARY,
    }
    made_from = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    made_from |= {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in HELPER_SOURCES}
    identity = hashlib.sha256(json.dumps([made_from, HELPER_FLAGS, meta], sort_keys=True).encode()).hexdigest()[:32]
    if not registry.has("support", identity):
        registry.put("support", identity, {**files, HELPER_LIBRARY: compile_helper()}, meta)
    return identity


def notice(name: str) -> Path:
    """NOTICE or LICENSE: at the root of a checkout, or the copy that travels in the wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent, package / "_notices"):
        if (folder / name).is_file() and (folder != package.parent or (folder / "pyproject.toml").is_file()):
            return folder / name
    raise BuildError(f"{name} is neither at the root of the checkout nor in {package / '_notices'}: reinstall kda-tl")


def compile_helper() -> bytes:
    """The library of our own native functions. Raises BuildError where the compiler fails."""
    from tvm_ffi import libinfo

    with tempfile.TemporaryDirectory(prefix="kda-tl-") as folder:
        output = Path(folder) / HELPER_LIBRARY
        includes = [f"-I{path}" for path in libinfo.include_paths()]
        # No rpath: the process has loaded libtvm_ffi.so before this library, and its soname is enough.
        command = [cxx_compiler(), *HELPER_FLAGS, "-o", str(output), *map(str, HELPER_SOURCES), *includes,
                   f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi", "-ldl"]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BuildError(f"the native helper did not compile: {result.stderr.strip()[-800:]}")
        return output.read_bytes()
