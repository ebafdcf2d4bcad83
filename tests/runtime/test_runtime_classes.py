"""Several artifacts of one spec: which one a problem gets, what that costs, and what a server needs for it."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kda_tl
from kda_tl.ops.plan import Launch, Plan, size_choice
from kda_tl.registry import DamagedArtifact, Registry, RegistryError
from kda_tl.runtime import dispatcher
from kda_tl.runtime.warmup import launch_once
from kda_tl.specs import schedules
from kda_tl.specs.kernels import ChunkScanSpec
from kda_tl.specs.schedules import ChunkScanSchedule, SizeClass

CPU = torch.device("cpu")
SPEC = ChunkScanSpec(dtype="float32")
LIMITS = (33, 66, None)


def put(root: Path, spec: ChunkScanSpec = SPEC, arch: str = "cpu", limits: tuple[int | None, ...] = LIMITS) -> Registry:
    """A registry with one artifact per class of `spec`: its schedule has 128 threads more than that of the class before."""
    registry = Registry(root)
    classes = []
    for number, limit in enumerate(limits):
        schedule = ChunkScanSchedule(threads=128 * (number + 1)).as_dict()
        meta = {"format": 1, "spec_key": spec.key, "arch": arch, "schedule": schedule, "launches": []}
        registry.put("artifacts", f"class-{number}", {"lib.so": b"%d" % number}, meta)
        classes.append({"up_to": limit, "id": f"class-{number}", "source": "model"})
    registry.publish(arch, {spec.key: {"kernel": spec.kernel, "built": "2026-01-01", "classes": classes}})
    return registry


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the artifacts that were loaded; a kernel returns its own."""
    seen: list[str] = []

    def load(registry: Registry, path: Path, arch: str, key: str) -> Callable[..., str]:
        registry.verify(path)
        seen.append(path.name)
        return lambda *_: path.name

    monkeypatch.setattr(dispatcher, "load", load)
    return seen


@given(
    limits=st.lists(st.integers(1, 300), unique=True, max_size=3).map(sorted), sizes=st.lists(st.integers(1, 400), min_size=1)
)
def test_a_size_gets_the_first_class_that_reaches_it(tmp_path_factory, limits: list[int], sizes: list[int]) -> None:
    bounds = (*limits, None)
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("classes")
        put(root, limits=bounds)
        patch.setattr(dispatcher, "search_path", lambda: [root])
        for cache in ("_kernels", "_schedules"):
            patch.setattr(dispatcher, cache, {})
        patch.setattr(dispatcher, "load", lambda registry, path, arch, key: lambda: path.name)
        for size in [*sizes, dispatcher.LARGEST]:
            index = next(n for n, limit in enumerate(bounds) if limit is None or size <= limit)
            choice = dispatcher.choose(SPEC, "cpu", size)
            assert choice.path is not None and (choice.index, choice.path.name) == (index, f"class-{index}")
            assert choice.bounds == tuple(limits)
            assert dispatcher.kernel(SPEC, "cpu", CPU, size)() == f"class-{index}"
            assert dispatcher.size_class(SPEC, "cpu", size).schedule == ChunkScanSchedule(threads=128 * (index + 1))
        assert dispatcher.kernel(SPEC, "cpu", CPU)() == f"class-{len(limits)}"


def test_a_class_is_loaded_when_a_problem_needs_it(fresh, loads, registry_root: Path, caplog) -> None:
    caplog.set_level(logging.INFO, "kda_tl")
    put(registry_root)
    for size in (1, 33, 2, 67, 1000):
        dispatcher.kernel(SPEC, "cpu", CPU, size)
    assert loads == ["class-0", "class-2"]
    assert kda_tl.counters() == kda_tl.Counters(hits=3, loads=2, misses=0, builds=0, fallbacks=0)
    dispatcher.kernel(SPEC, "cpu", CPU, 34)
    assert loads[2:] == ["class-1"]
    told = [record.getMessage() for record in caplog.records]
    assert ["class-0 for cpu and sizes up to 33" in told[0], "class-2 for cpu and sizes beyond" in told[1]] == [True, True]


