"""Artifact to callable: the cpu ABI and its checks, what an environment may not hold, and that TileLang is not needed."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefill_arguments import prefill_arguments

from kda_tl.registry import DamagedArtifact, Registry, RegistryError
from kda_tl.runtime import loader
from kda_tl.runtime.errors import EnvironmentConflict
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec

ROOT = Path(__file__).resolve().parents[2]
KEY = ChunkWySpec(dtype="float32").key


@pytest.fixture
def artifact(cpu_registry: Registry) -> Path:
    path = cpu_registry.find("cpu", KEY)
    assert path is not None
    return path


@pytest.fixture
def chunk_wy(cpu_registry: Registry, artifact: Path) -> Callable[..., Any]:
    return loader.load(cpu_registry, artifact, "cpu", KEY)


def arguments() -> dict[str, Any]:
    return prefill_arguments(1, 10, 2, 4)["chunk_wy"]


def test_arguments_arrive_in_their_places(chunk_wy) -> None:
    """The C function's order is not the program's; the first entries of both results follow from the definition."""
    x = arguments()
    chunk_wy(*x.values())
    q, k, g, beta = (x[name].double() for name in ("q", "k", "g", "beta"))
    for head in range(4):
        assert x["P"][0, head, 0, 0] == pytest.approx(float(q[0, 0, head // 2] @ k[0, 0, head // 2]), rel=1e-5, abs=1e-7)
        product = (k[0, 1, head // 2] * k[0, 0, head // 2] * g[0, 1, head].exp()).sum()
        assert x["A_inv"][0, head, 1, 0] == pytest.approx(float(-beta[0, 1, head] * product * beta[0, 0, head]), rel=1e-4)


def test_an_artifact_is_loaded_once(cpu_registry: Registry, artifact: Path, chunk_wy) -> None:
    assert loader.load(Registry(cpu_registry.root), artifact, "cpu", KEY) is chunk_wy


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("q", lambda x: x.bfloat16(), TypeError, "q must be a float32 cpu tensor, got torch.bfloat16"),
        ("beta", lambda x: x.double(), TypeError, "beta must be a float32 cpu tensor"),
        ("cu_seqlens", lambda x: x.long(), TypeError, "cu_seqlens must be a int32 cpu tensor, got torch.int64"),
        ("k", lambda x: x.to("meta"), TypeError, "k must be a float32 cpu tensor, got torch.float32 on meta"),
        ("g", lambda x: x[0], ValueError, "g must have 4 dimensions, got 3"),
        ("q", lambda x: x[..., :64].contiguous(), ValueError, "q has size 64 in dimension 3, expected 128"),
        ("k", lambda x: x[:, :9], ValueError, "k has size 9 in dimension 1, expected 10"),
        ("g", lambda x: x.repeat_interleave(2, -1)[..., ::2], ValueError, "g has stride 2 in dimension 3, expected 1"),
        ("beta", lambda x: x[..., :3], ValueError, "beta has size 3 in dimension 2, expected 4"),
        ("P", lambda x: x.repeat(2, 1, 1, 1), ValueError, "P has size 2 in dimension 0, expected 1"),
        ("A_inv", lambda x: x.transpose(-1, -2), ValueError, "A_inv must be contiguous"),
    ],
)
def test_wrong_tensors_are_refused_before_the_call(chunk_wy, name: str, change, error, words: str) -> None:
    x = arguments()
    x[name] = change(x[name])
    with pytest.raises(error, match=f"^{words}"):
        chunk_wy(*x.values())
    assert all(tensor.isnan().all() for tensor in (x["A_inv"], x["P"]) if tensor.device.type == "cpu")


def test_a_wrong_number_of_arguments(chunk_wy) -> None:
    with pytest.raises(TypeError, match="takes 19 arguments, got 18"):
        chunk_wy(*list(arguments().values())[:-1])


CUDA_META = {"format": 1, "abi": "tvm_ffi", "entry": "chunk_wy", "arch": "sm_90", "spec_key": "key"}


@pytest.fixture
def cuda_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Registry, Path]:
    """One that claims to be a CUDA module, in a process that has prepared nothing yet."""
    monkeypatch.setattr(loader, "_prepared", False)
    registry = Registry(tmp_path)
    path = registry.put("artifacts", "a1", {"lib.so": b"no library"}, CUDA_META)
    registry.publish("sm_90", {"key": {"id": "a1", "kernel": "chunk_wy", "built": "2026-01-01"}})
    return registry, path


def test_apache_tvm_in_the_environment_is_refused(cuda_artifact: tuple[Registry, Path], monkeypatch) -> None:
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.25.0" if name == "apache-tvm" else installed(name))
    with pytest.raises(EnvironmentConflict, match=r"apache-tvm 0\.25\.0 is installed.*pip uninstall apache-tvm"):
        loader.load(*cuda_artifact, "sm_90", "key")


def test_apache_tvm_does_not_matter_to_cpu_artifacts(cpu_registry: Registry, artifact: Path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.25.0")
    monkeypatch.setattr(loader, "_loaded", {})
    loader.load(cpu_registry, artifact, "cpu", KEY)(*arguments().values())


def test_a_registry_without_support_libraries_names_the_command(cuda_artifact: tuple[Registry, Path]) -> None:
    with pytest.raises(RegistryError, match="no support libraries for sm_90: run `kda-tl build --arch sm_90`"):
        loader.load(*cuda_artifact, "sm_90", "key")


def test_the_hash_is_checked_before_anything_is_loaded(cuda_artifact: tuple[Registry, Path]) -> None:
    registry, path = cuda_artifact
    (path / "lib.so").write_bytes(b"NO library")
    with pytest.raises(DamagedArtifact, match=r"lib\.so has sha256"):
        loader.load(registry, path, "sm_90", "key")
    assert not path.exists()


@pytest.mark.parametrize("wrong", [{"format": 2}, {"format": None}, {"arch": "sm_80"}, {"spec_key": "another"}])
def test_an_artifact_of_something_else_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Whole, but a manifest names it for the wrong spec or arch, or another version built it."""
    registry = Registry(tmp_path)
    path = registry.put("artifacts", "a1", {"lib.so": b"no library"}, {**CUDA_META, **wrong})
    with pytest.raises(RegistryError, match=r"is not format 1 of key for sm_90.*`kda-tl build --arch sm_90`"):
        loader.load(registry, path, "sm_90", "key")
    assert path.is_dir()


