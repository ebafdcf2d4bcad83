"""Problems of the decode kernels: positional arguments as the programs list them, and the truth from the token recurrence.

Full-size calls rotate over buffers that no cache holds together, as the layers of a model do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kda_tl.reference import beta_sigmoid, kda_gate, l2norm, recurrent_rule
from kda_tl.specs.decode import DecodeFlag, RecurrentDecodeSpec
from kda_tl.specs.deltalog import CURSOR_ROWS, DeltaLogDecodeSchedule, DeltaLogDecodeSpec
from kda_tl.specs.floors import Problem
from kda_tl.specs.gates import BetaForm, GateForm
from kda_tl.specs.rules import Rule
from kda_tl.specs.schedules import Schedule
from kda_tl.tuning.problems_case import Calls, Case, Random, absent, nothing, tolerance, torch_dtype

__all__ = ["check_problem", "deltalog_case", "recurrent_case"]

LOWER_BOUND = -5.0
NO_SLOT = -1
UNCACHED_BYTES = 2**28
"""More than any cache of a device: an H200's is 60 MB."""
MOST_BUFFERS = 64
CHECKED_STEPS = 35
"""Tokens of a checked DeltaLog walk: past the second fold for any interval up to 16, whatever the first window."""


def check_problem(spec: RecurrentDecodeSpec | DeltaLogDecodeSpec) -> Problem:
    if isinstance(spec, DeltaLogDecodeSpec):
        return Problem(sequences=3, tokens=CHECKED_STEPS, H=2, HV=2, V=spec.head_dim_v)
    return Problem(sequences=3, tokens=1, H=2, HV=4)


