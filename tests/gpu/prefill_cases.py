"""Cases of every prefill op for a device, without pytest: rules, dtypes, gates, head dims, pools, states between chunks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from chunk_kda_cases import nan_filled_memory, relative_error
from torch import Tensor

import kda_tl
from kda_tl.reference import beta_sigmoid, gdn_gate, kda_gate, l2norm, recurrent_rule
from kda_tl.specs.rules import RULES

OPS: dict[str, Any] = {
    "kda": kda_tl.chunk_kda,
    "gdn": kda_tl.chunk_gdn,
    "delta_rule": kda_tl.chunk_delta_rule,
    "gla": kda_tl.chunk_gla,
    "simple_gla": kda_tl.chunk_simple_gla,
    "linear_attention": kda_tl.chunk_linear_attention,
    "rwkv6": kda_tl.chunk_rwkv6,
}
NAMES = {"rwkv6": {"q": "r", "g": "w", "bonus": "u"}}
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 2e-3, torch.float32: 1e-5}
PACK = (0, 1, 63, 64, 65, 0, 200)
FORMS = ("softplus", "bounded", "bounded-unscaled")


@dataclass(frozen=True)
class PrefillCase:
    """lengths: a pack, with `tail` tokens past its end; otherwise a dense batch. form: of the gate in the kernel, with l2 norm
    and sigmoid; None: all three outside. pool: dtype of a pool of states that is read and written in place."""

    rule: str = "kda"
    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype = torch.float32
    K: int = 128
    V: int = 128
    B: int = 1
    T: int = 200
    lengths: tuple[int, ...] | None = None
    tail: int = 0
    H: int = 2
    HV: int = 4
    form: str | None = None
    neg_eigval: bool = False
    pool: torch.dtype | None = None
    state_v_first: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        short = str(self.dtype).removeprefix("torch.").replace("float", "f")
        gate = "" if self.gate_dtype == torch.float32 else "-narrow-gate"
        what = "pack" if self.lengths is not None else f"B{self.B}-T{self.T}"
        pool = "" if self.pool is None else "-pool-" + str(self.pool).removeprefix("torch.")
        options = "".join(f"-{key}-{value}" for key, value in self.options)
        return f"{self.rule}-{short}{gate}-K{self.K}-V{self.V}-{what}-{self.form or 'plain'}{pool}{options}"


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NARROW = ((64, 64), (64, 128), (128, 64), (96, 80), (16, 256))  # K, V
CASES = [
    *(PrefillCase(rule, dtype, lengths=PACK, tail=70) for rule in RULES for dtype in (BF16, F16, F32)),
    *(PrefillCase(rule, BF16, BF16, B=2, T=130) for rule in RULES if rule != "linear_attention"),
    *(PrefillCase("kda", BF16, gate, lengths=PACK, form=form) for form in FORMS for gate in (BF16, F32)),
    *(PrefillCase("kda", F32, F32, lengths=PACK, form=form) for form in FORMS),
    *(PrefillCase("gdn", BF16, gate, B=2, T=130, form="softplus", neg_eigval=True) for gate in (BF16, F32)),
    PrefillCase("gdn", F16, F16, lengths=PACK, form="softplus"),
    *(PrefillCase(rule, BF16, F32, K, V, lengths=PACK) for rule in ("kda", "gdn") for K, V in NARROW),
    *(PrefillCase("kda", F32, F32, K, V, lengths=PACK) for K, V in NARROW[:3]),
    PrefillCase("kda", BF16, BF16, 96, 128, lengths=PACK, form="softplus"),
    *(
        PrefillCase("kda", BF16, lengths=PACK, pool=pool, state_v_first=first)
        for pool in (F32, BF16, F16)
        for first in (False, True)
    ),
    *(
        PrefillCase(rule, BF16, lengths=PACK, pool=pool, state_v_first=first, options=(("intracard_segments", 3),))
        for rule, pool, first in (("kda", F32, True), ("kda", F32, False), ("kda", BF16, True), ("gla", F32, False))
    ),
    PrefillCase("gla", BF16, lengths=PACK, pool=BF16),
    PrefillCase("gdn", F32, lengths=PACK, pool=BF16),
]


def make_inputs(case: PrefillCase, device: str, seed: int) -> dict[str, Tensor]:
    """q, k, v and what else the rule reads amid NaN, as the kernel gets them."""
    generator = torch.Generator(device).manual_seed(seed)
    rule, H, HV, K, V = RULES[case.rule], case.H, case.HV, case.K, case.V
    B, T = (1, sum(case.lengths) + case.tail) if case.lengths is not None else (case.B, case.T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def placed(x: Tensor, dtype: torch.dtype) -> Tensor:
        buffer = torch.full((B, T + 64, *x.shape[2:]), float("nan"), dtype=dtype, device=device)
        buffer[:, 32 : 32 + T] = x
        return buffer[:, 32 : 32 + T]

    unit = (lambda x: 3.0 * x) if case.form else (lambda x: torch.nn.functional.normalize(x, dim=-1))
    x = {"q": placed(unit(normal(B, T, H, K)), case.dtype), "k": placed(unit(normal(B, T, H, K)), case.dtype)}
    x["v"] = placed(normal(B, T, HV, V), case.dtype)
    if rule.decay != "none":
        g = normal(B, T, HV, K) if rule.decay == "per_key" else normal(B, T, HV)
        if case.form is None:
            g = torch.where(g > 2.0, -30.0, -(g**2) / 10)
        x["g"] = placed(g, case.gate_dtype)
    if rule.delta:
        beta = normal(B, T, HV)
        x["beta"] = placed(beta if case.form else beta.sigmoid(), case.gate_dtype)
    if rule.read_first:
        x["bonus"] = normal(H, K)
    if case.form and case.form != "bounded-unscaled":
        x["A_log"] = torch.rand((HV,), generator=generator, device=device) * 2
    if case.form:
        x["dt_bias"] = normal(HV, K) if rule.decay == "per_key" else normal(HV)
    return x


def run_case(case: PrefillCase, device: str = "cuda", seed: int = 0) -> dict[str, float]:
    """The largest error over the sequences, for o, the final state and the states before the chunks."""
    x = make_inputs(case, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    offsets = [0, *itertools.accumulate(case.lengths)] if case.lengths is not None else None
    N = case.B if offsets is None else len(offsets) - 1
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device)
    sizes = (case.V, case.K) if case.state_v_first else (case.K, case.V)
    options: dict[str, Any] = dict(case.options)
    if case.form:
        options |= {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        options |= {"allow_neg_eigval": case.neg_eigval}
        if case.form != "softplus":
            options["lower_bound"] = -5.0
    indices = None
    if case.pool is None:
        initial = torch.randn((N, case.HV, *sizes), generator=generator, device=device)
        given = initial
    else:
        pool = torch.full((2 * N + 3, 2, case.HV, *sizes), float("nan"), dtype=case.pool, device=device)[:, 1]
        indices = torch.randperm(2 * N + 3, generator=generator, device=device)[:N].to(torch.int32)
        indices[0] = -1
        initial = torch.randn((N, case.HV, *sizes), generator=generator, device=device).to(case.pool)
        pool[indices[1:].long()] = initial[1:]
        given, before = pool, pool.clone()
        options |= {"state_indices": indices, "null_index": -1}
    names = NAMES.get(case.rule, {})
    arguments = {names.get(name, name): tensor for name, tensor in x.items()}
    if case.rule == "linear_attention":
        options["normalize"] = False
    else:
        options["return_intermediate_states"] = True
    with nan_filled_memory(), torch.no_grad():
        found = OPS[case.rule](
            **arguments, initial_state=given, output_final_state=True, cu_seqlens=cu_seqlens, state_v_first=case.state_v_first,
            **options,
        )  # fmt: skip
    o, final = found[0], found[1]
    wide = {name: tensor.double() for name, tensor in x.items() if name not in ("A_log", "dt_bias")}
    if case.form:
        wide["q"], wide["k"] = l2norm(wide["q"]), l2norm(wide["k"])
        rule_gate = kda_gate if RULES[case.rule].decay == "per_key" else gdn_gate
        A_log = None if "A_log" not in x else x["A_log"].double()
        if rule_gate is gdn_gate:
            wide["g"] = gdn_gate(wide["g"], A_log, x["dt_bias"].double())
        else:
            wide["g"] = kda_gate(wide["g"], A_log, x["dt_bias"].double(), options.get("lower_bound"))
        wide["beta"] = beta_sigmoid(wide["beta"], case.neg_eigval)
    start = initial.double()
    if indices is not None:
        start[0] = 0.0
    traits = RULES[case.rule].as_dict()
    ref_o, ref_final = recurrent_rule(
        **wide, initial_state=start, cu_seqlens=cu_seqlens, state_v_first=case.state_v_first, **traits
    )
    spans = [(b, slice(None)) for b in range(N)]
    if offsets is not None:
        spans = [(0, slice(a, b)) for a, b in itertools.pairwise(offsets)]
        assert not o[:, offsets[-1] :].any(), "outputs past the last sequence must be zero"
    skipped = 0
    if indices is not None:
        skipped = 1
        assert not o[spans[0][0], spans[0][1]].any(), "a sequence without a slot must give zeros"
        untouched = torch.ones(len(given), dtype=torch.bool, device=device)
        untouched[indices[1:].long()] = False
        assert torch.equal(given[untouched].view(torch.uint8), before[untouched].view(torch.uint8)), "another slot was touched"
        final = torch.cat([start[:1].to(case.pool), given[indices[1:].long()]])
        ref_final[0] = start[0]
    errors = {
        "o": max((relative_error(o[b, s], ref_o[b, s]) for b, s in spans[skipped:]), default=0.0),
        "state": max((relative_error(final[n], ref_final[n]) for n in range(skipped, N)), default=0.0),
    }
    if len(found) > 2:
        # The state before a chunk is the final state of the tokens ahead of it.
        states, chunk = found[2], 0
        for n, (b, s) in enumerate(spans):
            length = o[b, s].shape[0]
            for i in range(-(-length // 64)):
                row = states[b, i] if offsets is None else states[0, chunk + i]
                if i == 1 and n >= skipped:
                    part = {k: t[b : b + 1, s][:, :64] if k != "bonus" else t for k, t in wide.items()}
                    _, expected = recurrent_rule(
                        **part, initial_state=start[n : n + 1], state_v_first=case.state_v_first, **traits
                    )
                    errors["states"] = max(errors.get("states", 0.0), relative_error(row, expected[0]))
                elif i == 0 and n >= skipped:
                    assert relative_error(row, start[n]) < 1e-6
            chunk += -(-length // 64)
    return errors


def limit(case: PrefillCase, what: str) -> float:
    narrow_pool = what == "state" and case.pool is not None
    return max(TOLERANCE[case.dtype], TOLERANCE[case.pool] if narrow_pool and case.pool is not None else 0.0)
