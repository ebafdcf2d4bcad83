"""The native libraries that every CUDA artifact needs beside itself, collected into the registry.

A machine that only calls has apache-tvm-ffi but no TileLang. So TVM's small runtime and its driver stubs are taken from
TileLang's wheel, and our own TMA helper is compiled beside them; with these a registry is complete.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

from kda_tl.compiler.errors import BuildError
from kda_tl.compiler.toolchain import cxx_compiler, require_tilelang, version_line
from kda_tl.registry import Registry

__all__ = ["put_support"]

RUNTIME_LIBRARIES = (
    "libtvm_runtime.so",
    "libstub_cuda.so",
    "libstub_cudart.so",
    "libstub_hip.so",
    "libstub_ascendcl.so",
    "libstub_nvrtc.so",
)
HELPER_SOURCE = Path(__file__).parent / "native" / "tensormap.cc"
HELPER_LIBRARY = "libkda_tl_native.so"


def put_support(registry: Registry) -> str:
    """Stores the support libraries and returns their id."""
    import tilelang

    folder = Path(tilelang.__file__).parent / "lib"
    files: dict[str, bytes | Path] = {}
    for name in RUNTIME_LIBRARIES:
        if not (folder / name).is_file():
            raise BuildError(f"TileLang's wheel has no {name}: reinstall tilelang=={require_tilelang()}")
        files[name] = folder / name
    files[HELPER_LIBRARY] = _compile_helper()
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + hashlib.sha256(content if isinstance(content, bytes) else content.read_bytes()).digest())
    identity = digest.hexdigest()[:32]
    meta = {
        "kind": "support",
        "tilelang": require_tilelang(),
        "tvm_ffi": metadata.version("apache-tvm-ffi"),
        "cxx": version_line(cxx_compiler()),
        "runtime": "libtvm_runtime.so",
        "helper": HELPER_LIBRARY,
    }
    registry.put("support", identity, files, meta)
    return identity


def _compile_helper() -> bytes:
    from tvm_ffi import libinfo

    with tempfile.TemporaryDirectory(prefix="kda-tl-") as folder:
        output = Path(folder) / HELPER_LIBRARY
        includes = [f"-I{path}" for path in libinfo.include_paths()]
        # No rpath: the process has loaded libtvm_ffi.so before this library, and its soname is enough.
        command = [cxx_compiler(), "-O2", "-std=c++17", "-shared", "-fPIC", "-o", str(output), str(HELPER_SOURCE), *includes,
                   f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi", "-ldl"]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BuildError(f"the native helper did not compile: {result.stderr.strip()[-800:]}")
        return output.read_bytes()
