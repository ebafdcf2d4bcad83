"""Cases of context parallelism, run by five processes; the tests read what each of them got.

A process is imported from here, so that this module knows nothing of pytest.
"""

from __future__ import annotations

import itertools
import os
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import kda_tl
from kda_tl.distributed import ContextParallel, Layout, Piece
from kda_tl.ops.context import Turn, local_sequences, segment_maps, takes_context
from kda_tl.reference import recurrent_kda

WORLD = 5
TIMEOUT = timedelta(seconds=60)  # a hang becomes an error of the test
TOKENS = ("q", "k", "v", "g", "beta")
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "weak": lambda r: -1e-3 * r,
    "strong": lambda r: -20.0 * r,
    "half open": lambda r: torch.where(r < 0.5, 0.0, -r),
    "masked": lambda r: torch.where(r[..., :1] < 0.1, -1000.0, -0.01 * r),
    "cleared": lambda r: torch.where(r < 0.05, -torch.inf, -0.1 * r),
}


@takes_context
def plain_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None,
    maps: Callable[..., Any] = segment_maps,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """An op of any head dims whose scan is the float64 recurrence, so that all error is that of the exchange."""
    if isinstance(cp_context, Turn):
        cu_seqlens, _ = local_sequences(cp_context, q, cu_seqlens, cu_seqlens_cpu)
        if v.dim() != 4:
            raise ValueError(f"v must have shape [B, T, HV, V], got {list(v.shape)}")
        initial_state = cp_context.initial_state(k, v, g, beta, initial_state, maps)
    return recurrent_kda(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)


@takes_context
def hasty_op(q: Tensor, cp_context: Any = None) -> Tensor:
    """One that forgets to hand anything over."""
    return q


def chunk_kda(**x: Any) -> tuple[Tensor, Tensor | None]:
    return kda_tl.chunk_kda(output_final_state=True, **x)


def chunk_gdn(**x: Any) -> tuple[Tensor, Tensor | None]:
    return kda_tl.chunk_gdn(output_final_state=True, **x)


@dataclass(frozen=True)
class Case:
    """lengths, cuts: a pack; B, cuts: a dense batch; or a layout of its own. make: how a rank makes its context."""

    name: str
    layout: Layout
    op: Callable[..., Any] = plain_op
    gate: str = "weak"
    scalar_gate: bool = False
    initial_state: bool = True
    make: str = "layout"
    H: int = 1
    HV: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return len(self.layout.pieces)

    @property
    def lengths(self) -> list[int]:
        lengths = self.layout.lengths
        return [lengths[n] for n in range(len(lengths))]

    @property
    def cu_seqlens(self) -> list[int] | None:
        return [0, *itertools.accumulate(self.lengths)] if self.layout.is_packed else None

    def inputs(self) -> dict[str, Tensor]:
        """The whole of every tensor."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        K, V = (16, 24) if self.op is plain_op else (128, 128)
        B, T = (1, sum(self.lengths)) if self.layout.is_packed else (len(self.lengths), max(self.lengths, default=0))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        uniform = torch.rand((B, T, self.HV, 1 if self.scalar_gate else K), generator=generator)
        x = {
            "q": torch.nn.functional.normalize(normal(B, T, self.H, K), dim=-1),
            "k": torch.nn.functional.normalize(normal(B, T, self.H, K), dim=-1),
            "v": normal(B, T, self.HV, V),
            "g": GATES[self.gate](uniform),
            "beta": torch.rand((B, T, self.HV), generator=generator),
            "initial_state": normal(len(self.lengths), self.HV, K, V),
        }
        if self.scalar_gate:
            x["g"] = x["g"].squeeze(-1)
        if not self.initial_state:
            del x["initial_state"]
        return x

    def context(self, rank: int, group: dist.ProcessGroup) -> Any:
        if self.make == "local":
            pieces = self.layout.pieces[rank]
            offsets = [0, *itertools.accumulate(piece.length for piece in pieces)]
            names = [piece.sequence for piece in pieces]
            return ContextParallel.from_local(offsets, names, [piece.start for piece in pieces], group)
        context = ContextParallel(self.layout, group)
        return fla_like(context, group) if self.make == "fla" else context

    def local(self, rank: int, context: ContextParallel, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a rank passes: its tokens; where an initial state is not its own, NaN; past the end of a pack, NaN too."""
        part = {name: context.take(x[name], self.cu_seqlens) for name in TOKENS}
        if self.layout.is_packed and rank % 2:
            part = {name: torch.cat([t, torch.full_like(x[name][:, :70], torch.nan)], 1) for name, t in part.items()}
        if "initial_state" in x:
            rows = [
                x["initial_state"][piece.sequence] if piece.start == 0 else torch.full_like(x["initial_state"][0], torch.nan)
                for piece in context.pieces
            ]
            part["initial_state"] = torch.stack(rows) if rows else x["initial_state"][:0]
            if self.options.get("state_v_first"):
                part["initial_state"] = part["initial_state"].mT.contiguous()
        return part


