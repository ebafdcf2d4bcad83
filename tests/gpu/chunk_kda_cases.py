"""Cases of chunk_kda that only a device can settle, without pytest: the tests and tools/gpu_check.py run the same list."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import kda_tl
from kda_tl.reference import recurrent_kda

TOLERANCE = 0.004  # ||out - ref|| / ||ref|| in bfloat16, per sequence


@dataclass(frozen=True)
class Case:
    """lengths: a pack; tail: tokens past its end. Otherwise a dense batch of B sequences of T tokens."""

    name: str
    T: int = 0
    B: int = 1
    H: int = 2
    HV: int = 4
    gate: str = "strong"
    lengths: tuple[int, ...] | None = None
    tail: int = 0
    initial_state: bool = True
    state_v_first: bool = False
    strided: bool = False
    v_scale: float = 1.0
    v_drop: tuple[int, float] | None = None  # from this token on, v is multiplied by this


PACK = (0, 1, 63, 0, 64, 65, 1, 1, 300, 0)
GATES = ("weak", "strong", "minus_60", "masked")
CASES = [
    *(Case(f"T{T}-{gate}", T=T, gate=gate) for T in (1, 63, 64, 65, 1000, 8192) for gate in GATES),
    *(Case(f"pack-{gate}", lengths=PACK, gate=gate, tail=70) for gate in GATES),
    Case("pack-one-token", lengths=(1,) * 200, H=1, HV=1),
    Case("pack-long-and-one", lengths=(8191, 1), gate="weak"),
    Case("pack-all-empty", lengths=(0, 0, 0)),
    Case("dense-batch", T=130, B=3),
    Case("dense-v-first", T=200, B=2, state_v_first=True),
    Case("pack-v-first", lengths=PACK, state_v_first=True),
    Case("no-initial-state", T=500, initial_state=False),
    Case("one-head", T=129, H=1, HV=1),
    Case("odd-heads", T=129, H=3, HV=12),
    Case("many-heads", T=512, H=32, HV=32, gate="weak"),
    *(
        Case(f"v-times-{s:g}-{gate}", T=200, gate=gate, v_scale=s)
        for s in (1e-12, 1e-5, 1e5, 1e12)
        for gate in ("weak", "strong")
    ),
    *(
        Case(f"v-drops-{to:g}-{gate}-{'S0' if S0 else 'no-S0'}", T=320, gate=gate, v_drop=(128, to), initial_state=S0)
        for to in (0.0, 1e-5, 1e5)
        for gate in ("weak", "strong", "minus_60", "masked")
        for S0 in (False, True)
    ),
    Case("strided", T=321, B=2, strided=True),
    Case("strided-pack", lengths=PACK, tail=9, strided=True),
]


def make_inputs(case: Case, device: str, seed: int, K: int = 128, V: int = 128) -> dict[str, object]:
    """Fresh random inputs in the middle of buffers full of NaN, so that a read past an end shows up."""
    generator = torch.Generator(device).manual_seed(seed)
    T = sum(case.lengths) + case.tail if case.lengths is not None else case.T
    B, H, HV = case.B, case.H, case.HV

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def placed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        heads = x.shape[2] + (3 if case.strided else 0)
        buffer = torch.full((B, T + 64, heads, *x.shape[3:]), float("nan"), dtype=dtype, device=device)
        view = buffer[:, 32 : 32 + T, : x.shape[2]]
        view.copy_(x)
        return view

    uniform = torch.rand((B, T, HV, K), generator=generator, device=device)
    if case.gate == "weak":
        g = -1e-3 * uniform
    elif case.gate == "minus_60":
        g = -60 * uniform
    else:
        A = torch.rand((HV, 1), generator=generator, device=device) * 15 + 1
        g = -A * torch.nn.functional.softplus(random(B, T, HV, K) - 2)
        if case.gate == "masked":
            g = torch.where(torch.rand((B, T, HV, 1), generator=generator, device=device) < 0.1, -1000.0, 1e-3 * g)
    unit = torch.nn.functional.normalize
    values = case.v_scale * random(B, T, HV, V)
    if case.v_drop is not None:
        values[:, case.v_drop[0] :] *= case.v_drop[1]
    offsets = [0]
    for length in case.lengths or ():
        offsets.append(offsets[-1] + length)
    N = B if case.lengths is None else len(case.lengths)
    shape = (N, HV, V, K) if case.state_v_first else (N, HV, K, V)
    return {
        "q": placed(unit(random(B, T, H, K), dim=-1), torch.bfloat16),
        "k": placed(unit(random(B, T, H, K), dim=-1), torch.bfloat16),
        "v": placed(values, torch.bfloat16),
        "g": placed(g, torch.float32),
        "beta": placed(torch.rand((B, T, HV), generator=generator, device=device), torch.float32),
        "initial_state": case.v_scale * random(*shape) if case.initial_state else None,
        "cu_seqlens": torch.tensor(offsets, device=device) if case.lengths is not None else None,
        "state_v_first": case.state_v_first,
    }


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Every torch.empty is full of NaN, so an element that no kernel writes is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def relative_error(out: torch.Tensor, ref: torch.Tensor, floor: float = 1e-30) -> float:
    """||out - ref|| / ||ref||. References under `floor` count as that: 1e-30 is what float32 need not hold; NaN counts as
    infinite."""
    error = (out.double() - ref).norm().item() / max(ref.norm().item(), floor)
    return error if error == error else float("inf")


def run_case(case: Case, device: str = "cuda", seed: int = 0) -> dict[str, float]:
    """The largest error over the sequences, for o and for the final state; what lies past the pack must be zero."""
    inputs = make_inputs(case, device, seed)
    with nan_filled_memory(), torch.no_grad():
        o, state = kda_tl.chunk_kda(**inputs, output_final_state=True)
    ref_o, ref_state = recurrent_kda(**inputs)
    if case.lengths is None:
        spans = [(b, slice(None)) for b in range(case.B)]
    else:
        offsets = inputs["cu_seqlens"].tolist()
        spans = [(0, slice(a, b)) for a, b in itertools.pairwise(offsets)]
        assert not o[:, offsets[-1] :].any(), "outputs past the last sequence must be zero"
    # Once nothing is written, a state may decay by more than 2^-24 within a chunk, the step of float16 operands: what is
    # left has its order of magnitude then. Inputs here are about 1.
    floor = 1e-6 if case.v_drop is not None and case.v_drop[1] == 0.0 else 1e-30
    return {
        "o": max([relative_error(o[b, s], ref_o[b, s]) for b, s in spans], default=0.0),
        "state": max([relative_error(state[n], ref_state[n], floor) for n in range(len(spans))], default=0.0),
    }
