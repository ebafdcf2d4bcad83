"""deltalog_decode_*: one token per request, or a few drafts, from a DeltaLogCache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_tl.ops.checks import (
    check_decay,
    check_dtype,
    check_null_index,
    check_number,
    check_shape,
    check_tensors,
    check_untraced,
    checks_values,
)
from kda_tl.ops.deltalog_cache import FLOAT_DTYPES, DeltaLogCache, DeltaLogSnapshot
from kda_tl.ops.deltalog_launch import Call, launch
from kda_tl.specs.gates import BetaForm, GateForm, gate_form

__all__ = ["DeltaLogCache", "DeltaLogSnapshot", "deltalog_decode_gdn", "deltalog_decode_kda", "deltalog_decode_rwkv6"]


def deltalog_decode_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cache: DeltaLogCache,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    null_index: int | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    valid: Tensor | None = None,
    verify: bool | None = None,
) -> Tensor:
    """One step of Kimi Delta Attention for n requests, on the states in `cache`, in place.

    The base is read once; the token becomes an entry of the log, or, on every `merge_every`-th token of a slot, base, log and
    token are folded together, in the same launch. Definition: `kda_tl.reference.recurrent_kda`; source: arXiv 2608.15533.

    Args:
        q, k: [n, T, H, K] in the cache's dtype (any float dtype on the cpu). T = 1, or T drafts of each request, up to 16.
        v: [n, T, HV, V]. g: [n, T, HV, K], natural-log decay (<= 0), or with `use_gate_in_kernel` the raw gate input. beta:
            [n, T, HV], or with `use_beta_sigmoid_in_kernel` its logits. g and beta in the dtype of q, or in float32.
        state_indices: [n] int32 (int64 costs a conversion), no slot twice. Requests whose slot is null_index or out of range
            are padding: their output is zero, and nothing else is read or written.
        scale: of the output; default K ** -0.5.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, A_log [HV],
            dt_bias [HV * K] or [HV, K]: as in `chunk_kda`, evaluated in the kernel in float32.
        valid: [n] int32: only the first valid[i] tokens of request i count; the output of the others is zero.
        verify: keep the tokens of this call in the log, so that `cache.truncate` can take them back; a log without room for
            them is folded first, in a launch of its own. Default, and necessary: T > 1.

    Returns:
        o [n, T, HV, V] in the dtype of v.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        ArtifactMissing: the kernels are not built for this device; the message names the command.
        NotImplementedError: an input requires a gradient.
    """
    form = _gate(use_gate_in_kernel, A_log, dt_bias, lower_bound)
    beta_kind = _beta(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _decode(
        "kda", q, k, v, g, beta, None, cache, state_indices, scale, null_index, use_qk_l2norm_in_kernel, form, beta_kind,
        lower_bound, A_log, dt_bias, valid, verify,
    )  # fmt: skip


def deltalog_decode_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cache: DeltaLogCache,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    null_index: int | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    valid: Tensor | None = None,
    verify: bool | None = None,
) -> Tensor:
    """One step of Gated DeltaNet: as `deltalog_decode_kda` with one decay for all keys, g [n, T, HV] and dt_bias [HV]."""
    form = _gate(use_gate_in_kernel, A_log, dt_bias, None)
    beta_kind = _beta(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _decode(
        "gdn", q, k, v, g, beta, None, cache, state_indices, scale, null_index, use_qk_l2norm_in_kernel, form, beta_kind,
        None, A_log, dt_bias, valid, verify,
    )  # fmt: skip


def deltalog_decode_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    cache: DeltaLogCache,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    null_index: int | None = None,
    valid: Tensor | None = None,
    verify: bool | None = None,
) -> Tensor:
    """One step of RWKV6: o = scale (r^T S + (r . (u k)) v), then S <- Diag(e^w) S + k v^T.

    r, k [n, T, H, K]; v [n, T, HV, V]; w [n, T, HV, K] natural-log decay; u [H, K], the bonus of the token at hand, any float
    dtype. The rest, what is
    returned and what is raised as for `deltalog_decode_kda`.
    """
    return _decode(
        "rwkv6", r, k, v, w, None, u, cache, state_indices, scale, null_index, False, GateForm.IDENTITY, BetaForm.IDENTITY,
        None, None, None, valid, verify,
    )  # fmt: skip


def _gate(use_gate: bool, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> GateForm:
    if lower_bound is not None:
        check_number("lower_bound", lower_bound, "a number < 0")
        if not -float("inf") < lower_bound < 0:
            raise ValueError(f"lower_bound must be finite and below 0 (natural log per token), got {lower_bound}")
    if not use_gate:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise ValueError(f"{name} needs use_gate_in_kernel=True; without it g is the log decay itself")
    return gate_form(use_gate, A_log is not None, lower_bound)


def _beta(use_sigmoid: bool, allow_neg_eigval: bool) -> BetaForm:
    if allow_neg_eigval and not use_sigmoid:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    return BetaForm.TWICE_SIGMOID if allow_neg_eigval else BetaForm.SIGMOID if use_sigmoid else BetaForm.IDENTITY


def _decode(
    rule: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, bonus: Tensor | None, cache: DeltaLogCache,
    state_indices: Tensor, scale: float | None, null_index: int | None, normalize: bool, form: GateForm, beta_kind: BetaForm,
    lower_bound: float | None, A_log: Tensor | None, dt_bias: Tensor | None, valid: Tensor | None, verify: bool | None,
) -> Tensor:  # fmt: skip
    if torch.compiler.is_compiling():
        # Not registered with torch: a compiled function breaks its graph here, and traces nothing that is cached or launched.
        untraced: Callable[..., Tensor] = torch.compiler.disable(_decode)
        return untraced(
            rule, q, k, v, g, beta, bonus, cache, state_indices, scale, null_index, normalize, form, beta_kind, lower_bound,
            A_log, dt_bias, valid, verify,
        )  # fmt: skip
    names = ("r", "w") if rule == "rwkv6" else ("q", "g")
    required = {names[0]: q, "k": k, "v": v, names[1]: g, **({"u": bonus} if rule == "rwkv6" else {"beta": beta})}
    optional = {"A_log": A_log, "dt_bias": dt_bias, "valid": valid}
    present: dict[str, Any] = {**required, "state_indices": state_indices}
    present |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    if not isinstance(cache, DeltaLogCache):
        raise TypeError(f"cache must be a DeltaLogCache, got {type(cache).__name__}")
    if cache.rule != rule:
        raise ValueError(f"cache must be of rule {rule}, got one of {cache.rule}")
    check_untraced(**present)
    check_tensors(**present)
    if q.device != cache.device:
        raise ValueError(f"{names[0]} must be on {cache.device} like the cache, got {q.device}")
    grad_mode, forward_mode = torch.is_grad_enabled(), forward_ad._current_level >= 0
    for name, tensor in present.items():
        if (grad_mode and tensor.requires_grad) or (forward_mode and forward_ad.unpack_dual(tensor).tangent is not None):
            raise NotImplementedError(
                f"{name} requires a gradient and decode has none: call it under torch.no_grad(), or detach it"
            )
    if q.dim() != 4:
        raise ValueError(f"{names[0]} must have shape [n, T, H, K], got {list(q.shape)}")
    n, T, H, K = q.shape
    HV, V = cache.HV, cache.V
    activations = FLOAT_DTYPES if cache.device.type == "cpu" else (cache.dtype,)
    for name, tensor in ((names[0], q), ("k", k), ("v", v)):
        check_dtype(name, tensor, activations)
    if K != cache.K:
        raise ValueError(f"K, the last size of {names[0]}, must be {cache.K} like the cache, got {K}")
    if H == 0 or HV % H:
        raise ValueError(f"HV, the value heads of the cache, must be a multiple of H, the heads of {names[0]}: {HV} and {H}")
    check_shape("k", k, "[n, T, H, K]", (n, T, H, K))
    check_shape("v", v, "[n, T, HV, V]", (n, T, HV, V))
    per_key = cache.spec.decay == "per_key"
    layout, shape = ("[n, T, HV, K]", (n, T, HV, K)) if per_key else ("[n, T, HV]", (n, T, HV))
    check_shape(names[1], g, layout, shape)
    gates = [(names[1], g)]
    if beta is not None:
        check_shape("beta", beta, "[n, T, HV]", (n, T, HV))
        gates.append(("beta", beta))
    for name, tensor in gates:
        check_dtype(name, tensor, FLOAT_DTYPES)
    for name, tensor, kind in (("u", bonus, "[H, K]"), ("A_log", A_log, "[HV]")):
        if tensor is not None:
            check_dtype(name, tensor, FLOAT_DTYPES)
            check_shape(name, tensor, kind, (H, K) if name == "u" else (HV,))
    if dt_bias is not None:
        check_dtype("dt_bias", dt_bias, FLOAT_DTYPES)
        allowed = ((HV, K), (HV * K,)) if per_key else ((HV,),)
        if tuple(dt_bias.shape) not in allowed:
            raise ValueError(f"dt_bias must have shape {' or '.join(map(str, map(list, allowed)))}, got {list(dt_bias.shape)}")
    for name, tensor in (("state_indices", state_indices), ("valid", valid)):
        if tensor is not None:
            check_dtype(name, tensor, (torch.int32, torch.int64))
            check_shape(name, tensor, "[n]", (n,))
    check_null_index(null_index)
    check_number("scale", scale, "a number, or None for K ** -0.5")
    if cache.capacity < T:
        raise ValueError(f"T must be at most {cache.capacity}, the capacity of the log, got {T}")
    if verify is False and T > 1:
        raise ValueError(f"verify=False needs T = 1, got T = {T}: several tokens of one call stay in the log")
    checked = checks_values(q)
    if checked and form == GateForm.IDENTITY:
        counted = torch.full_like(state_indices, T) if valid is None else valid
        live = (state_indices >= 0) & (state_indices < cache.slots) & (state_indices != null_index)
        check_decay(names[1], g[live[:, None] & (torch.arange(T, device=g.device) < counted[:, None])])
    if checked or cache.device.type == "cpu":
        _check_distinct(state_indices, cache.slots, null_index)

    o = torch.empty((n, T, HV, V), dtype=cache.dtype, device=cache.device)
    if o.numel() == 0:
        return o.to(v.dtype)
    call = Call(
        q, k, v, g if per_key else g.unsqueeze(-1), beta, A_log, dt_bias, bonus, state_indices, valid, o,
        K**-0.5 if scale is None else float(scale), lower_bound or 0.0, form, beta_kind, normalize, null_index,
    )  # fmt: skip
    with torch.cuda.device(cache.device) if cache.device.type == "cuda" else nullcontext():
        launch(cache, call, T, T > 1 if verify is None else verify)
    return o.to(v.dtype)


def _check_distinct(state_indices: Tensor, slots: int, null_index: int | None) -> None:
    used = [i for i in state_indices.tolist() if 0 <= i < slots and i != null_index]
    if len(set(used)) != len(used):
        raise ValueError(f"state_indices must name every slot once, got {used}")
