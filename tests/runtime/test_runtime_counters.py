"""What the dispatcher counts and tells, and the environment variables that it obeys."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cold_workers import call, in_threads

import kda_tl
from kda_tl.registry import Registry
from kda_tl.runtime import dispatcher, environment, ranges
from kda_tl.runtime.counters import count_fallback
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec

CPU = torch.device("cpu")
SPECS = (ChunkWySpec(dtype="float32"), ChunkScanSpec(dtype="float32"))


def test_hits_loads_and_misses(fresh, registry_root: Path, cpu_registry: Registry) -> None:
    with pytest.raises(kda_tl.ArtifactMissing):
        dispatcher.kernel(SPECS[0], "cpu", CPU)
    shutil.copytree(cpu_registry.root, registry_root)
    for _ in range(3):
        for spec in SPECS:
            dispatcher.kernel(spec, "cpu", CPU)
    assert kda_tl.counters() == kda_tl.Counters(hits=4, loads=2, misses=1, builds=0, fallbacks=0)
    kda_tl.reset_counters()
    dispatcher.kernel(SPECS[0], "cpu", CPU)
    assert kda_tl.counters() == kda_tl.Counters(hits=1, loads=0, misses=0, builds=0, fallbacks=0)


def test_each_choice_is_told_once(fresh, cpu_kernels: Registry, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kda_tl")
    for _ in range(2):
        call(seed=1, T=3)
    told = [record.getMessage() for record in caplog.records if record.name == "kda_tl"]
    assert len(told) == 2
    for line, spec in zip(told, SPECS):
        id = cpu_kernels.find("cpu", spec.key).name
        assert spec.key in line and id in line and str(cpu_kernels.root) in line and "on cpu" in line


def test_a_fallback_is_counted_each_time_and_warned_of_once(fresh, caplog: pytest.LogCaptureFixture) -> None:
    for reason in ("slow one", "slow one", "slow two"):
        count_fallback(reason)
    assert kda_tl.counters().fallbacks == 3
    assert [record.getMessage() for record in caplog.records] == ["fallback: slow one", "fallback: slow two"]
    assert all(record.levelno == logging.WARNING and record.name == "kda_tl" for record in caplog.records)


def test_cold_threads_load_once(fresh, cpu_kernels: Registry) -> None:
    kernels = in_threads(8, lambda number: dispatcher.kernel(ChunkWySpec(dtype="float32"), "cpu", CPU))
    assert all(kernel is kernels[0] for kernel in kernels)
    assert (kda_tl.counters().loads, kda_tl.counters().hits) == (1, 7)


def test_threads_do_not_disturb_each_other(fresh, cpu_kernels: Registry) -> None:
    errors = in_threads(4, lambda number: [call(seed=10 * number + n, offset=n, T=20 + 17 * n) for n in range(2)])
    assert max(error for thread in errors for error in thread) < 1e-5
    assert kda_tl.counters().loads == 2 and kda_tl.counters().hits == 2 * 4 * 2 - 2


def test_alignment_and_lengths_load_nothing_new(fresh, cpu_kernels: Registry) -> None:
    kda_tl.warmup()
    before = kda_tl.counters()
    for offset, T in ((0, 5), (1, 5), (2, 64), (3, 65)):
        assert call(seed=offset, offset=offset, T=T) < 1e-5
    after = kda_tl.counters()
    assert (after.loads, after.misses, after.builds) == (before.loads, before.misses, before.builds)


def test_another_registry_is_honoured_by_the_next_call(
    fresh, cpu_registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDA_TL_REGISTRY", str(cpu_registry.root))
    first = dispatcher.kernel(SPECS[0], "cpu", CPU)
    copied = Path(shutil.copytree(cpu_registry.root, tmp_path / "copied"))
    monkeypatch.setenv("KDA_TL_REGISTRY", str(copied))
    second = dispatcher.kernel(SPECS[0], "cpu", CPU)
    assert second is not first and kda_tl.counters().loads == 2
    monkeypatch.setenv("KDA_TL_REGISTRY", str(cpu_registry.root))
    assert dispatcher.kernel(SPECS[0], "cpu", CPU) is first


@pytest.mark.parametrize("name", environment.VARIABLES)
def test_raw_readers_follow_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = environment._raw(name)
    monkeypatch.delenv(name, raising=False)
    assert read() is None
    values = []
    for value in ("a", "b"):
        monkeypatch.setenv(name, value)
        values.append(read())
    assert None not in values and len(set(values)) == 2


@pytest.mark.parametrize(
    ("name", "read", "good", "bad"),
    [
        ("KDA_TL_ON_MISS", environment.on_miss, {"": "error", "error": "error", "build": "build"}, ("bild", "BUILD", "1")),
        ("KDA_TL_NVTX", environment.nvtx, {"": False, "0": False, "1": True}, ("yes", "2")),
    ],
)
def test_unknown_values_are_refused(name: str, read, good: dict, bad: tuple[str, ...], monkeypatch) -> None:
    for value, meaning in good.items():
        monkeypatch.setenv(name, value)
        assert read() == meaning
    for value in bad:
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"^{name} must be .* or .*, got '{value}'"):
            read()


def test_ranges_are_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDA_TL_NVTX", raising=False)
    assert ranges.annotate(call) is call


def test_ranges_show_in_a_profile(fresh, cpu_kernels: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_TL_NVTX", "1")
    with torch.profiler.profile() as profile:
        call(seed=0, T=2)
    names = {event.key for event in profile.key_averages()}
    assert {"kda_tl::chunk_wy", "kda_tl::chunk_scan"} <= names


def test_every_op_is_a_range() -> None:
    code = """
import kda_tl, kda_tl.ops.explain as explain
from unittest import mock
from kda_tl.runtime import ranges
for name in explain.PLANNERS:
    with mock.patch.object(ranges, "span", side_effect=RuntimeError) as span:
        try:
            getattr(kda_tl, name)()
        except RuntimeError:
            pass
        except TypeError:
            raise SystemExit(f"{name} has no range")
    span.assert_called_once_with(f"kda_tl::{getattr(kda_tl, name).op.name}")
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "KDA_TL_NVTX": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_range_ends_where_the_kernel_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_TL_NVTX", "1")
    pushed: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("end"))

    def kernel() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        ranges.annotate(kernel, "kda_tl::x")()
    assert pushed == ["kda_tl::x", "end"]


def test_one_base_for_the_runtime_s_errors() -> None:
    for error in (kda_tl.ArtifactMissing, kda_tl.DriverTooOld, kda_tl.EnvironmentConflict, kda_tl.UnsupportedDevice):
        assert issubclass(error, kda_tl.KdaTlError) and issubclass(error, RuntimeError)
    assert issubclass(kda_tl.BuildOnMissFailed, kda_tl.ArtifactMissing)


def test_a_forked_process_waits_for_nobody(fresh, cpu_kernels: Registry) -> None:
    """The locks are held by a thread that the child does not have."""
    from kda_tl.runtime import loader

    with dispatcher._lock, loader._lock:
        child = os.fork()
        if child == 0:
            free = dispatcher._lock.acquire(timeout=5) and loader._lock.acquire(timeout=5)
            os._exit(0 if free else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
