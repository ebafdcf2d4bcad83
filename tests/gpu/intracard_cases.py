"""Cases of sequences that are cut into segments, without pytest: chunk_kda against the recurrence and against itself uncut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from chunk_kda_cases import PACK, Case, make_inputs, nan_filled_memory, relative_error

import kda_tl
from kda_tl.reference import recurrent_kda

CONSTANT_GATES = {"minus_5": -5.0, "minus_0.05": -0.05, "minus_1e-4": -1e-4, "zero": 0.0}


@dataclass(frozen=True)
class Cut:
    """A case, the segments that are asked for (None: the plan's), and a gate of its own: constant, or "mixed"."""

    case: Case
    segments: int | None
    gate: str | None = None

    @property
    def name(self) -> str:
        return "-".join([self.case.name, f"{self.segments or 'planned'}-segments", *filter(None, [self.gate])])


def _one(T: int, **options: Any) -> Case:
    return Case(f"T{T}", **{"T": T, "H": 1, "HV": 1, "gate": "weak", **options})


CUTS = [
    # MoonshotAI/FlashKDA#9: no T is a multiple of a segment.
    *(Cut(_one(2000), n, gate) for n in (2, 4, 7) for gate in (*CONSTANT_GATES, "mixed")),
    *(Cut(_one(16384 - 100), n, "mixed") for n in (7, None)),
    *(Cut(Case(f"T4000-{gate}", T=4000, gate=gate), n) for gate in ("weak", "strong", "minus_60", "masked") for n in (5, None)),
    *(
        Cut(Case(f"pack-{gate}", lengths=(*PACK, 1000, 129, 5), gate=gate, tail=70), n)
        for gate in ("weak", "masked")
        for n in (3, 9)
    ),
    Cut(Case("pack-long-and-one", lengths=(8191, 1), gate="weak"), None),
    Cut(Case("pack-all-empty", lengths=(0, 0, 0)), 4),
    Cut(Case("dense-batch", T=700, B=3, gate="weak"), 4),
    Cut(Case("dense-v-first", T=700, B=2, state_v_first=True), 4),
    Cut(Case("no-initial-state", T=700, initial_state=False), 4),
    Cut(Case("strided", T=700, B=2, strided=True), 4),
    Cut(Case("odd-heads", T=700, H=3, HV=12), 4),
    *(Cut(Case(f"v-times-{s:g}", T=700, gate="weak", v_scale=s), 4) for s in (1e-12, 1e12)),
    *(Cut(Case(f"v-drops-{to:g}", T=700, gate="weak", v_drop=(300, to)), 4) for to in (0.0, 1e-5, 1e5)),
]


def make_cut_inputs(cut: Cut, device: str, seed: int) -> dict[str, Any]:
    x = make_inputs(cut.case, device, seed)
    g = x["g"]
    if cut.gate is not None:
        g.fill_(CONSTANT_GATES.get(cut.gate, -5.0))
        if cut.gate == "mixed":
            g[..., 3] = 0.0
    return x


def run_cut(cut: Cut, device: str = "cuda", seed: int = 0) -> dict[str, float]:
    """The largest error over the sequences against the recurrence, for o, its worst single token, and the final state."""
    x = make_cut_inputs(cut, device, seed)
    with nan_filled_memory(), torch.no_grad():
        o, state = kda_tl.chunk_kda(**x, output_final_state=True, intracard_segments=cut.segments)
    ref_o, ref_state = recurrent_kda(**x)
    if cut.case.lengths is None:
        spans = [(b, slice(None)) for b in range(cut.case.B)]
    else:
        offsets = x["cu_seqlens"].tolist()
        spans = [(0, slice(a, b)) for a, b in itertools.pairwise(offsets)]
        assert not o[:, offsets[-1] :].any(), "outputs past the last sequence must be zero"
    errors = {"o": 0.0, "token": 0.0, "state": 0.0}
    for n, (b, span) in enumerate(spans):
        errors["o"] = max(errors["o"], relative_error(o[b, span], ref_o[b, span]))
        errors["state"] = max(errors["state"], relative_error(state[n], ref_state[n]))
        if ref_o[b, span].numel():
            off = (o[b, span].double() - ref_o[b, span]).norm(dim=-1)
            own = ref_o[b, span].norm(dim=-1)
            worst = (off / own.clamp(min=0.1 * float(own.square().mean().sqrt()) + 1e-30)).max().item()
            errors["token"] = max(errors["token"], worst if worst == worst else float("inf"))
    return errors