WITHOUT_TILELANG = """
import sys
if sys.argv[1] == "finder":
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("tilelang", "tvm"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Absent())
else:
    sys.modules["tilelang"] = sys.modules["tvm"] = None
import torch, kda_tl
from kda_tl.reference import recurrent_kda
generator = torch.Generator().manual_seed(0)
q, k = (torch.nn.functional.normalize(torch.randn(1, 70, 1, 128, generator=generator), dim=-1) for _ in range(2))
v, g, beta = torch.randn(1, 70, 1, 128, generator=generator), -torch.rand(1, 70, 1, 128), torch.rand(1, 70, 1)
o, state = kda_tl.chunk_kda(q, k, v, g, beta, output_final_state=True)
o_true, state_true = recurrent_kda(q, k, v, g, beta)
assert (o - o_true).norm() < 1e-5 * o_true.norm() and (state - state_true).norm() < 1e-5 * state_true.norm()
assert sys.modules.get("tilelang") is None and "kda_tl.compiler" not in sys.modules and "kda_tl.kernels" not in sys.modules
print("right")
"""


@pytest.mark.parametrize("how", ["finder", "none"])
def test_cpu_artifacts_run_without_tilelang(cpu_registry: Registry, how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KDA_TL_REGISTRY": str(cpu_registry.root)}
    command = [sys.executable, "-c", WITHOUT_TILELANG, how]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr


def test_both_kernels_describe_their_arguments(cpu_registry: Registry) -> None:
    for spec in (ChunkWySpec(dtype="float32"), ChunkScanSpec(dtype="float32")):
        meta = cpu_registry.load_meta(cpu_registry.find("cpu", spec.key))
        names = {parameter["name"] for parameter in meta["parameters"]}
        shown = {
            text
            for parameter in meta["parameters"]
            for text in (*parameter.get("shape", ()), *parameter.get("strides", ()))
            if text.isidentifier()
        }
        arguments = [argument["name"] for argument in meta["c_arguments"]]
        assert set(arguments) <= names | shown and len(set(arguments)) == len(arguments)
        types = {"float*", "int32_t*", "uint8_t*", "int32_t", "int64_t", "float"}
        assert {argument["type"] for argument in meta["c_arguments"]} <= types
