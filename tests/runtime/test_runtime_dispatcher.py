"""Which arch, which registry, which artifact; and what a miss says."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kda_tl.registry import DamagedArtifact, Registry
from kda_tl.runtime import dispatcher
from kda_tl.runtime.errors import ArtifactMissing, UnsupportedDevice
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec

CPU = torch.device("cpu")
SPEC = ChunkWySpec(dtype="float32")


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch):
    """search(*roots): the only registries there are."""

    def set_roots(*roots: Path) -> None:
        monkeypatch.setattr(dispatcher, "search_path", lambda: list(roots))
        monkeypatch.setattr(dispatcher, "_kernels", {})

    return set_roots


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    """device(capability, shared_memory): what every CUDA device is; shared_memory None where torch does not tell."""
    dispatcher._archs.clear()

    def describe(capability: tuple[int, int], shared_memory: int | None) -> torch.device:
        properties = SimpleNamespace(name="mock GPU", major=capability[0], minor=capability[1])
        if shared_memory is not None:
            properties.shared_memory_per_block_optin = shared_memory
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        return torch.device("cuda", 0)

    yield describe
    dispatcher._archs.clear()


def put(root: Path, arch: str, spec: KernelSpec, shared_memory: int = 0) -> Path:
    registry = Registry(root)
    meta = {"abi": "tvm_ffi", "entry": spec.kernel, "launches": [{"name": spec.kernel, "shared_memory": shared_memory}]}
    path = registry.put("artifacts", f"{spec.kernel}-{arch}", {"lib.so": b"no library"}, meta)
    registry.publish(arch, {spec.key: {"id": path.name, "kernel": spec.kernel, "built": "2026-01-01"}})
    return path


KIB = 1024


@pytest.mark.parametrize(
    ("capability", "shared_memory", "arch"),
    [
        ((8, 0), 163 * KIB, "sm_80"),
        ((8, 6), 99 * KIB, "sm_80"),
        ((8, 9), 99 * KIB, "sm_89"),
        ((9, 0), 227 * KIB, "sm_90"),
        ((9, 0), None, "sm_90"),
        ((10, 0), 227 * KIB, "sm_89"),
        ((12, 0), 99 * KIB, "sm_89"),
    ],
)
def test_the_arch_of_a_device(device, monkeypatch, capability, shared_memory, arch) -> None:
    monkeypatch.delenv("KDA_TL_ARCH", raising=False)
    assert dispatcher.device_arch(device(capability, shared_memory)) == arch


def test_a_device_that_no_arch_serves(device, monkeypatch) -> None:
    monkeypatch.delenv("KDA_TL_ARCH", raising=False)
    with pytest.raises(UnsupportedDevice, match=r"mock GPU.*7\.5.*sm_80, sm_89, sm_90"):
        dispatcher.device_arch(device((7, 5), 64 * KIB))
    with pytest.raises(UnsupportedDevice, match="no kernels for meta tensors"):
        dispatcher.device_arch(torch.device("meta"))


def test_the_arch_can_be_overridden(device, monkeypatch) -> None:
    gpu = device((9, 0), 227 * KIB)
    monkeypatch.setenv("KDA_TL_ARCH", "sm_80")
    assert dispatcher.device_arch(gpu) == "sm_80"
    assert dispatcher.device_arch(CPU) == "cpu"
    monkeypatch.setenv("KDA_TL_ARCH", "")
    assert dispatcher.device_arch(gpu) == "sm_90"
    for wrong, words in (("sm_86", "sm_80, sm_89, sm_90, .*cpu"), ("cpu", "KDA_TL_ARCH=cpu")):
        monkeypatch.setenv("KDA_TL_ARCH", wrong)
        with pytest.raises(ValueError, match=words):
            dispatcher.device_arch(gpu)


@pytest.mark.parametrize("spec", [SPEC, ChunkScanSpec(dtype="float32")])
@pytest.mark.parametrize("arch", ["cpu", "sm_90"])
def test_a_missing_artifact_names_the_command(search, tmp_path: Path, spec: KernelSpec, arch: str) -> None:
    search(tmp_path / "one", tmp_path / "two")
    choice = dispatcher.choose(spec, arch)
    assert choice.path is None and choice.registry is None
    with pytest.raises(ArtifactMissing) as caught:
        dispatcher.kernel(spec, arch, CPU)
    for words in (spec.key, f"kda-tl build --arch {arch}", str(tmp_path / "one"), str(tmp_path / "two"), "KDA_TL_REGISTRY"):
        assert words in str(caught.value)
    assert not (tmp_path / "one").exists()


def test_an_artifact_of_another_arch_or_spec_is_no_answer(search, tmp_path: Path) -> None:
    search(tmp_path)
    path = put(tmp_path, "sm_80", ChunkWySpec())
    assert dispatcher.choose(ChunkWySpec(), "sm_80").path == path
    for spec, arch in ((ChunkWySpec(), "sm_90"), (ChunkWySpec(dtype="float16"), "sm_80"), (ChunkScanSpec(), "sm_80")):
        assert dispatcher.choose(spec, arch).path is None


def test_the_first_registry_that_has_it_serves(search, tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("empty", "first", "second")]
    search(*roots)
    put(roots[2], "sm_90", ChunkWySpec())
    choice = dispatcher.choose(ChunkWySpec(), "sm_90")
    assert choice.path.parents[1] == roots[2] and str(roots[2]) in choice.reason
    put(roots[1], "sm_90", ChunkWySpec())
    choice = dispatcher.choose(ChunkWySpec(), "sm_90")
    assert choice.path.parents[1] == roots[1] == choice.registry.root
    shutil.rmtree(choice.path)  # named by its manifest, but gone
    assert dispatcher.choose(ChunkWySpec(), "sm_90").path.parents[1] == roots[2]


def test_the_environment_names_the_registry(tmp_path: Path, monkeypatch) -> None:
    path = put(tmp_path, "sm_90", ChunkWySpec())
    monkeypatch.setenv("KDA_TL_REGISTRY", str(tmp_path))
    assert dispatcher.choose(ChunkWySpec(), "sm_90").path == path


def test_a_kernel_that_needs_more_shared_memory_than_the_device_has(search, device, tmp_path: Path) -> None:
    search(tmp_path)
    put(tmp_path, "sm_80", ChunkWySpec(), shared_memory=120 * KIB)
    with pytest.raises(UnsupportedDevice, match=rf"{120 * KIB} bytes of shared memory.*cuda:0 has {99 * KIB}"):
        dispatcher.kernel(ChunkWySpec(), "sm_80", device((8, 6), 99 * KIB))


def test_a_kernel_is_loaded_once_per_process(cpu_registry: Registry, search) -> None:
    search(cpu_registry.root)
    kernel = dispatcher.kernel(SPEC, "cpu", CPU)
    assert dispatcher.kernel(ChunkWySpec(dtype="float32"), "cpu", CPU) is kernel
    assert dispatcher.kernel(ChunkScanSpec(dtype="float32"), "cpu", CPU) is not kernel


@pytest.mark.parametrize("file", ["lib.so", "kernel.c", "meta.json"])
def test_a_damaged_artifact_is_refused_and_quarantined(cpu_registry: Registry, search, tmp_path: Path, file: str) -> None:
    root = Path(shutil.copytree(cpu_registry.root, tmp_path / "copied"))
    search(root)
    path = Registry(root).find("cpu", SPEC.key)
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 1
    (path / file).write_bytes(content)
    with pytest.raises(DamagedArtifact) as caught:
        dispatcher.kernel(SPEC, "cpu", CPU)
    assert file in str(caught.value) and "kda-tl build --arch cpu" in str(caught.value)
    assert caught.value.path == path and caught.value.moved_to.parent == root / "quarantine"
    assert not path.exists() and (caught.value.moved_to / file).read_bytes() == content
    with pytest.raises(ArtifactMissing, match="kda-tl build --arch cpu"):
        dispatcher.kernel(SPEC, "cpu", CPU)
