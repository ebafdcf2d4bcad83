"""Checks that ops share: every message names the argument, what came and what is allowed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

__all__ = ["check_cu_seqlens", "check_dtype", "check_shape", "check_tensors", "host_offsets"]


def check_tensors(**tensors: object) -> None:
    """All of them tensors, all on one device."""
    devices: dict[torch.device, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"all tensors must be on one device, got {listed}")


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must have dtype {names}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_shape(name: str, tensor: torch.Tensor, layout: str, shape: Sequence[int]) -> None:
    """layout: how the shape reads in the documentation, "[B, T, HV, V]"."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {layout} = {list(shape)}, got {list(tensor.shape)}")


def host_offsets(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None) -> list[int] | None:
    """The offsets as Python numbers where that needs no sync with a device, else None."""
    known = cu_seqlens if cu_seqlens.device.type == "cpu" or cu_seqlens_cpu is None else cu_seqlens_cpu
    return [int(value) for value in known.tolist()] if known.device.type == "cpu" else None


def check_cu_seqlens(
    cu_seqlens: torch.Tensor,
    cu_seqlens_cpu: torch.Tensor | None,
    batch: int,
    seq_len: int,
    device: torch.device,
    values: bool = True,
) -> None:
    """cu_seqlens [N + 1]: int32 or int64, from 0, not decreasing, at most T; `values` are checked where the host knows them."""
    for name, offsets in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if offsets is None:
            continue
        if not isinstance(offsets, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(offsets).__name__}")
        check_dtype(name, offsets, (torch.int32, torch.int64))
        if offsets.dim() != 1 or offsets.numel() < 1:
            raise ValueError(f"{name} must have shape [N + 1] with N >= 0, got {list(offsets.shape)}")
        if offsets.numel() != cu_seqlens.numel():
            raise ValueError(f"{name} must have as many entries as cu_seqlens, {cu_seqlens.numel()}, got {offsets.numel()}")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens must be on {device} like q, got {cu_seqlens.device}")
    if cu_seqlens_cpu is not None and cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(f"cu_seqlens_cpu must be on the cpu, got {cu_seqlens_cpu.device}")
    if batch != 1:
        raise ValueError(f"q must have batch size 1 where cu_seqlens is given (pack the sequences along T), got {batch}")
    if not values:
        return
    if (
        cu_seqlens_cpu is not None
        and cu_seqlens.device.type == "cpu"
        and not torch.equal(cu_seqlens.long(), cu_seqlens_cpu.long())
    ):
        raise ValueError("cu_seqlens_cpu must hold the values of cu_seqlens")
    offsets_known = host_offsets(cu_seqlens, cu_seqlens_cpu)
    if offsets_known is None:
        return
    if offsets_known[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {offsets_known[0]}")
    for index, (first, last) in enumerate(itertools.pairwise(offsets_known)):
        if last < first:
            raise ValueError(f"cu_seqlens must not decrease, got {first} then {last} at index {index + 1}")
    if offsets_known[-1] > seq_len:
        raise ValueError(f"cu_seqlens must not exceed T = {seq_len}, got {offsets_known[-1]}")
