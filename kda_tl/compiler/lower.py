"""One tile program to one artifact: lowering, native compile, and the facts that the loader and the reader of reports need.

Nothing here touches a GPU; the machine that builds needs TileLang, and nvcc for the CUDA archs or a C++ compiler for the cpu.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_tl.compiler.canonical import distinct_shared_buffers
from kda_tl.compiler.errors import BuildError, ToolchainError
from kda_tl.compiler.resources import check_shared_memory, parse_ptxas
from kda_tl.compiler.toolchain import cxx_compiler, nvcc_compiler
from kda_tl.specs.archs import Arch

__all__ = ["RECIPE", "TENSORMAP_HOOK", "Compiled", "lower_program", "program_text"]

TENSORMAP_HOOK = "kda_tl.tensormap_create_tiled"
"""The name under which our own helper (native/tensormap.cc) offers what libtilelang.so calls __tvm_tensormap_create_tiled."""

PASS_CONFIGS: dict[str, Any] = {
    # Every access of our programs is in range by construction; TileLang's own guards would test each of them again.
    "tl.disable_safe_memory_legalize": True,
}
SOURCE_PATH = ("-Xcicc", "--orig_src_path_name", "-Xcicc", "/kda_tl/kernel.cu")
NVCC_FLAGS = ("-O3", "-std=c++20", "-w", "-ftz=true", "-Xptxas=-v", *SOURCE_PATH)
"""-ftz: exp2f is one instruction then, and decays under 2^-126 may as well be 0. No -lineinfo: it is not reproducible.
SOURCE_PATH: internal symbols are named by a hash of the source's path; this one stands for any folder that a process
compiles in, so that bytes do not depend on it and no two compilers wait for each other."""
CXX_FLAGS = ("-O3", "-std=c++17", "-w", "-ffp-contract=off", "-shared", "-fPIC")
"""-ffp-contract=off: the same rounding wherever a library is built."""
LAUNCHER_FLAGS = ("-O2",)
"""Of the host part of a CUDA artifact, which checks tensors and makes TMA descriptors at each call: 0.2 to 0.3 microseconds
faster than without, for 0.15 seconds of the compiler."""

CPU_PASS_CONFIGS: dict[str, Any] = {**PASS_CONFIGS, "tirx.disable_vectorize": True}

RECIPE: dict[str, Any] = {
    "nvcc": NVCC_FLAGS,
    "cxx": CXX_FLAGS,
    "launcher": LAUNCHER_FLAGS,
    "cuda_passes": PASS_CONFIGS,
    "cpu_passes": CPU_PASS_CONFIGS,
    "distinct_shared_buffers": True,
}
"""What shapes an artifact besides its program and the compilers' versions: a part of its hash."""


@dataclass(frozen=True)
class Compiled:
    """The files of an artifact and its metadata."""

    files: dict[str, bytes]
    meta: dict[str, Any]


def program_text(program: Any) -> str:
    """The program as text, for the artifact's hash. Compiling edits a program: take this before."""
    return str(program.script(show_meta=True))


def lower_program(program: Any, arch: Arch, spec_key: str) -> Compiled:
    """Compiles `program` for `arch`. Raises BuildError naming spec, arch and the tool's own message."""
    logging.getLogger("tilelang").setLevel(logging.WARNING)
    try:
        compiled = _lower_cpu(program) if arch.is_cpu else _lower_cuda(program, arch)
    except ToolchainError:
        raise
    except Exception as error:
        # TVM's errors do not survive pickling between worker processes: only their text goes on.
        raise BuildError(f"{spec_key} for {arch.name}: {error}") from None
    # Plain values alone: what TVM calls an integer or a string travels between processes only where TVM is loaded.
    return Compiled(compiled.files, json.loads(json.dumps(compiled.meta)))


def _parameters(program: Any) -> list[dict[str, Any]]:
    """Name, dtype, and for tensors shape and strides as texts (numbers or the names of run-time sizes), in call order."""
    parameters = []
    for variable in program.params:
        if variable in program.buffer_map:
            buffer = program.buffer_map[variable]
            parameters.append(
                {
                    "name": str(buffer.name),
                    "dtype": str(buffer.dtype),
                    "shape": [str(size) for size in buffer.shape],
                    "strides": [str(stride) for stride in buffer.strides],
                }
            )
        else:
            parameters.append({"name": str(variable.name), "dtype": str(variable.dtype)})
    return parameters


def _own_pass_configs(program: Any) -> dict[str, Any]:
    """What the program asks for with T.annotate_pass_configs; JITKernel itself does not look."""
    own = (program.attrs or {}).get("tilelang_pass_configs", {})
    return {str(key): bool(value) for key, value in dict(own).items()}


# -- CUDA ----------------------------------------------------------------------------------------------------------------