def fla_like(context: ContextParallel, group: dist.ProcessGroup) -> Any:
    """The public fields of a context of flash-linear-attention for the same tokens."""
    holders = [{p.sequence for p in pieces if p.length} for pieces in context.layout.pieces]
    rank, mine = context.rank, context.pieces
    return SimpleNamespace(
        group=group,
        cu_seqlens=context.cu_seqlens(),
        cu_seqlens_cpu=None if rank % 2 else context.cu_seqlens(),
        pre_num_ranks=sum(mine[0].sequence in held for held in holders[:rank]),
        post_num_ranks=sum(mine[-1].sequence in held for held in holders[rank + 1 :]),
        is_first_rank=mine[0].start == 0,
        is_last_rank=context.ends_here[-1],
    )


def zigzag(lengths: list[int], ranks: int) -> Layout:
    """Rank r holds the slices r and 2 ranks - 1 - r of every sequence."""
    pieces = []
    for rank in range(ranks):
        held = []
        for n, length in enumerate(lengths):
            for part in (rank, 2 * ranks - 1 - rank):
                start, end = part * length // (2 * ranks), (part + 1) * length // (2 * ranks)
                held.append(Piece(n, start, end - start))
        pieces.append(tuple(held))
    return Layout(tuple(pieces))


def any_layout(seed: int, ranks: int) -> Layout:
    """A pack or a batch of random lengths with random cuts, many of them empty."""
    rng = random.Random(seed)
    if rng.random() < 0.3:
        T = rng.randrange(200)
        return Layout.dense(rng.randrange(1, 4), [0, *sorted(rng.randint(0, T) for _ in range(ranks - 1)), T])
    lengths = [rng.choice([0, 1, 63, 64, 65, rng.randrange(150)]) for _ in range(rng.randrange(1, 6))]
    bounds = [0, *itertools.accumulate(lengths)]
    inner = sorted(rng.choice([*bounds, rng.randint(0, bounds[-1])]) for _ in range(ranks - 1))
    return Layout.packed(bounds, [0, *inner, bounds[-1]])


PACK = [0, 150, 150, 155, 285, 286]  # sequences of 150, 0, 5, 130 and 1 tokens
NAMED = {
    "one": Layout.packed(PACK, [0, 286]),
    "even": Layout.packed(PACK, [0, 143, 286]),
    "uneven": Layout.packed(PACK, [0, 1, 200, 286]),
    "empty-ranks": Layout.packed(PACK, [0, 0, 151, 151, 286, 286]),
    "long": Layout.packed([0, 290], [0, 64, 65, 200, 259, 290]),
    "dense": Layout.dense(3, [0, 70, 71, 150]),
    "dense-one": Layout.dense(2, [0, 70]),
    "dense-empty-ranks": Layout.dense(2, [0, 0, 65, 65, 130, 130]),
    "zigzag": zigzag([140, 0, 67], 3),
    "no-token": Layout.packed([0, 0, 0], [0, 0, 0]),
    "no-sequence": Layout.packed([0], [0, 0, 0]),
}
KERNEL_PACK = [0, 130, 130, 135, 200]
CASES = [
    *(Case(name, layout, H=2, HV=4) for name, layout in NAMED.items()),
    *(Case(f"long-{gate}", NAMED["long"], gate=gate) for gate in GATES),
    *(Case(f"gdn-{gate}", NAMED["uneven"], gate=gate, scalar_gate=True) for gate in ("weak", "strong", "masked")),
    Case("gdn-dense", NAMED["dense"], scalar_gate=True, HV=3),
    *(Case(f"no-state-{name}", NAMED[name], initial_state=False) for name in ("uneven", "dense", "zigzag", "no-token")),
    Case("local", NAMED["uneven"], make="local"),
    Case("local-zigzag", NAMED["zigzag"], make="local"),
    Case("fla", Layout.packed([0, 30, 100, 150], [0, 50, 100, 150]), make="fla"),
    Case("fla-long", Layout.packed([0, 150], [0, 30, 60, 90, 120, 150]), make="fla", initial_state=False),
    *(Case(f"any-{s}", any_layout(s, 2 + s % 4 if s % 4 < 2 else 5), gate=list(GATES)[s % len(GATES)]) for s in range(24)),
    Case("kda", Layout.packed(KERNEL_PACK, [0, 70, 133, 200]), chunk_kda, "half open", HV=2),
    Case("kda-masked", Layout.packed(KERNEL_PACK, [0, 70, 133, 200]), chunk_kda, "masked", initial_state=False),
    Case("kda-empty-ranks", Layout.packed([0, 130], [0, 0, 50, 50, 130, 130]), chunk_kda, "weak"),
    Case("kda-dense", Layout.dense(2, [0, 65, 100]), chunk_kda, "strong", options={"state_v_first": True}),
    Case("gdn", Layout.packed(KERNEL_PACK, [0, 70, 133, 200]), chunk_gdn, "strong", scalar_gate=True, HV=2),
    Case("gdn-batch", Layout.dense(2, [0, 30, 30, 100]), chunk_gdn, scalar_gate=True, options={"state_v_first": True}),
    Case("kda-fla", Layout.packed([0, 30, 130], [0, 65, 130]), chunk_kda, "weak", make="fla"),
]


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        o, state = call()
        return {"o": o, "state": state}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "ranks": getattr(error, "ranks", None)}


