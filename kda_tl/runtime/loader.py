"""Artifact to callable. Needs torch and apache-tvm-ffi; never TileLang.

Two ABIs: CUDA libraries are TVM-FFI modules, which take tensors and check them; cpu libraries are plain C functions, whose
sizes and strides are read off the tensors here, by the artifact's own description of its parameters.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch  # before any TVM-FFI call: the driver stub looks libcudart up once, and remembers a failure

from kda_tl.registry import ARTIFACT_FORMAT, Registry, RegistryError
from kda_tl.runtime.errors import EnvironmentConflict
from kda_tl.specs.archs import arch as arch_row

__all__ = ["KernelFunction", "has_support", "is_whole", "load", "load_artifact", "loaded_from"]

KernelFunction = Callable[..., Any]

_lock = threading.Lock()
_loaded: dict[str, KernelFunction] = {}
_prepared = False
# A fork copies a lock as it is, held or not, and none of the threads that could let it go.
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))


def load(registry: Registry, path: Path, arch: str, spec_key: str) -> KernelFunction:
    """The callable of the artifact in `path`: positional arguments in program order, tensors and Python numbers.

    Verified by hash before its first use in a process, then kept.

    Raises:
        DamagedArtifact: the files are not what was built; they have been moved to quarantine.
        RegistryError: it is the artifact of another spec or arch, or of another format.
        EnvironmentConflict: the package apache-tvm is installed beside a CUDA artifact.
    """
    key = str(path)
    with _lock:
        if key not in _loaded:
            registry.verify(path)
            meta = registry.load_meta(path)
            found = (meta.get("format"), meta.get("spec_key"), meta.get("arch"))
            if found != (ARTIFACT_FORMAT, spec_key, arch):
                raise RegistryError(
                    f"{path} is not format {ARTIFACT_FORMAT} of {spec_key} for {arch}, but {found}: another version of kda-tl "
                    f"built it, or the manifest is wrong. Run `kda-tl build --arch {arch}`"
                )
            library = path / "lib.so"
            if meta["abi"] == "c":
                _loaded[key] = _CFunction(library, meta)
            else:
                _prepare(registry, arch)
                _loaded[key] = _load_tvm_ffi(library, meta["entry"])
        return _loaded[key]


def load_artifact(root: Path, id: str, arch: str, spec_key: str) -> KernelFunction:
    """As `load`, by its id in the registry folder `root`: of an artifact that no manifest need name."""
    registry = Registry(root)
    return load(registry, registry.root / "artifacts" / id, arch, spec_key)


def loaded_from() -> list[Path]:
    """The artifacts that this process has loaded, in that order: which registries serve it."""
    return [Path(path) for path in _loaded]


def is_whole(root: Path, id: str) -> bool:
    """Whether `load_artifact` finds that artifact as it was built. A damaged one is moved to quarantine.

    Raises:
        RegistryError: it cannot be read, or not be moved.
    """
    return Registry(root).has("artifacts", id)


def has_support(root: Path, arch: str) -> bool:
    """Whether the registry folder `root` has whole support libraries for `arch`, or needs none. Raises as `is_whole`."""
    if arch_row(arch).is_cpu:
        return True
    registry = Registry(root)
    folder = registry.support_dir(arch)
    return folder is not None and registry.has("support", folder.name)


def _load_tvm_ffi(library: Path, entry: str) -> KernelFunction:
    import tvm_ffi

    module = tvm_ffi.load_module(str(library))
    function: KernelFunction = module[entry]
    return function


def _prepare(registry: Registry, arch: str) -> None:
    """Makes the process able to load CUDA modules: TVM's runtime library, its driver stubs, and our TMA helper."""
    global _prepared
    if _prepared:
        return
    import tvm_ffi

    _refuse_apache_tvm()
    folder = registry.support_dir(arch)
    if folder is None:
        raise RegistryError(f"{registry.root} names no support libraries for {arch}: run `kda-tl build --arch {arch}`")
    registry.verify(folder)
    names = registry.load_meta(folder)
    if tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda", allow_missing=True) is None:
        # Where TileLang is installed its own copy is taken: a later `import tilelang` then finds the same library loaded,
        # instead of registering the same functions a second time, which aborts the process.
        tilelang = importlib.util.find_spec("tilelang")
        runtime = folder
        if tilelang is not None and tilelang.submodule_search_locations:
            runtime = Path(tilelang.submodule_search_locations[0]) / "lib"
        _open_global(runtime / names["runtime"])
    if tvm_ffi.get_global_func("kda_tl.tensormap_create_tiled", allow_missing=True) is None:
        _open_global(folder / names["helper"])
    _prepared = True


