"""Problems of recurrent decode: positional arguments as the program lists them, and the truth from the token recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_tl.reference import beta_sigmoid, kda_gate, l2norm, recurrent_rule
from kda_tl.specs.decode import DecodeFlag, RecurrentDecodeSpec
from kda_tl.specs.floors import Problem
from kda_tl.specs.gates import BetaForm, GateForm
from kda_tl.specs.rules import Rule
from kda_tl.tuning.problems_case import Case, Random, nothing, tolerance

__all__ = ["check_problem", "recurrent_case"]

LOWER_BOUND = -5.0
NO_SLOT = -1
UNCACHED_BYTES = 2**28
"""More than any cache of a device: an H200's is 60 MB."""
MOST_BUFFERS = 64

FLAGS = (
    DecodeFlag.UNIFORM | DecodeFlag.DELTA | DecodeFlag.DECAY | DecodeFlag.HAS_BETA | DecodeFlag.L2NORM | DecodeFlag.LOAD_STATE
    | DecodeFlag.STORE_STATE | DecodeFlag.INDEXED_IN | DecodeFlag.INDEXED_OUT | DecodeFlag.V_FIRST_IN | DecodeFlag.V_FIRST_OUT
    | DecodeFlag.HAS_A_LOG | DecodeFlag.HAS_DT_BIAS
)  # fmt: skip


def check_problem(spec: RecurrentDecodeSpec) -> Problem:
    return Problem(sequences=3, tokens=1, H=2, HV=4)


def recurrent_case(spec: RecurrentDecodeSpec, problem: Problem, device: torch.device, seed: int, exact: bool) -> Case:
    """KDA as models call it, in place in a pool [slots, HV, V, K] whose slots are named in a random order.

    Full-size passes rotate over pools that no cache holds together, as the layers of a model do.
    """
    random = Random.of(device, seed)
    n, T, H, HV = problem.sequences, problem.tokens, problem.H, problem.HV
    K, V, dtype = spec.head_dim_k, problem.V, spec.dtype
    q, k = (random.normal(n, T, H, K, dtype=dtype) for _ in range(2))
    v, g = random.normal(n, T, HV, V, dtype=dtype), random.normal(n, T, HV, K, dtype=dtype)
    beta, A_log, dt_bias = random.normal(n, T, HV, dtype=dtype), random.normal(HV), random.normal(HV, K)
    order = torch.randperm(n, generator=random.generator, device=device).to(torch.int32)
    pools = [random.normal(n, HV, V, K, dtype=spec.state_dtype)]
    first = pools[0].clone()
    if not exact and device.type != "cpu":
        pools += [first.clone() for _ in range(min(MOST_BUFFERS, -(-UNCACHED_BYTES // first.nbytes)) - 1)]
    o = torch.empty_like(v)
    wide = dtype == "float32"
    flags = FLAGS | DecodeFlag.WIDE_GATE | DecodeFlag.WIDE_BETA if wide else FLAGS
    no_g, no_beta = nothing(device, dtype, 4), nothing(device, dtype, 3)
    no_g_wide, no_beta_wide = nothing(device, "float32", 4), nothing(device, "float32", 3)
    gates = (no_g, g, no_beta, beta) if wide else (g, no_g_wide, beta, no_beta_wide)

    def call(pool: Tensor) -> tuple[Any, ...]:
        return (
            q, k, v, *gates, A_log, dt_bias, nothing(device, "float32", 2), nothing(device, "int32"), order,
            nothing(device, "uint8"), o, pool, pool, n, K**-0.5, LOWER_BOUND, int(flags), int(GateForm.BOUNDED),
            int(BetaForm.SIGMOID), NO_SLOT,
        )  # fmt: skip

    def reset() -> None:
        o.fill_(torch.nan)
        for pool in pools:
            pool.copy_(first)

    truth = None
    if exact:
        decay = kda_gate(g.double(), A_log.double(), dt_bias.double(), LOWER_BOUND)
        states = first[order.long()].double().transpose(-1, -2)
        o_true, states = recurrent_rule(
            l2norm(q.double()), l2norm(k.double()), v, decay, beta_sigmoid(beta.double()), initial_state=states,
            **Rule().as_dict(),  # type: ignore[arg-type]
        )  # fmt: skip
        pool = first.double()
        pool[order.long()] = states.transpose(-1, -2)
        truth = {"o": o_true, "pool": pool}
    limit = 4e-3 if spec.state_dtype != "float32" else tolerance(dtype)
    return Case([call(pool) for pool in pools], reset, {"o": o, "pool": pools[0]}, truth, limit)
