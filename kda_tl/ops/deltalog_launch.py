"""A checked decode call to launches: arguments as the programs take them (kernels/deltalog_decode.py lists them)."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from kda_tl.ops.checks import mark_written, narrowed
from kda_tl.ops.deltalog_cache import DeltaLogCache, Storage
from kda_tl.ops.deltalog_low import PER_WORD, join, split
from kda_tl.ops.plan import Launch, counted
from kda_tl.runtime import dispatcher
from kda_tl.runtime.fused import Watch, derived, stand_in
from kda_tl.runtime.loader import KernelFunction
from kda_tl.specs.deltalog import DeltaLogDecodeSpec, DeltaLogPrepSpec
from kda_tl.specs.gates import BetaForm, GateForm
from kda_tl.specs.sizes import problem_size

__all__ = ["Call", "launch", "launches", "prep_size"]

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
NO_SLOT = -1  # out of range, and so padding already


class Call(NamedTuple):
    """g [n, T, HV, K or 1]; bonus [H, K]; the rest as the public functions take it."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    bonus: Tensor | None
    state_indices: Tensor
    valid: Tensor | None
    o: Tensor
    scale: float
    lower_bound: float
    gate_form: GateForm
    beta_form: BetaForm
    normalize: bool
    null_index: int | None


def prep_size(K: int, capacity: int) -> int:
    """Floats per request and value head that ReplayPrep hands to AppendDecode: 4 rows of K, 2 sums per entry, 4 numbers."""
    return 4 * K + 2 * (capacity + 1) + 4


def in_two(cache: DeltaLogCache | Storage, tokens: int, verify: bool) -> bool:
    """Whether ReplayPrep goes first."""
    return cache.launches == 2 and tokens == 1 and not verify


def launches(cache: DeltaLogCache | Storage, n: int, tokens: int, verify: bool) -> tuple[Launch, ...]:
    """What `launch` launches for n requests, in order."""
    heads = f"{counted(n, 'request')} x {counted(cache.HV, 'head')}"
    size = problem_size("deltalog_decode", n, cache.HV)
    if in_two(cache, tokens, verify):
        spec = _prepared(cache.spec)
        prepare = Launch(spec.prep_spec, heads, problem_size("deltalog_prep", n, cache.HV))
        return prepare, Launch(spec, f"{heads} x V tiles", size)
    step = Launch(_step_spec(cache, tokens, verify), f"{heads} x V tiles", size)
    return (step, step) if verify else (step,)


def _step_spec(cache: DeltaLogCache | Storage, tokens: int, verify: bool) -> DeltaLogDecodeSpec:
    """Of one launch: the step proper has a program of its own."""
    one_token = tokens == 1 and not verify and cache.spec.state_v_first
    return _of_one_token(cache.spec) if one_token else cache.spec


@functools.lru_cache(maxsize=64)
def _of_one_token(spec: DeltaLogDecodeSpec) -> DeltaLogDecodeSpec:
    return dataclasses.replace(spec, one_token=True)


@functools.lru_cache(maxsize=64)
def _prepared(spec: DeltaLogDecodeSpec) -> DeltaLogDecodeSpec:
    return dataclasses.replace(spec, prepared=True)


