"""Inputs of chunk_wy and chunk_scan in float32, and what the workspace between them has to hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kda_tl.ops.prefill_kernels import Workspace
from kda_tl.reference import chunk_rule, recurrent_rule
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec
from kda_tl.specs.rules import RULES, Rule

C, K, V = 64, 128, 128

GATES = {
    "zero": torch.zeros_like,
    "weak": lambda r: -1e-3 * r,
    "strong": lambda r: -20.0 * r,
    "minus 60": lambda r: torch.full_like(r, -60.0),
    "masked": lambda r: torch.where(r[..., :1] < 0.1, -1000.0, -0.01 * r),
}

PACK = (0, 1, 63, 0, 64, 65, 1, 1, 130, 0)


@dataclass(frozen=True)
class Problem:
    """A dense batch of B sequences of T tokens, or with `lengths` a pack and `tail` tokens past its end."""

    B: int = 1
    T: int = 0
    H: int = 1
    HV: int = 1
    gate: str = "weak"
    lengths: tuple[int, ...] | None = None
    tail: int = 0
    rule: Rule = RULES["kda"]

    @property
    def name(self) -> str:
        sizes = f"B{self.B}-T{self.T}" if self.lengths is None else f"pack-of-{len(self.lengths)}"
        rule = next(name for name, rule in RULES.items() if rule == self.rule)
        return f"{rule}-{sizes}-H{self.H}-HV{self.HV}-{self.gate.replace(' ', '-')}"

    @property
    def wy_spec(self) -> ChunkWySpec:
        return ChunkWySpec(K, C, "float32", "float32", self.rule.decay, self.rule.delta, self.rule.read_first)

    @property
    def scan_spec(self) -> ChunkScanSpec:
        return ChunkScanSpec(K, V, C, "float32", "float32", self.rule.delta)

    @property
    def seq_len(self) -> int:
        return self.T if self.lengths is None else sum(self.lengths) + self.tail

    @property
    def num_seqs(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def offsets(self) -> list[int] | None:
        if self.lengths is None:
            return None
        return [sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)]

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.offsets is None else torch.tensor(self.offsets, dtype=torch.int32)

    @property
    def spans(self) -> list[tuple[int, slice]]:
        """Batch row and tokens of every sequence."""
        if self.offsets is None:
            return [(b, slice(0, self.T)) for b in range(self.B)]
        return [(0, slice(a, b)) for a, b in zip(self.offsets, self.offsets[1:])]

    @property
    def slots(self) -> int:
        return self.B * -(-self.T // C) if self.lengths is None else self.seq_len // C + self.num_seqs

    def slot(self, sequence: int, chunk: int) -> int:
        if self.lengths is None:
            return sequence * -(-self.T // C) + chunk
        return self.offsets[sequence] // C + sequence + chunk

    def workspace(self, dtype: torch.dtype = torch.float32) -> Workspace:
        """Full of NaN."""
        made = Workspace.empty(self.slots, self.HV, K, dtype, self.rule.delta, torch.device("cpu"))
        for tensor in made:
            tensor.fill_(torch.nan)
        return made

    def inputs(self, seed: int = 0) -> dict[str, Tensor]:
        """What the rule reads: unit q and k, beta in [0, 2); the tokens past a pack are NaN."""
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=random)

        B, T, H, HV = self.B, self.seq_len, self.H, self.HV
        x = {
            "q": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
            "k": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
            "v": normal(B, T, HV, V),
        }
        if self.rule.decay != "none":
            x["g"] = GATES[self.gate](uniform(B, T, HV, K))
            if self.rule.decay == "scalar":
                x["g"] = x["g"][..., 0].contiguous()
        if self.rule.delta:
            x["beta"] = 2.0 * uniform(B, T, HV)
        if self.offsets is not None:
            for tensor in x.values():
                tensor[:, self.offsets[-1] :] = torch.nan
        if self.rule.read_first:
            x["bonus"] = normal(H, K)
        return {**x, "initial_state": normal(self.num_seqs, HV, K, V)}

    def recurrence(self, x: dict[str, Tensor], scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """o and the final states in float64."""
        return recurrent_rule(**x, scale=scale, cu_seqlens=self.offsets, **self.rule.as_dict())


@dataclass(frozen=True)
class Chunk:
    """One chunk of the truth: where its tokens and its slot are, and the state before it."""

    sequence: int
    slot: int
    tokens: tuple[int, slice]
    state: Tensor  # [HV, K, V] float64


def true_workspace(problem: Problem, x: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Chunk]]:
    """What chunk_wy has to store, float64, one row per chunk, with zeros past the end of a sequence; and the chunks.

    From the definitions: the reference has the products and the inverse, and e^G is one of a sum in float64.
    """
    finite = {name: tensor.nan_to_num(0.0) for name, tensor in x.items()}
    _, _, of_chunks = chunk_rule(**finite, cu_seqlens=problem.offsets, **problem.rule.as_dict())
    NC = len(of_chunks.length)
    rows = {name: torch.zeros(NC, problem.HV, C, K, dtype=torch.float64) for name in ("q_decayed", "k_decayed", "k_to_end")}
    chunks = []
    first = problem.offsets or [0] * problem.B
    group = problem.HV // problem.H
    G = of_chunks.G.expand(-1, -1, -1, K)
    to_read = torch.nn.functional.pad(G, (0, 0, 1, 0))[..., :-1, :] if problem.rule.read_first else G
    for index, (n, start, length) in enumerate(zip(*(getattr(of_chunks, f).tolist() for f in ("sequence", "start", "length")))):
        b, span = 0 if problem.lengths is not None else n, slice(start, start + length)
        q, k = (finite[name][b, span].double().repeat_interleave(group, 1).transpose(0, 1) for name in ("q", "k"))
        rows["q_decayed"][index, :, :length] = q * to_read[index, :, :length].exp()
        rows["k_decayed"][index, :, :length] = k * G[index, :, :length].exp()
        rows["k_to_end"][index, :, :length] = k * (G[index, :, -1:] - G[index, :, :length]).exp()
        chunks.append(Chunk(n, problem.slot(n, (start - first[n]) // C), (b, span), of_chunks.states[index]))
    truth = {**rows, "chunk_decay": G[:, :, -1].exp(), "A_inv": of_chunks.A_inv, "P": of_chunks.P}
    if not problem.rule.delta:
        del truth["k_decayed"], truth["A_inv"]
    return truth, chunks


PROBLEMS = [
    *(Problem(T=T, gate=gate) for T in (1, 64, 100) for gate in GATES),
    *(Problem(lengths=PACK, tail=70, HV=2, gate=gate) for gate in GATES),
    *(Problem(T=T) for T in (63, 65, 128)),
    Problem(B=3, T=130, H=2, HV=4, gate="strong"),
    Problem(B=2, T=64, H=1, HV=3, gate="masked"),
    Problem(lengths=(200,), H=2, HV=6, gate="strong"),
    Problem(lengths=(0, 0, 0), tail=5),
    Problem(lengths=(1,) * 66),
    Problem(lengths=(63, 1), HV=2),
    Problem(lengths=(127, 1, 0, 128), H=2, HV=2, gate="masked"),
]

RULE_PROBLEMS = [
    problem
    for rule in RULES.values()
    for problem in (
        Problem(B=2, T=100, H=2, HV=4, gate="strong", rule=rule),
        Problem(lengths=(1, 0, 64, 70), tail=9, HV=2, gate="masked", rule=rule),
    )
]


def relative_error(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||; infinite where x is not finite, absolute where the truth is zero."""
    error, norm = float((x.double() - truth.double()).norm()), float(truth.double().norm())
    error = error / norm if norm > 0 else error
    return error if error == error else float("inf")
