"""Decode calls and their truth, the token recurrence in float64; shared by the tests on cpu and device, without pytest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import kda_tl

OPS: dict[str, Callable[..., Any]] = {
    "kda": kda_tl.recurrent_kda,
    "gdn": kda_tl.recurrent_gdn,
    "rwkv6": kda_tl.recurrent_rwkv6,
    "gla": kda_tl.recurrent_gla,
    "simple_gla": kda_tl.recurrent_simple_gla,
    "linear": kda_tl.recurrent_linear_attention,
    "delta": kda_tl.recurrent_delta_rule,
}
PER_KEY, SCALAR, DELTA = ("kda", "rwkv6", "gla"), ("gdn", "simple_gla"), ("kda", "gdn", "delta")
GATES = ("none", "softplus", "bounded", "unscaled")
LOWER_BOUND = -5.0
NULL = -1


@dataclass(frozen=True)
class DecodeCase:
    """A batch of N requests of T tokens, or a pack of `lengths` with `tail` tokens past its end.

    slots: of a pool that requests name with state_indices, `null` of them null slots; 0: a state per request, in order.
    """

    name: str
    rule: str = "kda"
    N: int = 3
    T: int = 1
    H: int = 2
    HV: int = 4
    K: int = 128
    V: int = 128
    gate: str = "none"
    l2norm: bool = False
    beta: str = "given"
    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    v_first: bool = True
    slots: int = 0
    null: int = 0
    inplace: bool = False
    starts: bool = False
    initial: bool = True
    strided: bool = False
    lengths: tuple[int, ...] | None = None
    tail: int = 0
    scale: float | None = None


@dataclass
class DecodeInputs:
    """args: of the op. pool, slot, started: what the truth starts from."""

    args: dict[str, Any]
    pool: Tensor | None
    slot: list[int]
    offsets: list[tuple[int, int, int]] = field(default_factory=list)  # batch row, first token, past the last one


def make_decode_inputs(case: DecodeCase, device: str, seed: int) -> DecodeInputs:
    """Fresh random inputs, each in the middle of a buffer full of NaN where it is strided."""
    random = torch.Generator(device).manual_seed(seed)
    N = case.N if case.lengths is None else len(case.lengths)
    B, T = (N, case.T) if case.lengths is None else (1, sum(case.lengths) + case.tail)
    H, HV, K, V = case.H, case.HV, case.K, case.V

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    def placed(x: Tensor, dtype: torch.dtype) -> Tensor:
        if not case.strided:
            return x.to(dtype)
        buffer = torch.full((*x.shape[:2], x.shape[2] + 1, *x.shape[3:], 3), float("nan"), dtype=dtype, device=device)
        view = buffer[:, :, 1:, ..., 1]
        return view.copy_(x)

    unit = torch.nn.functional.normalize
    scaled = (lambda x: 3.0 * x) if case.l2norm else (lambda x: unit(x, dim=-1))
    q, k = (placed(scaled(normal(B, T, H, K)), case.dtype) for _ in range(2))
    args: dict[str, Any] = {"r" if case.rule == "rwkv6" else "q": q, "k": k, "v": placed(normal(B, T, HV, V), case.dtype)}
    g_name = {"rwkv6": "w", "gla": "gk"}.get(case.rule, "g")
    axes = (HV, K) if case.rule in PER_KEY else (HV,)
    if case.rule in PER_KEY + SCALAR:
        raw = normal(B, T, *axes)
        args[g_name] = placed(raw if case.gate != "none" else -torch.nn.functional.softplus(raw), case.gate_dtype)
    if case.rule == "rwkv6":
        args["u"] = normal(H, K)
    if case.rule in DELTA and case.beta != "absent":
        args["beta"] = placed(normal(B, T, HV) if case.beta != "given" else normal(B, T, HV).sigmoid(), case.gate_dtype)
    if case.rule in ("kda", "gdn"):
        args |= {"use_beta_sigmoid_in_kernel": case.beta in ("sigmoid", "twice"), "allow_neg_eigval": case.beta == "twice"}
        args["use_gate_in_kernel"] = case.gate != "none"
        if case.gate in ("softplus", "bounded"):
            args["A_log"] = normal(HV)
        if case.gate != "none":
            args["dt_bias"] = normal(*axes)
        if case.gate in ("bounded", "unscaled"):
            args["lower_bound"] = LOWER_BOUND
    if case.rule in DELTA:
        args["use_qk_l2norm_in_kernel"] = case.l2norm
    args |= {"scale": case.scale, "output_final_state": True, "state_v_first": case.v_first, "inplace": case.inplace}
    slots, order = max(case.slots, N) if case.slots else N, list(range(N))
    pool = None
    if case.initial:
        shape = (HV, V, K) if case.v_first else (HV, K, V)
        width = 3 if case.strided else 1
        storage = torch.full((slots, width, *shape), float("nan"), dtype=case.state_dtype, device=device)
        pool = storage[:, width // 2].copy_(normal(slots, *shape))
        args["initial_state"] = pool
    if case.slots:
        order = torch.randperm(slots, generator=random, device=device)[:N].tolist()
        order[: case.null] = [(-1, slots, 2**31 - 1, -(2**31))[n % 4] for n in range(case.null)]
        args["state_indices"] = torch.tensor([7, *order], dtype=torch.int32, device=device)[1:]
    if case.starts:
        args["has_initial_state"] = torch.arange(N, device=device) % 2 == 0
    bounds = [0, *itertools.accumulate(case.lengths or ())]
    if case.lengths is not None:
        args["cu_seqlens"] = torch.tensor(bounds, device=device)
        offsets = [(0, a, b) for a, b in itertools.pairwise(bounds)]
    else:
        offsets = [(n, 0, T) for n in range(N)]
    live = [s if 0 <= s < slots else NULL for s in order]
    return DecodeInputs(args, None if pool is None else pool.clone(), live, offsets)


def activations(args: dict[str, Any]) -> dict[str, Tensor | None]:
    """q, k, v, d (decay, per key), beta in float64, from the op's arguments: gate, norm and sigmoid spelt out."""
    named = {"q": args.get("q", args.get("r")), "k": args["k"], "v": args["v"]}
    x: dict[str, Any] = {name: tensor.double() for name, tensor in named.items()}
    if args.get("use_qk_l2norm_in_kernel"):
        for name in ("q", "k"):
            x[name] = x[name] / (x[name].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    g = next((args[name].double() for name in ("g", "w", "gk") if args.get(name) is not None), None)
    if g is not None and args.get("use_gate_in_kernel"):
        bias, A_log, bound = args.get("dt_bias"), args.get("A_log"), args.get("lower_bound")
        per_head = (-1,) if g.dim() == 3 else (-1, 1)
        if bias is not None:
            g = g + bias.double().reshape(g.shape[2:])
        rate = 1.0 if A_log is None else A_log.double().exp().reshape(per_head)
        g = -rate * torch.logaddexp(g, torch.zeros_like(g)) if bound is None else bound * torch.sigmoid(rate * g)
    if g is not None and g.dim() == 3:
        g = g.unsqueeze(-1)
    x["d"] = None if g is None else g.exp()
    beta = args.get("beta")
    if beta is not None:
        beta = beta.double()
        if args.get("use_beta_sigmoid_in_kernel"):
            beta = beta.sigmoid() * (2 if args.get("allow_neg_eigval") else 1)
    x["beta"] = beta
    return x


def decode_truth(case: DecodeCase, inputs: DecodeInputs) -> tuple[Tensor, list[Tensor | None]]:
    """o, and the state [HV, K, V] of every request (None where its slot is null), token by token in float64."""
    args, x = inputs.args, activations(inputs.args)
    v, group = x["v"], case.HV // case.H
    q, k = (x[name].repeat_interleave(group, 2) for name in ("q", "k"))
    scale = case.K**-0.5 if case.scale is None else case.scale
    o = torch.zeros_like(v)
    states: list[Tensor | None] = []
    for n, (row, first, last) in enumerate(inputs.offsets):
        if inputs.slot[n] == NULL:
            states.append(None)
            continue
        S = torch.zeros((case.HV, case.K, case.V), dtype=torch.float64, device=v.device)
        if inputs.pool is not None and (not case.starts or n % 2 == 0):
            S = inputs.pool[inputs.slot[n]].double()
            S = S.transpose(-1, -2) if case.v_first else S
        for t in range(first, last):
            bonus_read = None
            if case.rule == "rwkv6":
                u = args["u"].double().repeat_interleave(group, 0)
                bonus = (q[row, t] * u * k[row, t]).sum(-1, keepdim=True)
                bonus_read = torch.einsum("hk,hkv->hv", q[row, t], S) + bonus * v[row, t]
            if x["d"] is not None:
                S = x["d"][row, t].unsqueeze(-1) * S
            u = v[row, t]
            if case.rule in DELTA:
                u = u - torch.einsum("hk,hkv->hv", k[row, t], S)
                u = u if x["beta"] is None else x["beta"][row, t].unsqueeze(-1) * u
            S = S + k[row, t].unsqueeze(-1) * u.unsqueeze(-2)
            o[row, t] = scale * (torch.einsum("hk,hkv->hv", q[row, t], S) if bonus_read is None else bonus_read)
        states.append(S)
    return o, states


def relative(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||; infinite where x is not finite, absolute where the truth is zero."""
    error, norm = float((x.double() - truth).norm()), float(truth.norm())
    error = error / norm if norm > 0 else error
    return error if error == error else float("inf")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def run_decode_case(case: DecodeCase, device: str, seed: int) -> dict[str, float]:
    """Errors of output and states; raises AssertionError where memory that is not the call's has changed."""
    inputs = make_decode_inputs(case, device, seed)
    pool = inputs.args.get("initial_state")
    storage = None if pool is None else pool._base
    before = None if storage is None else storage.clone()
    with torch.no_grad():
        o, final = OPS[case.rule](**inputs.args)
    truth_o, truth_states = decode_truth(case, inputs)
    assert o.dtype == case.dtype and o.shape == truth_o.shape
    errors = {"o": relative(o, truth_o), "state": 0.0}
    if case.inplace:
        assert final is pool
    elif storage is not None:
        assert same_bits(storage, before), "initial_state was changed by a call that is not in place"
    assert final is not None and final.dtype == (case.state_dtype if case.initial else torch.float32)
    for n, (row, first, last) in enumerate(inputs.offsets):
        state, slot = truth_states[n], inputs.slot[n]
        if state is None:
            assert not o[row, first:last].any(), "the output of a null slot is zero"
            assert case.inplace or not final[n].any(), "the state of a null slot is zero"
            continue
        found = final[slot if case.inplace else n]
        errors["state"] = max(errors["state"], relative(found.transpose(-1, -2) if case.v_first else found, state))
    if case.lengths is not None:
        assert not o[0, sum(case.lengths) :].any(), "outputs past the last request are zero"
    if case.inplace and storage is not None and pool is not None:
        untouched = torch.ones(storage.shape[:2], dtype=torch.bool, device=device)
        untouched[[s for s in inputs.slot if s != NULL], storage.shape[1] // 2] = False
        assert same_bits(storage[untouched], before[untouched]), "a slot that no request names was changed"
    return errors


def variants(case: DecodeCase, **values: Any) -> list[DecodeCase]:
    """One case per value of the single field that is named."""
    ((name, options),) = values.items()
    return [replace(case, name=f"{case.name}-{str(option).removeprefix('torch.')}", **{name: option}) for option in options]


SERVING = DecodeCase("serving", gate="softplus", l2norm=True, beta="sigmoid", slots=7, null=1, inplace=True, N=5)
CASES = [
    *(DecodeCase(rule, rule=rule) for rule in OPS),
    *(DecodeCase(f"{rule}-T5-k-first", rule=rule, T=5, v_first=False) for rule in OPS),
    *(DecodeCase(f"{rule}-{gate}", rule=rule, gate=gate, T=2, beta="twice") for rule in ("kda", "gdn") for gate in GATES),
    SERVING,
    replace(SERVING, name="serving-gdn", rule="gdn", gate="bounded"),
    replace(SERVING, name="serving-rwkv6", rule="rwkv6", gate="none", l2norm=False),
    replace(SERVING, name="serving-k-first", v_first=False),
    replace(SERVING, name="serving-verify", T=4),
    replace(SERVING, name="serving-all-null", null=5),
    replace(SERVING, name="serving-strided", strided=True),
    replace(SERVING, name="serving-strided-k-first", strided=True, v_first=False),
    replace(SERVING, name="serving-starts", starts=True),
    replace(SERVING, name="serving-narrow-gate", gate_dtype=torch.bfloat16, beta="twice"),
    replace(SERVING, name="serving-not-in-place", inplace=False),
    replace(SERVING, name="serving-K64", K=64, V=64),
    DecodeCase("pack", lengths=(1, 0, 3, 1, 2), tail=3, inplace=True, slots=9, strided=True),
    DecodeCase("pack-no-state", lengths=(2, 0, 3), initial=False),
    DecodeCase("no-state", initial=False, scale=1.0),
    DecodeCase("V72", V=72, v_first=False),
    DecodeCase("V8", V=8, H=1, HV=1),
    DecodeCase("V256", V=256, HV=2),
    DecodeCase("beta-absent", beta="absent"),
    DecodeCase("one-head", H=1, HV=1, N=1),
    DecodeCase("one-head-strided", H=1, HV=1, N=1, strided=True, v_first=False),
]
