"""Kernels loaded and launched ahead of a CUDA graph's capture, a memory profile or the first request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kda_tl.ops.example import example_inputs, op_named
from kda_tl.ops.explain import DECODE_OPS, DELTALOG_OPS, PLANNERS, PREFILL_OPS
from kda_tl.ops.plan import Plan
from kda_tl.runtime import dispatcher
from kda_tl.runtime.errors import ArtifactMissing, UnsupportedDevice
from kda_tl.runtime.warmup import launch_once
from kda_tl.specs.decode import RecurrentDecodeSpec
from kda_tl.specs.defaults import default_specs
from kda_tl.specs.deltalog import DeltaLogDecodeSpec, DeltaLogPrepSpec
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec
from kda_tl.specs.rules import RULES

__all__ = ["warmup"]


def warmup(
    *what: str | Callable[..., Any] | KernelSpec | Plan, device: torch.device | str | int | None = None, **options: Any
) -> list[str]:
    """Verifies, loads and launches kernels once, on a few kilobytes of zeros, and waits for them.

    A later call of the same kernels reads no file, loads no module and compiles nothing, on any stream and thread, and may be
    captured in a CUDA graph. Nothing is compiled here either, unless KDA_TL_ON_MISS=build says that a miss is built. On a GPU
    that runs an artifact through its PTX, this is where the driver compiles it. One call serves one device.

    Args:
        what: any of these; with none, every kernel of the default set that a registry holds for the device.
            An op or its name: called with one token, so that torch's side of it is warm as well. All kernels that other calls
            of it may take, and a registry holds, are launched too: other dtypes, other sizes, and those of sequences that are
            cut.
            A spec: its kernel alone, for every size.
            A plan, from `kda_tl.explain(op, ...)`: the kernels that this very call would launch.
        device: default the current CUDA device, or the cpu where there is none.
        options: keyword arguments of the ops, e.g. use_qk_l2norm_in_kernel=True.

    Returns:
        What was launched: keys of specs, names of ops.

    Raises:
        ArtifactMissing: no registry holds a kernel that was asked for, or any at all.
        RuntimeError: a CUDA graph is being captured.
        TypeError, ValueError: `what` is none of the above, or options came without an op.
        and what a call raises: UnsupportedDevice, DriverTooOld, DamagedArtifact, EnvironmentConflict.
    """
    where = _device(device)
    if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("warmup must come before a CUDA graph is captured, not during it")
    arch = dispatcher.device_arch(where)
    if options and not any(isinstance(item, str) or _is_op(item) for item in what):
        raise ValueError(f"options are for ops, and none was named: got {', '.join(sorted(options))}")
    done: list[str] = []
    for item in what or _held(arch):
        if isinstance(item, KernelSpec):
            launch_once(item, arch, where)
            done.append(item.key)
        elif isinstance(item, Plan):
            if item.arch != arch:
                raise ValueError(f"the plan is one for {item.arch}, and {where} runs {arch}")
            for launch in item.launches:
                launch_once(launch.spec, arch, where, launch.size)
                done.append(launch.spec.key)
        elif isinstance(item, str) or _is_op(item):
            name = _call(item, arch, where, options)
            done.append(name)
            for spec in default_specs(arch):
                if _serves(spec, name) and dispatcher.choose(spec, arch).path is not None:
                    launch_once(spec, arch, where)
                    done.append(spec.key)
        else:
            raise TypeError(f"what must be ops, names of ops, specs and plans, got {type(item).__name__}")
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return done


def _serves(spec: KernelSpec, op: str) -> bool:
    """Whether calls of `op` may launch it, whatever their dtypes and sizes."""
    if isinstance(spec, RecurrentDecodeSpec):
        return op in DECODE_OPS
    if isinstance(spec, DeltaLogDecodeSpec | DeltaLogPrepSpec):
        rule = RULES[op.removeprefix("deltalog_decode_")] if op in DELTALOG_OPS else None
        return rule is not None and (spec.decay, spec.delta, spec.read_first) == (rule.decay, rule.delta, rule.read_first)
    if op not in PREFILL_OPS:
        return False
    rule = PREFILL_OPS[op].op.rule
    if isinstance(spec, ChunkWySpec):
        return (spec.decay, spec.delta, spec.read_first) == (rule.decay, rule.delta, rule.read_first)
    return isinstance(spec, ChunkScanSpec | IntracardPreScanSpec | IntracardMergeSpec) and spec.delta == rule.delta


def _is_op(item: object) -> bool:
    return callable(item) and not isinstance(item, KernelSpec | Plan | type)


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError:  # torch lists what it can name, and asks for an accelerator where a number stands alone
        raise ValueError(f"device must be a CUDA device or the cpu, got {device!r}") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedDevice(f"device {where} is not here: torch sees no CUDA device")
    # Kernels are kept by device, and the tensors of a call name theirs in full.
    return torch.device("cuda", torch.cuda.current_device()) if where.type == "cuda" and where.index is None else where


def _held(arch: str) -> list[KernelSpec]:
    held = [spec for spec in default_specs(arch) if dispatcher.choose(spec, arch).path is not None]
    if not held:
        reason = dispatcher.choose(default_specs(arch)[0], arch).reason
        raise ArtifactMissing(f"no artifacts for {arch} ({reason}): run `kda-tl build --arch {arch}`")
    return held


def _call(op: str | Callable[..., Any], arch: str, device: torch.device, options: dict[str, Any]) -> str:
    name = op if isinstance(op, str) else op.__name__
    if name not in PLANNERS:
        raise ValueError(f"op must be one of {', '.join(PLANNERS)}, got {name!r}; warmup() loads the kernels of all ops")
    function = op_named(name)
    dtype = torch.float32 if arch == "cpu" else torch.bfloat16
    inputs = example_inputs(function, dtype=dtype, device=device, real=True)
    with torch.no_grad():
        function(**{**inputs, **options})
    return name
