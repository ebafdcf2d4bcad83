"""Checks that ops share: every message names the argument, what came and what is allowed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from kda_tl.runtime.environment import check_setting, values_checked

__all__ = [
    "check_cu_seqlens",
    "check_decay",
    "check_decays",
    "check_dense",
    "check_dtype",
    "check_null_index",
    "check_number",
    "check_shape",
    "check_tensors",
    "check_written",
    "checks_values",
    "host_offsets",
    "live_rows",
    "mark_written",
    "narrowed",
    "refuse_gradients",
]

INT32_MAX = 2**31 - 1


def check_tensors(**tensors: object) -> None:
    """All of them tensors, all on one device."""
    devices: dict[torch.device, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_nested:
            check_dense(name, tensor)
        devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"all tensors must be on one device, got {listed}")


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Elements at strides in memory, which is all that a kernel can read."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a nested tensor" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").removeprefix("_")
        raise TypeError(f"{name} must be a dense, strided tensor, got {kind}")


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must have dtype {names}, got {str(tensor.dtype).removeprefix('torch.')}")


def check_shape(name: str, tensor: torch.Tensor, layout: str, shape: Sequence[int]) -> None:
    """layout: how the shape reads in the documentation, "[B, T, HV, V]"."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {layout} = {list(shape)}, got {list(tensor.shape)}")


def check_number(name: str, value: object, allowed: str) -> None:
    """value: a Python number, or what a compiler traces in its place; None passes."""
    if value is None or type(value) is float:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be {allowed}, got {type(value).__name__}")
    if isinstance(value, int):
        try:
            float(value)
        except OverflowError:
            raise ValueError(f"{name} must be {allowed}, got one that no float holds") from None


def check_null_index(null_index: object) -> None:
    """An integer that an int32 holds: a launcher would cut a larger one to the number of a slot that is somebody's."""
    if null_index is None or isinstance(null_index, torch.SymInt):
        return
    if isinstance(null_index, bool) or not isinstance(null_index, int):
        raise TypeError(f"null_index must be an int or None, got {type(null_index).__name__}")
    if not -INT32_MAX - 1 <= null_index <= INT32_MAX:
        raise ValueError(f"null_index must be an int of 32 bits or None, got {null_index}")


def check_written(name: str, tensor: torch.Tensor, negated: bool = False) -> None:
    """A tensor that is updated in place holds every element once, and as it is unless it may be `negated`, lazily."""
    if 0 in tensor.stride() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError(
            f"{name} must not be expanded to be updated in place: elements share their memory, got strides "
            f"{list(tensor.stride())} for shape {list(tensor.shape)}"
        )
    if tensor.is_neg() and not negated:
        raise ValueError(f"{name} must not be a lazily negated view to be updated in place: pass {name}.resolve_neg()")


def checks_values(tensor: torch.Tensor) -> bool:
    """KDA_TL_CHECK=1: what the device alone knows is waited for and checked; no graph may be captured meanwhile.

    Raises ValueError where KDA_TL_CHECK is neither 0 nor 1.
    """
    return check_setting() is not None and values_checked() and not isinstance(tensor, FakeTensor)


def live_rows(state_indices: torch.Tensor, slots: int, null_index: int | None) -> list[int]:
    """The rows whose slot is in the pool; the others are padding. Waits for a device. No slot may be named twice."""
    named = state_indices.tolist()
    live = [row for row, slot in enumerate(named) if 0 <= slot < slots and slot != null_index]
    if len({named[row] for row in live}) != len(live):
        raise ValueError(f"state_indices must not name a slot twice, got {[named[row] for row in live]}")
    return live


def refuse_gradients(tensors: Iterable[tuple[str, torch.Tensor | None]], why: str) -> None:
    """Neither mode of differentiation may lose an input in silence: NotImplementedError where one of them would.

    why: as in "q requires a gradient and WHY".
    """
    backward, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    for name, tensor in tensors:
        if tensor is None:
            continue
        if (backward and tensor.requires_grad) or (forward and forward_ad.unpack_dual(tensor).tangent is not None):
            raise NotImplementedError(f"{name} requires a gradient and {why}: call it under torch.no_grad(), or detach {name}")


def check_decay(name: str, g: torch.Tensor) -> None:
    """g: natural-log decays, at most 0. What is above is a linear decay as a rule, in (0, 1]."""
    if bool((g > 0).any()):
        raise ValueError(
            f"{name} must be a natural-log decay <= 0, got {g.max().item():g}: "
            "pass log(decay), or use_gate_in_kernel=True for a raw gate input"
        )


def check_decays(name: str, g: torch.Tensor, offsets: torch.Tensor | None, live: Sequence[int] | None) -> None:
    """`check_decay` of what belongs to a sequence, one of those `live` where given. g [B, T, ...]; offsets: of a pack, on the
    host."""
    if offsets is None:
        check_decay(name, g if live is None else g[live])
        return
    ends = offsets.tolist()
    spans = [(0, ends[-1])] if live is None else [(ends[row], ends[row + 1]) for row in live]
    for first, last in spans:
        check_decay(name, g[:, first:last])


def mark_written(tensor: torch.Tensor) -> None:
    """Tells autograd of what a kernel has written, so that a graph that saved the old values refuses to go backward."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def narrowed(indices: torch.Tensor) -> torch.Tensor:
    """int32 for a kernel. What int32 does not hold stays out of every range, instead of coming round to another number."""
    return indices if indices.dtype == torch.int32 else indices.clamp(-1, INT32_MAX).to(torch.int32)


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
        check_dense(name, offsets)
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