def test_other_classes_than_at_first(fresh, loads, registry_root: Path) -> None:
    """A build while this process runs: what was loaded stays until the registry is asked again."""
    put(registry_root)
    assert dispatcher.kernel(SPEC, "cpu", CPU, 10)() == "class-0"
    put(registry_root, limits=(50, None))
    assert dispatcher.kernel(SPEC, "cpu", CPU, 20)() == "class-0"
    assert dispatcher.kernel(SPEC, "cpu", CPU, 60)() == "class-1"
    assert dispatcher.kernel(SPEC, "cpu", CPU, 10)() == "class-0"
    assert loads == ["class-0", "class-1", "class-0"]


def test_a_registry_that_lacks_a_class_serves_none(fresh, loads, registry_root: Path, tmp_path: Path, monkeypatch) -> None:
    other = put(tmp_path / "other", limits=(None,))
    monkeypatch.setattr(dispatcher, "search_path", lambda: [registry_root, other.root])
    shutil.rmtree(put(registry_root).root / "artifacts" / "class-1")
    assert dispatcher.kernel(SPEC, "cpu", CPU, 1)() == "class-0"
    choice = dispatcher.choose(SPEC, "cpu", 1)
    assert choice.registry is not None and choice.registry.root == other.root and choice.bounds == ()


def test_a_damaged_class_is_refused_and_its_spec_missing(fresh, loads, registry_root: Path) -> None:
    put(registry_root)
    dispatcher.kernel(SPEC, "cpu", CPU, 100)
    (registry_root / "artifacts" / "class-0" / "lib.so").write_bytes(b"x")
    with pytest.raises(DamagedArtifact, match="kda-tl build --arch cpu"):
        dispatcher.kernel(SPEC, "cpu", CPU, 1)
    with pytest.raises(kda_tl.ArtifactMissing):
        dispatcher.kernel(SPEC, "cpu", CPU, 1)
    assert dispatcher.kernel(SPEC, "cpu", CPU, 100)() == "class-2"


def test_warmup_loads_every_class(fresh, loads, registry_root: Path, monkeypatch) -> None:
    put(registry_root)
    monkeypatch.setattr("kda_tl.runtime.warmup.smallest_arguments", lambda *_: ())
    monkeypatch.setattr(Registry, "load_meta", lambda *_: {"parameters": []})
    launch_once(SPEC, "cpu", CPU, 40)
    assert loads == ["class-1"]
    launch_once(SPEC, "cpu", CPU)
    assert sorted(loads) == ["class-0", "class-1", "class-2"]


def test_a_server_needs_no_schedules_file(fresh, registry_root: Path, tmp_path: Path, monkeypatch) -> None:
    """What is built says how; a file that says otherwise, or none, changes nothing."""
    put(registry_root)
    monkeypatch.setattr(schedules, "schedules_folder", lambda: tmp_path / "nowhere")
    classes = dispatcher.schedule_classes(SPEC, "cpu")
    assert [(one.up_to, one.schedule, one.source) for one in classes] == [
        (limit, ChunkScanSchedule(threads=128 * (number + 1)), "model") for number, limit in enumerate(LIMITS)
    ]
    assert dispatcher.schedule_classes(SPEC, "cpu") is classes
    other = dataclasses.replace(SPEC, head_dim_v=64)  # not built: what a build would make
    assert dispatcher.schedule_classes(other, "cpu") == (SizeClass(None, ChunkScanSchedule(), "default"),)


def test_a_schedule_of_another_version(fresh, registry_root: Path) -> None:
    registry = Registry(registry_root)
    registry.put("artifacts", "odd", {"lib.so": b""}, {"schedule": {"warps": 4}})
    registry.publish("cpu", {SPEC.key: {"id": "odd"}})
    with pytest.raises(RegistryError, match=r"odd has a schedule of chunk_scan.* does not know .*kda-tl build --arch cpu"):
        dispatcher.schedule_classes(SPEC, "cpu")