def run_failures(group: dist.ProcessGroup) -> dict[str, dict[str, Any]]:
    """Every way to fail, on the ranks 0, 1, 2 of a group whose global ranks are 2, 3, 4; a good call after each of them."""
    case = Case("failures", NAMED["uneven"])
    rank = dist.get_rank(group)
    context = ContextParallel(case.layout, group)
    x = case.inputs()
    part = case.local(rank, context, x)
    seen: dict[str, dict[str, Any]] = {}

    def broken_maps(*_: Any) -> Any:
        raise RuntimeError("the kernel did not launch")

    def fails(name: str, where: int, call: Callable[..., Any] = plain_op, drop: str = "", **changes: Any) -> None:
        mine = {**part, **changes} if rank == where else dict(part)
        mine.pop(drop if rank == where else "", None)
        seen[name] = attempt(lambda: (call if rank == where else plain_op)(**{"cp_context": context, **mine}))
        seen[f"{name}, then"] = attempt(lambda: plain_op(**part, cp_context=context))

    fails("bad shape", 1, v=part["v"][0])
    fails("too few tokens", 2, **{name: part[name][:, :1] for name in TOKENS})
    fails("kernel", 1, maps=broken_maps)
    fails("missing argument", 0, drop="beta")
    fails("unknown argument", 2, gamma=1)
    fails("wrong maps", 1, maps=lambda k, v, g, beta, spans: (k, v))
    fails("gradient", 0, k=part["k"].clone().requires_grad_())
    fails("global offsets", 1, cu_seqlens=torch.tensor(PACK))
    fails("hasty", 1, call=lambda cp_context, **x: hasty_op(x["q"], cp_context=cp_context))
    fails("long text", 0, maps=lambda *_: (_ for _ in ()).throw(ValueError("\u2713" * 5000)))
    fails("memory", 2, call=lambda **_: context.exchange("plain_op", (10**12, 128, 128), torch.device("cpu"), None))
    fails("field", 1, cp_context=SimpleNamespace(**{**vars(fla_like(context, group)), "pre_num_ranks": None}))
    fails("head count", 1, **{n: torch.cat([t, t], 1 if n == "initial_state" else 2) for n, t in part.items()})
    fails("other op", 2, call=other_op)
    other = ContextParallel(Layout.packed(PACK, [0, 2, 201, 286]), group)
    fails("layout", 1, cp_context=other, **case.local(rank, other, x))
    both = {**part, "v": part["v"][0]} if rank else part
    seen["two ranks"] = attempt(lambda: plain_op(**both, cp_context=context))
    offsets, count = [([0], 0), ([0, 3], 1), ([0, 4, 2], 2)][rank]
    seen["from_local"] = attempt(lambda: (ContextParallel.from_local(offsets, [0] * count, [0] * count, group), None))
    start = [0, 3, 7][rank]
    seen["from_local, whole"] = attempt(lambda: (ContextParallel.from_local([0, 3], [0], [start], group), None))
    seen["nothing of the kind"] = attempt(lambda: plain_op(**part, cp_context="a context"))
    return seen


@takes_context
def other_op(cp_context: Any = None, **x: Any) -> Any:
    k, v, g, beta = (x[name] for name in ("k", "v", "g", "beta"))
    return cp_context.initial_state(k, v, g, beta, x["initial_state"]), None


def work(rank: int, folder: str) -> None:
    """One of the five processes: all cases of the groups that it is in, then all ways to fail."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD, timeout=TIMEOUT)
    groups = {n: dist.new_group(range(n), timeout=TIMEOUT) for n in sorted({case.ranks for case in CASES})}
    late = dist.new_group(range(2, 5), timeout=TIMEOUT)
    seen: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for case in CASES:
            if rank < case.ranks:
                context = ContextParallel(case.layout, groups[case.ranks])
                part = case.local(rank, context, case.inputs())
                given = case.context(rank, groups[case.ranks])
                seen[case.name] = attempt(lambda: case.op(**part, **case.options, cp_context=given))  # noqa: B023
    if rank >= 2:
        seen["failures"] = run_failures(late)
    seen["not a member"] = attempt(lambda: (str(ContextParallel.dense(1, 3, [0, 3], groups[1])), None))
    seen["default"] = {"text": str(ContextParallel.packed(torch.tensor([0, 12]))) + str(ContextParallel.dense(2, 11))}
    torch.save(seen, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