def _refuse_apache_tvm() -> None:
    try:
        version = metadata.version("apache-tvm")
    except metadata.PackageNotFoundError:
        return
    raise EnvironmentConflict(
        f"the package apache-tvm {version} is installed: it and the TVM runtime that compiled kernels use register the same "
        "functions, and the second to load aborts the process. Run `pip uninstall apache-tvm` (apache-tvm-ffi stays)."
    )


def _open_global(path: Path) -> None:
    ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)


_C_TYPES: Mapping[str, Any] = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


class _CFunction:
    """A cpu artifact. Its C arguments are buffers, then sizes and strides, then scalars, in an order of its own."""

    def __init__(self, library: Path, meta: Mapping[str, Any]) -> None:
        self._function = getattr(ctypes.CDLL(str(library)), meta["entry"])
        self._function.restype = ctypes.c_int32
        self._parameters = meta["parameters"]
        self._order = [argument["name"] for argument in meta["c_arguments"]]
        self._function.argtypes = [
            ctypes.c_void_p if argument["type"].endswith("*") else _C_TYPES[argument["type"]]
            for argument in meta["c_arguments"]
        ]

    def __call__(self, *arguments: Any) -> None:
        if len(arguments) != len(self._parameters):
            raise TypeError(f"the kernel takes {len(self._parameters)} arguments, got {len(arguments)}")
        values: dict[str, Any] = {}
        for parameter, argument in zip(self._parameters, arguments, strict=True):
            name = parameter["name"]
            if "shape" not in parameter:
                values[name] = argument
                continue
            _check_tensor(name, parameter, argument, values)
            values[name] = argument.data_ptr()
        status = self._function(*(values[name] for name in self._order))
        if status != 0:
            raise RuntimeError(f"the kernel returned {status}")


def _check_tensor(name: str, parameter: Mapping[str, Any], tensor: torch.Tensor, values: dict[str, Any]) -> None:
    """Binds the run-time sizes and strides that `tensor` is the first to show, and holds it to those already known."""
    if str(tensor.dtype).removeprefix("torch.") != parameter["dtype"] or tensor.device.type != "cpu":
        raise TypeError(f"{name} must be a {parameter['dtype']} cpu tensor, got {tensor.dtype} on {tensor.device}")
    storage = tensor.untyped_storage()
    # A fake tensor's is on meta, a sharded parameter's may be freed; in a view their addresses look like any other.
    if tensor.numel() and (storage.nbytes() == 0 or storage.device.type != "cpu"):
        raise ValueError(f"{name} must have memory, got a {type(tensor).__name__} whose storage is empty")
    if tensor.dim() != len(parameter["shape"]):
        raise ValueError(f"{name} must have {len(parameter['shape'])} dimensions, got {tensor.dim()}")
    for what, texts, actual in (("size", parameter["shape"], tensor.shape), ("stride", parameter["strides"], tensor.stride())):
        for axis, (text, value) in enumerate(zip(texts, actual, strict=True)):
            if text.isidentifier():
                expected = values.setdefault(text, value)
            elif text.isdecimal():
                expected = int(text)
            elif tensor.is_contiguous():
                continue
            else:
                raise ValueError(f"{name} must be contiguous")
            if expected != value and not (what == "stride" and tensor.shape[axis] <= 1):
                raise ValueError(f"{name} has {what} {value} in dimension {axis}, expected {expected}")