@pytest.mark.parametrize("on_miss", ["error", "build"])
def test_damaged_metadata(fresh, registry_root: Path, monkeypatch, on_miss: str) -> None:
    put(registry_root)
    (registry_root / "artifacts" / "class-1" / "meta.json").write_text("{}")
    monkeypatch.setenv("KDA_TL_ON_MISS", on_miss)
    if on_miss == "error":
        with pytest.raises(DamagedArtifact):
            dispatcher.schedule_classes(SPEC, "cpu")
    else:  # what the build that mends it will make
        assert dispatcher.schedule_classes(SPEC, "cpu") == schedules.schedule_classes(SPEC, "cpu")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (33, "threads 128 (model), for sizes up to 33: it is 33"),
        (64, "threads 256 (model), for sizes up to 66: it is 64"),
        (96, "threads 384 (model), for larger ones: it is 96"),
    ],
)
def test_explain_says_which_class_and_why(fresh, registry_root: Path, size: int, words: str) -> None:
    put(registry_root)
    launch = Launch(SPEC, "grid", size)
    words += " (sequences or segments x value heads), classes end at 33, 66, any"
    assert str(size_choice(launch, "cpu")) == words
    assert f"    schedule {words}\n" in str(Plan("op", {}, "cpu", (launch,), 0))


def test_explain_of_a_spec_with_one_class(fresh, registry_root: Path) -> None:
    put(registry_root, limits=(None,))
    assert str(size_choice(Launch(SPEC, "grid", 7), "cpu")) == "all defaults (model), for every size"


def test_the_plan_of_a_call_picks_what_the_call_picks(fresh, registry_root: Path) -> None:
    """chunk_kda of 2 sequences with 4 and with 20 value heads: 8 and 40 scans."""
    put(registry_root)
    for HV, artifact in ((4, "class-0"), (20, "class-1"), (40, "class-2")):
        q = torch.zeros(()).expand(2, 64, HV, 128)
        text = str(kda_tl.explain("chunk_kda", q, q, q, q, torch.zeros(()).expand(2, 64, HV)))
        assert f"it is {2 * HV} (sequences or segments x value heads)" in text and f"artifact {artifact}, " in text


def test_looking_again_is_cheap(fresh, loads, registry_root: Path) -> None:
    """A class costs a bisection: tens of nanoseconds. The bound leaves room for a busy machine."""
    put(registry_root)
    dispatcher.kernel(SPEC, "cpu", CPU, 64)
    repeats = 2000
    seconds = min(timeit.repeat(lambda: dispatcher.kernel(SPEC, "cpu", CPU, 64), number=repeats, repeat=5))
    assert seconds / repeats < 20e-6


# -- built for real ------------------------------------------------------------------------------------------------------


@pytest.mark.tilelang
def test_two_classes_are_built_once_each_and_both_serve(fresh, registry_root: Path, monkeypatch) -> None:
    from kda_tl.compiler.build import build

    few, many = ChunkScanSchedule(block_v=32), ChunkScanSchedule(block_v=128)
    classes = [SizeClass(4, few, "model"), SizeClass(8, many, "model"), SizeClass(None, few, "model")]
    seen: list[Any] = []
    registry = Registry(registry_root)
    results = build("cpu", [SPEC], registry, jobs=1, progress=seen.append, schedules={SPEC: classes})
    assert [result.schedule for result in seen] == [few, many] and len(results) == 2 and all(r.compiled for r in results)
    entry = json.loads((registry_root / "manifest" / "cpu.json").read_text())["artifacts"][SPEC.key]
    ids = {result.schedule: result.id for result in results}
    assert [(one["up_to"], one["id"], one["source"]) for one in entry["classes"]] == [
        (4, ids[few], "model"), (8, ids[many], "model"), (None, ids[few], "model"),
    ]  # fmt: skip
    assert not any(result.compiled for result in build("cpu", [SPEC], registry, jobs=1, schedules={SPEC: classes}))
    metas = [registry.load_meta(one.path)["schedule"]["block_v"] for one in registry.classes("cpu", SPEC.key)]
    assert metas == [32, 128, 32]
    # Both are the op's kernel: the same results, whichever class a call falls into.
    monkeypatch.undo()
    monkeypatch.setenv("KDA_TL_REGISTRY", str(registry_root))
    kernels = [dispatcher.kernel(SPEC, "cpu", CPU, size) for size in (1, 5, 9)]
    assert kernels[0] is kernels[2] is not kernels[1]