def launch(cache: DeltaLogCache | Storage, call: Call, tokens: int, verify: bool, watch: Watch | None = None) -> None:
    """The step, on the current stream. With verify a fold of logs that lack room goes first, in a launch of its own.

    watch: sees every launch, and the tensors between them.
    """

    def kernel_of(spec: DeltaLogDecodeSpec | DeltaLogPrepSpec) -> KernelFunction:
        found = dispatcher.kernel(spec, cache.arch, device, problem_size(spec.kernel, call.q.shape[0], cache.HV))
        return found if watch is None else watch.of(found)

    base = cache.base
    # On the cpu alone (cpu_state_dtype); the way there and back changes nothing where no log is folded.
    if NAMES[base.dtype] == cache.spec.state_dtype:
        staged = base
    else:
        staged = join(base, cache.base_low) if base.dtype == torch.bfloat16 else base.float()
    device, dtype = cache.device, cache.dtype
    q, k, v = (derived(watch, x, lambda x: _rows(x, dtype)) for x in (call.q, call.k, call.v))
    g, beta = _plain(call.g), None if call.beta is None else _plain(call.beta)
    wide = g.dtype != dtype or (beta is not None and beta.dtype != dtype)
    heads = v.shape[:3]
    narrow_g, narrow_beta = _absent(device, dtype, g.shape), _absent(device, dtype, heads)
    wide_g, wide_beta = _absent(device, torch.float32, g.shape), _absent(device, torch.float32, heads)
    if wide:
        wide_g = derived(watch, g, Tensor.float)
        if beta is not None:
            wide_beta = derived(watch, beta, Tensor.float)
    else:
        narrow_g = g
        narrow_beta = narrow_beta if beta is None else beta
    HV, K = cache.HV, cache.K
    D = cache.spec.decay_size
    A_log = _unread(device, HV) if call.A_log is None else derived(watch, call.A_log, _float)
    if call.dt_bias is None:
        dt_bias = _absent(device, torch.float32, (HV, D))
    else:
        dt_bias = derived(watch, call.dt_bias, _float)
        dt_bias = dt_bias if dt_bias.dim() == 2 else dt_bias.reshape(HV, D)
    bonus = _absent(device, torch.float32, (HV, K)) if call.bonus is None else _per_value_head(_float(call.bonus), HV)
    indices = derived(watch, call.state_indices, _integers)
    valid = indices if call.valid is None else derived(watch, call.valid, _integers)
    tensors = (q, k, v, narrow_g, narrow_beta, wide_g, wide_beta, A_log, dt_bias, bonus)
    # Programs know a slot and a head as one row.
    log_k, log_u, log_decay, cursor = (x.flatten(0, 1) for x in (cache.log_k, cache.log_u, cache.log_decay, cache.cursor))
    if base.dtype == torch.bfloat16:
        low = cache.base_low.flatten(0, 1)
    else:
        low = _no_low(device, cache.V, K // PER_WORD)
    pool = (low, log_k, log_u, log_decay, cursor, indices, valid)
    numbers = (
        call.scale, call.lower_bound, int(call.gate_form), int(call.beta_form), int(call.dt_bias is not None),
        int(call.normalize), int(wide), int(call.valid is not None), NO_SLOT if call.null_index is None else call.null_index,
    )  # fmt: skip
    if in_two(cache, tokens, verify):
        spec = _prepared(cache.spec)
        prepared = torch.empty((q.shape[0], HV, prep_size(K, cache.capacity)), dtype=torch.float32, device=device)
        if watch is not None:
            watch.scratch.append(prepared)
        prepare, append = kernel_of(spec.prep_spec), kernel_of(spec)  # both, before the first one runs: it writes into the log
        prepare(
            q, k, narrow_g, narrow_beta, wide_g, wide_beta, A_log, dt_bias, bonus, log_k, log_decay, cursor, indices,
            valid, prepared, *numbers[1:],
        )  # fmt: skip
        append(v, prepared, staged, *pool, call.o, call.scale, numbers[7], numbers[8], cache.merge_every)
    elif (spec := _step_spec(cache, tokens, verify)).one_token:
        kernel_of(spec)(*tensors, staged, *pool, call.o, *numbers, cache.merge_every)
    else:
        kernel = kernel_of(cache.spec)
        if verify:
            kernel(*tensors, staged, *pool, call.o, *numbers, 0, cache.merge_every, 0, tokens)
        kernel(*tensors, staged, *pool, call.o, *numbers, tokens, cache.merge_every, int(not verify), 0)
    if staged is base:
        mark_written(base)
    else:
        if base.dtype == torch.bfloat16:
            upper, lower = split(staged)
            base.copy_(upper)
            cache.base_low.copy_(lower)
        else:
            base.copy_(staged)


@functools.lru_cache(maxsize=256)
def _absent(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Stands for a tensor that no one reads, and so may outlive any memory pool."""
    return stand_in(torch.empty((), dtype=dtype, device=device).expand(shape))


@functools.lru_cache(maxsize=256)
def _unread(device: torch.device, HV: int) -> Tensor:
    """Likewise, for a program that asks for a contiguous one."""
    return stand_in(torch.empty(HV, dtype=torch.float32, device=device))


@functools.lru_cache(maxsize=16)
def _no_low(device: torch.device, V: int, words: int) -> Tensor:
    """Likewise, where a base has no low bits."""
    return stand_in(torch.empty((1, V, words), dtype=torch.int32, device=device))


def _per_value_head(rows: Tensor, HV: int) -> Tensor:
    return rows if rows.shape[0] == HV else rows.repeat_interleave(HV // rows.shape[0], 0)


def _integers(tensor: Tensor) -> Tensor:
    return narrowed(tensor).contiguous()


def _float(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().to(torch.float32).contiguous()


def _plain(tensor: Tensor) -> Tensor:
    """Without a lazy negation, which a kernel cannot see."""
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    tensor = _plain(tensor)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