def _buffers(bytes_of_one: int, device: torch.device, exact: bool) -> int:
    if exact or device.type == "cpu":
        return 1
    return max(1, min(MOST_BUFFERS, -(-UNCACHED_BYTES // bytes_of_one)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Tokens:
    """Raw inputs of `tokens` tokens of every request, as models hand them over; rule KDA's where the spec leaves it open."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor  # [n, T, HV, K or 1]
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor  # [HV, K or 1]
    bonus: Tensor  # [H, K]

    @classmethod
    def make(cls, random: Random, problem: Problem, K: int, V: int, D: int, dtype: str, raw_gate: bool) -> _Tokens:
        n, T, H, HV = problem.sequences, problem.tokens, problem.H, problem.HV
        q, k = (random.normal(n, T, H, K, dtype=dtype) for _ in range(2))
        g = random.normal(n, T, HV, D, dtype=dtype) if raw_gate else (-0.5 * random.uniform(n, T, HV, D)).to(torch_dtype(dtype))
        return cls(
            q, k, random.normal(n, T, HV, V, dtype=dtype), g, random.normal(n, T, HV, dtype=dtype),
            random.normal(HV), random.normal(HV, D), random.normal(H, K),
        )  # fmt: skip

    def truth(self, rule: Rule, state: Tensor) -> tuple[Tensor, Tensor]:
        """o and final states [n, HV, K, V] in float64, from states [n, HV, K, V]."""
        x: dict[str, Any] = {"q": self.q.double(), "k": self.k.double(), "v": self.v}
        g = self.g.double()
        if rule.delta:
            x |= {"q": l2norm(x["q"]), "k": l2norm(x["k"]), "beta": beta_sigmoid(self.beta.double())}
            g = kda_gate(g, self.A_log.double(), self.dt_bias.double(), LOWER_BOUND)
        else:
            x["bonus"] = self.bonus
        x["g"] = g if rule.decay == "per_key" else g[..., 0]
        return recurrent_rule(**x, initial_state=state, **rule.as_dict())  # type: ignore[arg-type]


def recurrent_case(spec: RecurrentDecodeSpec, problem: Problem, device: torch.device, seed: int, exact: bool) -> Case:
    """KDA, in place in a pool [slots, HV, V, K] whose slots are named in a random order."""
    random = Random.of(device, seed)
    n, HV, K, V, dtype = problem.sequences, problem.HV, spec.head_dim_k, problem.V, spec.dtype
    wide = dtype == "float32"
    flags = DecodeFlag.UNIFORM | DecodeFlag.DELTA | DecodeFlag.DECAY | DecodeFlag.HAS_BETA | DecodeFlag.L2NORM
    flags |= DecodeFlag.LOAD_STATE | DecodeFlag.STORE_STATE | DecodeFlag.INDEXED_IN | DecodeFlag.INDEXED_OUT
    flags |= DecodeFlag.V_FIRST_IN | DecodeFlag.V_FIRST_OUT | DecodeFlag.HAS_A_LOG | DecodeFlag.HAS_DT_BIAS
    flags |= (DecodeFlag.WIDE_GATE | DecodeFlag.WIDE_BETA) if wide else DecodeFlag(0)
    tokens = _Tokens.make(random, problem, K, V, K, dtype, raw_gate=True)
    order = torch.randperm(n, generator=random.generator, device=device).to(torch.int32)
    o = torch.empty_like(tokens.v)
    pools = [random.normal(n, HV, V, K, dtype=spec.state_dtype)]
    pools += [pools[0].clone() for _ in range(_buffers(pools[0].nbytes, device, exact) - 1)]
    first = pools[0].clone()
    no_g, no_beta = nothing(device, dtype, 4), nothing(device, dtype, 3)
    no_g_wide, no_beta_wide = nothing(device, "float32", 4), nothing(device, "float32", 3)
    gates = (no_g, tokens.g, no_beta, tokens.beta) if wide else (tokens.g, no_g_wide, tokens.beta, no_beta_wide)

    def call(pool: Tensor) -> tuple[Any, ...]:
        return (
            tokens.q, tokens.k, tokens.v, *gates, tokens.A_log, tokens.dt_bias, nothing(device, "float32", 2),
            nothing(device, "int32"), order, nothing(device, "uint8"), o, pool, pool, n, K**-0.5, LOWER_BOUND, int(flags),
            int(GateForm.BOUNDED), int(BetaForm.SIGMOID), NO_SLOT,
        )  # fmt: skip

    calls = [call(pool) for pool in pools]

    def reset(_: Schedule) -> None:
        o.fill_(torch.nan)
        pools[0].copy_(first)

    truth = None
    if exact:
        o_true, states = tokens.truth(Rule(), first[order.long()].double().transpose(-1, -2))
        pool = first.double()
        pool[order.long()] = states.transpose(-1, -2)
        truth = {"o": o_true, "pool": pool}
    return Case(
        lambda _: calls, reset, {"o": o, "pool": pools[0]}, truth, 4e-3 if spec.state_dtype != "float32" else tolerance(dtype)
    )


def deltalog_case(spec: DeltaLogDecodeSpec, problem: Problem, device: torch.device, seed: int, exact: bool) -> Case:
    """One token per call. A small problem is a walk over all its tokens, with folds and logs that grow; a full-size one a step
    of a steady state, cursors spread evenly over the interval, so that one slot of `merge_every` folds in each."""
    random = Random.of(device, seed)
    n, T, H, HV, K, V, D = (
        problem.sequences,
        problem.tokens,
        problem.H,
        problem.HV,
        spec.head_dim_k,
        spec.head_dim_v,
        spec.decay_size,
    )
    capacity, dtype = spec.capacity, spec.dtype
    rule = Rule(spec.decay, spec.delta, spec.read_first)
    tokens = _Tokens.make(random, problem, K, V, D, dtype, raw_gate=spec.delta)
    order = torch.randperm(n, generator=random.generator, device=device).to(torch.int32)
    o = torch.empty_like(tokens.v)
    start = random.normal(n, HV, V, K, dtype=spec.state_dtype)
    if not spec.state_v_first:
        start = start.transpose(-1, -2).contiguous().transpose(-1, -2)
    cursor = torch.empty((n, HV, V // CURSOR_ROWS, 2), dtype=torch.int32, device=device)

    def pool() -> tuple[Tensor, ...]:
        base = torch.empty_like(start)  # keeps the order of the strides
        base.copy_(start)
        logs = (
            random.normal(n, HV, capacity, K, dtype=dtype), 0.1 * random.normal(n, HV, capacity, V),
            random.uniform(n, HV, capacity, D),
        )  # fmt: skip
        return (base, *logs, cursor.clone(), order, order)

    pools = [pool()]
    pools += [pool() for _ in range(_buffers(sum(x.nbytes for x in pools[0][:2]), device, exact) - 1)]
    bonus = tokens.bonus.repeat_interleave(HV // H, 0)
    wide_g, wide_beta = absent(device, "float32", n, 1, HV, D), absent(device, "float32", n, 1, HV)
    form, strength = (GateForm.BOUNDED, BetaForm.SIGMOID) if spec.delta else (GateForm.IDENTITY, BetaForm.IDENTITY)
    numbers = (K**-0.5, LOWER_BOUND, int(form), int(strength), int(spec.delta), int(spec.delta), 0, 0, NO_SLOT)

    def calls(schedule: Schedule) -> Calls:
        assert isinstance(schedule, DeltaLogDecodeSchedule)
        return [
            (
                tokens.q[:, t : t + 1], tokens.k[:, t : t + 1], tokens.v[:, t : t + 1], tokens.g[:, t : t + 1],
                tokens.beta[:, t : t + 1], wide_g, wide_beta, tokens.A_log, tokens.dt_bias, bonus, *held, o[:, t : t + 1],
                *numbers, 1, schedule.merge_every, 1, 0,
            )
            for held in pools
            for t in range(T)
        ]  # fmt: skip

    def spread_cursors(schedule: Schedule) -> None:
        """A checked walk starts from empty logs, whose first folds lie apart; others from where a steady state is."""
        assert isinstance(schedule, DeltaLogDecodeSchedule)
        every = schedule.merge_every
        for index, (*_, cursors, _, _) in enumerate(pools):
            slot = index * n + torch.arange(n, dtype=torch.int32, device=device)[:, None, None]
            cursors[..., 0] = 0 if exact else slot % every
            cursors[..., 1] = 1 + slot % every if exact else every

    def reset(schedule: Schedule) -> None:
        o.fill_(torch.nan)
        for base, *_ in pools:
            base.copy_(start)
        spread_cursors(schedule)

    truth = None
    if exact:
        o_true, _ = tokens.truth(rule, start[order.long()].double().transpose(-1, -2))
        truth = {"o": o_true}
    limit = 5e-3 if spec.state_dtype != "float32" else tolerance(dtype)
    return Case(
        calls, reset, {"o": o}, truth, limit, lambda schedule: getattr(schedule, "merge_every", None), spread_cursors
    )  # fmt: skip
