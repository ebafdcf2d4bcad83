"""Inputs of chunk_wy and chunk_scan in float32, and where the workspace keeps a chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    @property
    def name(self) -> str:
        sizes = f"B{self.B}-T{self.T}" if self.lengths is None else f"pack-of-{len(self.lengths)}"
        return f"{sizes}-H{self.H}-HV{self.HV}-{self.gate.replace(' ', '-')}"

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
    def cu_seqlens(self) -> Tensor:
        """As the kernels take it: a dense batch has one element that nobody may read."""
        return torch.tensor([-99] if self.offsets is None else self.offsets, dtype=torch.int32)

    @property
    def uniform(self) -> int:
        return int(self.lengths is None)

    def slot(self, sequence: int, chunk: int) -> int:
        if self.lengths is None:
            return sequence * -(-self.T // C) + chunk
        return self.offsets[sequence] // C + sequence + chunk

    def workspace(self) -> Tensor:
        """[slots, HV, C, C] full of NaN."""
        slots = self.B * -(-self.T // C) if self.lengths is None else self.seq_len // C + self.num_seqs
        return torch.full((slots, self.HV, C, C), torch.nan)

    def inputs(self, seed: int = 0) -> dict[str, Tensor]:
        """Unit q and k, beta in [0, 2); the tokens past a pack are NaN."""
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
            "g": GATES[self.gate](uniform(B, T, HV, K)),
            "beta": 2.0 * uniform(B, T, HV),
        }
        if self.offsets is not None:
            for tensor in x.values():
                tensor[:, self.offsets[-1] :] = torch.nan
        return {**x, "initial_state": normal(self.num_seqs, HV, K, V)}


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


def relative_error(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||; infinite where x is not finite, absolute where the truth is zero."""
    error, norm = float((x.double() - truth.double()).norm()), float(truth.double().norm())
    error = error / norm if norm > 0 else error
    return error if error == error else float("inf")