def _lower_cuda(program: Any, arch: Arch) -> Compiled:
    import tvm_ffi
    from tilelang.engine.callback import register_c_postproc
    from tilelang.jit.kernel import JITKernel  # not tilelang.compile: its cache drops the module that is exported here

    report: list[dict[str, int]] = []

    def compile_device_code(code: str, target: Any, pass_config: Any = None) -> bytearray:
        image, ptxas = _nvcc(str(code), arch)
        report.extend(parse_ptxas(ptxas))
        return bytearray(image)

    tvm_ffi.register_global_func("tilelang_callback_cuda_compile", f=compile_device_code, override=True)
    # Registering TVM's own hook a second time would abort a process that also loads TileLang, so ours has its own name.
    register_c_postproc(lambda code, target: str(code).replace('"__tvm_tensormap_create_tiled"', f'"{TENSORMAP_HOOK}"'))

    parameters = _parameters(program)
    with distinct_shared_buffers():
        kernel = JITKernel(
            program,
            out_idx=None,
            target={"kind": "cuda", "arch": arch.compiler_arch},
            target_host="c",
            execution_backend="tvm_ffi",
            pass_configs={**_own_pass_configs(program), **PASS_CONFIGS},
        )
    launches = []
    for name, function in kernel.artifact.device_mod.functions.items():
        shared = int(function.attrs.get("dyn_shared_memory_buf", 0) or 0)
        check_shared_memory(str(name.name_hint), shared, arch)
        extents = {str(tag): str(extent) for tag, extent in function.attrs["thread_extent"].items()}
        launches.append({"name": str(name.name_hint), "shared_memory": shared, "extents": extents})
    with tempfile.TemporaryDirectory(prefix="kda-tl-") as folder:
        library = Path(folder) / "lib.so"
        kernel.artifact.rt_mod.export_library(str(library), options=list(LAUNCHER_FLAGS))  # JITKernel's own passes no options
        files = {"lib.so": library.read_bytes(), "kernel.cu": kernel.get_kernel_source().encode()}
    meta = {
        "abi": "tvm_ffi",
        "entry": str(program.attrs["global_symbol"]),
        "parameters": parameters,
        "launches": launches,
        "resources": report,
        "min_driver": arch.min_driver,
        "uses_tensormap": TENSORMAP_HOOK.encode() in files["lib.so"],
    }
    return Compiled(files, meta)


def _nvcc(code: str, arch: Arch) -> tuple[bytes, str]:
    """The cubin (exact archs) or fat binary with PTX, and what ptxas said."""
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    number = arch.compiler_arch.removeprefix("sm_")
    kind, codes = ("cubin", f"sm_{number}") if arch.exact else ("fatbin", f"[sm_{number},compute_{number}]")
    generate = ["-gencode", f"arch=compute_{number},code={codes}"]
    includes = [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
    command = [nvcc_compiler(), f"--{kind}", *NVCC_FLAGS, *generate, *includes, "-o", "kernel.bin", "kernel.cu"]
    with tempfile.TemporaryDirectory(prefix="kda-tl-") as name:
        folder = Path(name)
        (folder / "kernel.cu").write_text(code)
        report = _run(command, folder, "nvcc")
        return (folder / "kernel.bin").read_bytes(), report


def _run(command: list[str], folder: Path, tool: str) -> str:
    """What the compiler said on stderr. It runs in `folder`, and its temporary files go there."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.splitlines()
        errors = [line for line in lines if "error" in line.lower()] or (result.stdout.splitlines() + lines)[-5:]
        raise BuildError(f"{tool} failed with status {result.returncode}: " + "\n".join(errors[:10]))
    return result.stderr


# -- CPU -----------------------------------------------------------------------------------------------------------------


def _lower_cpu(program: Any) -> Compiled:
    from tilelang import tvm
    from tilelang.engine.lower import lower

    parameters = _parameters(program)
    target = tvm.target.Target("c")
    # The "cython" back end of JITKernel cannot pass run-time strides, so the source is taken here and compiled below.
    with tvm.transform.PassContext(opt_level=3, config=CPU_PASS_CONFIGS), target:
        source = str(lower(program, target=target).kernel_source)
    entry, c_arguments = _c_signature(source)
    library = _compile_c(source, cxx_compiler())
    meta = {"abi": "c", "entry": entry, "parameters": parameters, "c_arguments": c_arguments}
    return Compiled({"lib.so": library, "kernel.c": source.encode()}, meta)


def _c_signature(source: str) -> tuple[str, list[dict[str, str]]]:
    """The generated function and its arguments, in an order that is not the program's: buffers, sizes, strides, scalars."""
    match = re.search(r"^int32_t (\w+)\(([^)]*)\);", source, re.MULTILINE)
    if match is None:
        raise BuildError("TileLang's C target gave no function that could be called")
    arguments = []
    for argument in match[2].split(","):
        kind, name = argument.strip().rsplit(maxsplit=1)
        arguments.append({"name": name, "type": kind})
    return match[1], arguments


def _compile_c(source: str, compiler: str) -> bytes:
    from tilelang.env import TILELANG_TEMPLATE_PATH

    with tempfile.TemporaryDirectory(prefix="kda-tl-") as name:
        folder = Path(name)
        (folder / "kernel.cc").write_text(source)
        command = [compiler, *CXX_FLAGS, f"-I{TILELANG_TEMPLATE_PATH}", "-o", "lib.so", "kernel.cc"]
        _run(command, folder, compiler)
        return (folder / "lib.so").read_bytes()
