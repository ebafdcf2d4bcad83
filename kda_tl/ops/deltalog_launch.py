"""A checked decode call to launches: arguments as the programs take them (kernels/deltalog_decode.py lists them)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_tl.ops.checks import mark_written, narrowed
from kda_tl.ops.deltalog_cache import DeltaLogCache
from kda_tl.runtime import dispatcher
from kda_tl.specs.gates import BetaForm, GateForm
from kda_tl.specs.sizes import problem_size

__all__ = ["Call", "launch", "prep_size"]

NO_SLOT = -1  # out of range, and so padding already


@dataclass(frozen=True)
class Call:
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


def launch(cache: DeltaLogCache, call: Call, tokens: int, verify: bool) -> None:
    """The step, on the current stream. With verify a fold of logs that lack room goes first, in a launch of its own."""
    base = cache.base
    # On the cpu alone (cpu_state_dtype); the way there and back changes nothing where no log is folded.
    staged = base if str(base.dtype) == f"torch.{cache.spec.state_dtype}" else base.float()
    device, dtype = cache.device, cache.dtype
    q, k, v = (_rows(_plain(tensor).to(dtype)) for tensor in (call.q, call.k, call.v))
    g, beta = _plain(call.g), None if call.beta is None else _plain(call.beta)
    wide = g.dtype != dtype or (beta is not None and beta.dtype != dtype)
    narrow_g = _absent(device, dtype, *g.shape) if wide else g
    wide_g = g.float() if wide else _absent(device, torch.float32, *g.shape)
    heads = v.shape[:3]
    no_beta, no_wide_beta = _absent(device, dtype, *heads), _absent(device, torch.float32, *heads)
    narrow_beta = no_beta if beta is None or wide else beta
    wide_beta = no_wide_beta if beta is None or not wide else beta.float()
    HV, K = cache.HV, cache.K
    D = cache.spec.decay_size
    A_log = cache.log_decay.flatten()[:HV] if call.A_log is None else _float(call.A_log)
    dt_bias = _absent(device, torch.float32, HV, D) if call.dt_bias is None else _float(call.dt_bias).reshape(HV, D)
    bonus = _absent(device, torch.float32, HV, K) if call.bonus is None else _per_value_head(_float(call.bonus), HV)
    indices = narrowed(call.state_indices).contiguous()
    valid = indices if call.valid is None else narrowed(call.valid).contiguous()
    tensors = (q, k, v, narrow_g, narrow_beta, wide_g, wide_beta, A_log, dt_bias, bonus)
    pool = (cache.log_k, cache.log_u, cache.log_decay, cache.cursor, indices, valid)
    numbers = (
        call.scale, call.lower_bound, int(call.gate_form), int(call.beta_form), int(call.dt_bias is not None),
        int(call.normalize), int(wide), int(call.valid is not None), NO_SLOT if call.null_index is None else call.null_index,
    )  # fmt: skip
    if cache.launches == 2 and tokens == 1 and not verify:
        spec = dataclasses.replace(cache.spec, prepared=True)
        prepared = torch.empty((q.shape[0], HV, prep_size(K, cache.capacity)), dtype=torch.float32, device=device)
        # Both are there before the first one runs: it writes into the log.
        prepare, append = (
            dispatcher.kernel(needed, cache.arch, device, problem_size(needed.kernel, q.shape[0], HV))
            for needed in (spec.prep_spec, spec)
        )
        prepare(
            q, k, narrow_g, narrow_beta, wide_g, wide_beta, A_log, dt_bias, bonus, cache.log_k, cache.log_decay, cache.cursor,
            indices, valid, prepared, *numbers[1:],
        )  # fmt: skip
        append(v, prepared, staged, *pool, call.o, call.scale, numbers[7], numbers[8], cache.merge_every)
    else:
        kernel = dispatcher.kernel(cache.spec, cache.arch, device, problem_size("deltalog_decode", q.shape[0], HV))
        if verify:
            kernel(*tensors, staged, *pool, call.o, *numbers, 0, cache.merge_every, 0, tokens)
        kernel(*tensors, staged, *pool, call.o, *numbers, tokens, cache.merge_every, int(not verify), 0)
    if staged is base:
        mark_written(base)
    else:
        base.copy_(staged)


def _absent(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Stands for a tensor that no one reads."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _per_value_head(rows: Tensor, HV: int) -> Tensor:
    return rows if rows.shape[0] == HV else rows.repeat_interleave(HV // rows.shape[0], 0)


def _float(tensor: Tensor) -> Tensor:
    return _plain(tensor).to(torch.float32).contiguous()


def _plain(tensor: Tensor) -> Tensor:
    """Without what a kernel cannot see: a gradient, a lazy negation."""
    tensor = tensor.detach()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
