"""Problems of the prefill kernels: positional arguments as the programs list them, and the truth from the chunk form.

Small problems are made of tokens; a full-size scan gets a random workspace of the same kind instead, decays in [0.5, 1] and
a contracting A_inv, since the reference would take minutes for a real one.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from kda_tl.reference import beta_sigmoid, chunk_rule, kda_gate, l2norm, merge_affine, recurrent_rule, sequence_affine
from kda_tl.specs.floors import Problem
from kda_tl.specs.gates import BetaForm, GateForm
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec
from kda_tl.specs.rules import Rule
from kda_tl.tuning.problems_case import Case, Random, nothing, tolerance, torch_dtype

__all__ = ["chunk_scan_case", "chunk_wy_case", "merge_case", "pre_scan_case"]

LOWER_BOUND = -5.0
NO_INDEX = -1
Tensors = dict[str, Tensor]


def chunk_wy_case(spec: ChunkWySpec, problem: Problem, device: torch.device, seed: int, exact: bool) -> Case:
    """Raw gates, bounded or softplus, l2 norms and sigmoid in the kernel, as models call it."""
    random = Random.of(device, seed)
    B, T, H, HV, K, C = problem.sequences, problem.tokens, problem.H, problem.HV, spec.head_dim_k, spec.chunk_size
    per_key, scalar = spec.decay == "per_key", spec.decay == "scalar"
    q, k = (random.normal(B, T, H, K, dtype=spec.dtype) for _ in range(2))
    g = random.normal(B, T, HV, *([K] if per_key else []), dtype=spec.gate_dtype) if spec.decay != "none" else None
    beta = random.normal(B, T, HV, dtype=spec.gate_dtype) if spec.delta else None
    A_log, dt_bias = random.normal(HV), random.normal(HV * (K if per_key else 1))
    bonus = random.normal(H * K)
    form = GateForm.BOUNDED if per_key else GateForm.SOFTPLUS if scalar else GateForm.IDENTITY
    slots, width = problem.chunks(C), torch_dtype(spec.operand_dtype)

    def tile(*shape: int, stored: bool = True, dtype: torch.dtype = width) -> Tensor:
        return torch.empty((slots if stored else 0, HV, *shape), dtype=dtype, device=device)

    out = {
        "q_decayed": tile(C, K), "k_decayed": tile(C, K, stored=spec.delta), "k_to_end": tile(C, K),
        "chunk_decay": tile(K, dtype=torch.float32), "A_inv": tile(C, C, stored=spec.delta), "P": tile(C, C),
    }  # fmt: skip
    no_gate = nothing(device, spec.gate_dtype, rank=3)
    call = (
        q, k, no_gate if g is None else g, no_gate if beta is None else beta, A_log, dt_bias,
        bonus if spec.read_first else nothing(device, "float32"), nothing(device, "int32"), *out.values(),
        LOWER_BOUND, int(form), int(BetaForm.SIGMOID if spec.delta else BetaForm.IDENTITY), 1, 1,
    )  # fmt: skip
    truth = None
    if exact:
        x = {"q": l2norm(q.double()), "k": l2norm(k.double()), "v": q.new_zeros(B, T, HV, 1)}
        if g is not None:
            rows = g.double() if per_key else g.double().unsqueeze(-1)
            decay = kda_gate(rows, A_log.double(), dt_bias.double().view(HV, -1), LOWER_BOUND if per_key else None)
            x["g"] = decay if per_key else decay[..., 0]
        if beta is not None:
            x["beta"] = beta_sigmoid(beta.double())
        if spec.read_first:
            x["bonus"] = bonus.view(H, K)
        truth = _workspace_of(x, Rule(spec.decay, spec.delta, spec.read_first), HV)
    return Case([call], partial(_poison, out), out, truth, tolerance(spec.dtype))


def _poison(outputs: Tensors) -> None:
    for tensor in outputs.values():
        tensor.fill_(torch.nan)


def _workspace_of(x: Tensors, rule: Rule, HV: int) -> Tensors:
    """What chunk_wy has to store of activated inputs, in float64; rows past the end of a sequence are zero."""
    _, T, H, K = x["q"].shape
    _, _, of = chunk_rule(**x, **rule.as_dict())  # type: ignore[arg-type]
    C, NC = of.P.shape[-1], len(of.length)
    G = of.G.expand(NC, HV, C, K)
    before = torch.nn.functional.pad(G, (0, 0, 1, 0))[..., :-1, :] if rule.read_first else G
    # Tokens as chunks, padded to whole ones; slot order is chunk order, sequence by sequence.
    padded = -T % C

    def chunks(rows: Tensor) -> Tensor:
        wide = rows.double().repeat_interleave(HV // H, 2)
        return torch.nn.functional.pad(wide, (0, 0, 0, 0, 0, padded)).view(NC, C, HV, K).transpose(1, 2)

    q, k = chunks(x["q"]), chunks(x["k"])
    inside = torch.arange(C, device=of.length.device) < of.length[:, None]
    mask = inside[:, None, :, None].double()
    found = {
        "q_decayed": q * before.exp() * mask,
        "k_decayed": k * G.exp() * mask,
        "k_to_end": k * (G[..., -1:, :] - G).exp() * mask,
        "chunk_decay": G[..., -1, :].exp(),
        "A_inv": of.A_inv * mask,
        "P": of.P,
    }
    return {name: rows for name, rows in found.items() if rule.delta or name not in ("k_decayed", "A_inv")}


def _scan_inputs(
    spec: ChunkScanSpec | IntracardPreScanSpec, problem: Problem, random: Random, exact: bool
) -> tuple[Tensors, Tensors]:
    """(workspace and v, as a kernel reads them; activated tokens q, k, g, beta in float64, or none)."""
    B, T, HV, K, C = problem.sequences, problem.tokens, problem.HV, spec.head_dim_k, spec.chunk_size
    slots, width = problem.chunks(C), spec.operand_dtype
    device = random.device
    x: Tensors = {}
    if exact:
        rule = Rule("per_key", spec.delta)
        x = {name: l2norm(random.normal(B, T, HV, K).double()) for name in ("q", "k")}
        x["g"] = -0.02 * random.uniform(B, T, HV, K).double()  # weak: a map of segments keeps its relative accuracy
        if spec.delta:
            x["beta"] = random.uniform(B, T, HV).double()
        made = _workspace_of({**x, "v": x["q"].new_zeros(B, T, HV, 1)}, rule, HV)
        made = {
            name: rows.to(torch_dtype("float32" if name == "chunk_decay" else width)).contiguous()
            for name, rows in made.items()
        }
    else:
        made = {name: random.normal(slots, HV, C, K).mul_(K**-0.5).to(torch_dtype(width)) for name in ("q_decayed", "k_to_end")}
        made["chunk_decay"] = 0.5 + 0.5 * random.uniform(slots, HV, K)
        made["P"] = random.normal(slots, HV, C, C).mul_(K**-0.5).tril_().to(torch_dtype(width))
        if spec.delta:
            made["k_decayed"] = random.normal(slots, HV, C, K).mul_(K**-0.5).to(torch_dtype(width))
            unit = torch.eye(C, device=device)
            made["A_inv"] = (0.3 * unit + 0.01 * random.normal(slots, HV, C, C)).tril_().to(torch_dtype(width))
    if not spec.delta:
        made["k_decayed"] = torch.empty((0, HV, C, K), dtype=torch_dtype(width), device=device)
        made["A_inv"] = torch.empty((0, HV, C, C), dtype=torch_dtype(width), device=device)
    made["v"] = random.normal(B, T, HV, spec.head_dim_v, dtype=spec.dtype)
    return made, x


def chunk_scan_case(spec: ChunkScanSpec, problem: Problem, device: torch.device, seed: int, exact: bool) -> Case:
    """States in and out; cut into segments where the problem says so."""
    random = Random.of(device, seed)
    HV, K, V = problem.HV, spec.head_dim_k, spec.head_dim_v
    w, x = _scan_inputs(spec, problem, random, exact)
    initial = random.normal(problem.sequences, HV, K, V, dtype=spec.state_dtype)
    out = {"o": torch.empty_like(w["v"]), "final_state": torch.empty_like(initial)}
    segments, chunks = problem.segments, problem.chunks(spec.chunk_size) // problem.sequences
    segment_states = random.normal(problem.sequences, segments, HV, K, V) if segments > 1 else _no_states(random, HV, K, V, 5)
    scale = K**-0.5
    call = (
        w["v"], nothing(device, "int32"), w["q_decayed"], w["k_decayed"], w["k_to_end"], w["chunk_decay"], w["A_inv"], w["P"],
        out["o"], initial, out["final_state"], nothing(device, "int32"), nothing(device, "uint8"), segment_states,
        _no_states(random, HV, K, V, 4), scale, problem.sequences, 1, 1, 0, 1, 0, 0, NO_INDEX, segments, -(-chunks // segments),
    )  # fmt: skip
    truth = None
    if exact:
        o, state = recurrent_rule(
            **x, v=w["v"], scale=scale, initial_state=initial, **Rule("per_key", spec.delta).as_dict()  # type: ignore[arg-type]
        )  # fmt: skip
        truth = {"o": o, "final_state": state}
    return Case([call], partial(_poison, out), out, truth, tolerance(spec.dtype))


def _no_states(random: Random, HV: int, K: int, V: int, rank: int) -> Tensor:
    return torch.empty((0, HV, K, V) if rank == 4 else (0, 1, HV, K, V), device=random.device)


def pre_scan_case(spec: IntracardPreScanSpec, problem: Problem, device: torch.device, seed: int, exact: bool) -> Case:
    """Maps of all segments but the last."""
    random = Random.of(device, seed)
    B, HV, K, V, C = problem.sequences, problem.HV, spec.head_dim_k, spec.head_dim_v, spec.chunk_size
    w, x = _scan_inputs(spec, problem, random, exact)
    cuts, chunks = problem.segments - 1, -(-(problem.chunks(C) // B) // problem.segments)
    out = {
        "transitions": torch.empty((B, cuts, HV, K if spec.delta else 1, K), device=device),
        "biases": torch.empty((B, cuts, HV, K, V), device=device),
    }
    call = (
        w["v"], nothing(device, "int32"), w["k_decayed"], w["k_to_end"], w["chunk_decay"], w["A_inv"], *out.values(),
        B, 1, cuts, chunks, 0,
    )  # fmt: skip
    truth = None
    if exact:
        bounds = [cut * chunks * C for cut in range(cuts + 1)]
        inner = {name: rows[:, : bounds[-1]] for name, rows in {**x, "v": w["v"]}.items() if name != "q"}
        M, bias = sequence_affine(**inner, cu_seqlens=bounds, decay="per_key", delta=spec.delta)  # type: ignore[arg-type]
        M = M.transpose(-1, -2) if spec.delta else M.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        truth = {"transitions": M.unsqueeze(0), "biases": bias.unsqueeze(0)}
    return Case([call], partial(_poison, out), out, truth, tolerance(spec.dtype))


def merge_case(spec: IntracardMergeSpec, problem: Problem, device: torch.device, seed: int, exact: bool) -> Case:
    """From random contracting maps and initial states."""
    random = Random.of(device, seed)
    N, HV, K, V, segments = problem.sequences, problem.HV, spec.head_dim_k, spec.head_dim_v, problem.segments
    cuts, chunks = segments - 1, -(-(problem.chunks(spec.chunk_size) // N) // segments)
    if spec.delta:
        M = 0.5 * torch.eye(K, device=device) + 0.3 * K**-0.5 * random.normal(N, cuts, HV, K, K)
    else:
        M = random.uniform(N, cuts, HV, 1, K)
    bias, initial = random.normal(N, cuts, HV, K, V), random.normal(N, HV, K, V, dtype=spec.dtype)
    out = {"segment_states": torch.empty((N, segments, HV, K, V), device=device)}
    call = (
        M, bias, nothing(device, "int32"), initial, nothing(device, "int32"), nothing(device, "uint8"), out["segment_states"],
        problem.tokens, N, 1, 1, 0, 0, NO_INDEX, chunks,
    )  # fmt: skip
    truth = None
    if exact:
        maps = M.double().transpose(-1, -2) if spec.delta else torch.diag_embed(M.double().squeeze(-2))
        states = merge_affine(initial.double(), maps.transpose(0, 1), bias.double().transpose(0, 1))
        truth = {"segment_states": states.transpose(0, 1)}
    return Case([call], partial(_poison, out), out, truth, tolerance(spec.dtype) if spec.dtype == "float32" else 4e-3)


def check_problem(spec: ChunkScanSpec | ChunkWySpec | IntracardPreScanSpec | IntracardMergeSpec) -> Problem:
    """Small, with a last chunk that is not full; maps are of one sequence, in three segments."""
    if isinstance(spec, IntracardPreScanSpec | IntracardMergeSpec):
        return Problem(sequences=1, tokens=64 * 5 + 10, H=2, HV=2, segments=3)
    small = Problem(sequences=2, tokens=100, H=2, HV=2)
    return dataclasses.replace(small, HV=4) if isinstance(spec, ChunkWySpec) else small
