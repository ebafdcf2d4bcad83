"""The two collectives of an op call: a roll call, then one all-gather of the affine maps, and the fold of what came.

No rank waits for one that has failed: a rank whose checks or kernels raise still answers the roll call, with its error, and
all others raise an error that names it. The maps are gathered only where every rank is well and all agree about sizes. Buffers
are allocated before the roll call, so that running out of memory is part of it.

The roll call travels over the group's cpu backend where it has one, so that no device is waited for: prefer
`init_process_group("cpu:gloo,cuda:nccl")`. A group of NCCL alone costs a wait for the device in every call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kda_tl.distributed.errors import ContextParallelError
from kda_tl.distributed.layout import Route

__all__ = ["Group", "fold"]

ANSWER_BYTES = 2048  # of one rank at the roll call; a longer error text is cut
ERROR_CHARACTERS = 300  # at most 6 bytes each in JSON


@dataclass(frozen=True)
class Group:
    """A process group of torch.distributed and this process's rank in it. group None: of one process, no communication."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Group:
        """group: None is the default group, as everywhere in torch.distributed."""
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("a context needs torch.distributed.init_process_group to have been called")
        group = dist.group.WORLD if group is None else group
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"this process (global rank {dist.get_rank()}) is not a member of the context's group")
        return Group(group, rank, dist.get_world_size(group))

    def name(self, rank: int) -> str:
        """How an error calls it."""
        everywhere = rank if self.group is None else dist.get_global_rank(self.group, rank)
        return f"rank {rank}" if everywhere == rank else f"rank {rank} of the context (global rank {everywhere})"

    def backends(self) -> dict[str, str]:
        """device type -> backend."""
        pairs = (pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        return {device: backend for device, backend in pairs}

    def wire(self, device: torch.device) -> torch.device:
        """Where a tensor of `device` has to be for a collective: gloo's reach cuda tensors for few of them."""
        backends = self.backends()
        if device.type in backends and (device.type == "cpu" or backends[device.type] != "gloo"):
            return device
        if "cpu" in backends:
            return torch.device("cpu")
        raise ValueError(
            f"the context's group has no backend for {device.type} tensors, only for {', '.join(backends)}: "
            "use init_process_group('cpu:gloo,cuda:nccl')"
        )

    def roll_call(self, answer: dict[str, Any], device: torch.device | None) -> list[dict[str, Any]]:
        """Every rank's answer. device: of the op's tensors, used only where the group reaches no cpu tensors."""
        backends = self.backends()
        if "cpu" in backends:
            device = torch.device("cpu")
        elif device is None or device.type not in backends:
            bound = getattr(self.group, "bound_device_id", None)
            device = bound or torch.device("cuda", torch.cuda.current_device())
        text = json.dumps(answer).encode().ljust(ANSWER_BYTES)
        if len(text) > ANSWER_BYTES:
            raise ValueError(f"an answer at the roll call must fit into {ANSWER_BYTES} bytes, got {len(text)}")
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        answers = torch.empty(self.size, ANSWER_BYTES, dtype=torch.uint8, device=device)
        dist.all_gather(list(answers.unbind(0)), mine, group=self.group)
        return [json.loads(bytes(row)) for row in answers.cpu().numpy()]

    def fail(self, op: str, error: Exception, device: torch.device | None) -> None:
        """Answer the roll call with an error; what the others answer does not matter any more."""
        if self.size > 1:
            self.roll_call({"op": op, "error": f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]}, device)

    def gather(
        self, op: str, route: Route, sizes: tuple[int, int, int], device: torch.device, maps: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """All maps [ranks * slots, HV, K, K + V] float32 on `device`: transition, then bias, along the last dim.

        maps: what this rank hands over, in the order of route.handed_over, or None. Slots without a map hold anything.
        """
        if self.size == 1:
            return _packed(route, sizes, device, maps)
        try:
            wire = self.wire(device)
            mine = _packed(route, sizes, wire, maps)
            gathered = torch.empty((self.size, *mine.shape), dtype=torch.float32, device=wire)
        except Exception as error:
            self.fail(op, error, device)
            raise
        answer = {"op": op, "sizes": list(sizes), "layout": route.digest, "device": device.type}
        self._agree(op, self.roll_call(answer, device))
        if route.slots:
            dist.all_gather(list(gathered.unbind(0)), mine, group=self.group)
        return gathered.flatten(0, 1).to(device)

    def _agree(self, op: str, answers: Sequence[dict[str, Any]]) -> None:
        failed = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
        if failed:
            told = "; ".join(f"{self.name(rank)} failed: {error}" for rank, error in failed.items())
            raise ContextParallelError(f"{op} cannot go on: {told}", list(failed))
        for key, what in (("op", "op"), ("layout", "layout of tokens"), ("sizes", "(HV, K, V)"), ("device", "device type")):
            values = [answer[key] for answer in answers]
            different = [rank for rank, value in enumerate(values) if value != values[0]]
            if different:
                told = ", ".join(f"{values[rank]} on {self.name(rank)}" for rank in different)
                raise ContextParallelError(
                    f"{op}: all ranks of a context must have the same {what}, got {values[0]} on {self.name(0)}, but {told}",
                    [0, *different],
                )


def _packed(route: Route, sizes: tuple[int, int, int], device: torch.device, maps: tuple[Tensor, Tensor] | None) -> Tensor:
    HV, K, V = sizes
    packed = torch.empty((route.slots, HV, K, K + V), dtype=torch.float32, device=device)
    if route.handed_over:
        if maps is None:
            raise ValueError(f"{len(route.handed_over)} maps must be handed over, got none")
        for x, into in zip(maps, packed[: len(route.handed_over)].split([K, V], -1)):
            into.copy_(x)
    return packed


def fold(route: Route, gathered: Tensor, K: int) -> Tensor:
    """The states [len(route.received), HV, K, V] that the received pieces enter with, float32.

    gathered: [ranks * slots, HV, K, K + V]. The first map of a chain holds its initial state, so that only its bias counts.
    Folded in time order in float64: no product is rounded to TF32, and the error does not grow with the number of ranks.
    """
    HV, V = gathered.shape[1], gathered.shape[3] - K
    states = torch.empty((len(route.received), HV, K, V), dtype=torch.float32, device=gathered.device)
    # Longest chain first, so that those with a next map are a prefix.
    order = sorted(range(len(route.chains)), key=lambda i: -len(route.chains[i]))
    running = gathered.new_empty((0, HV, K, V), dtype=torch.float64)
    for step in range(len(route.chains[order[0]]) if order else 0):
        steps = [route.chains[i][step] for i in order if len(route.chains[i]) > step]
        for row in range(len(steps), len(running)):
            states[order[row]] = running[row]
        maps = _rows(gathered, steps).double()
        bias = maps[..., K:]
        running = bias if step == 0 else maps[..., :K] @ running[: len(steps)] + bias
    for row in range(len(running)):
        states[order[row]] = running[row]
    return states


def _rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """x[rows] with no index tensor, which would have to be copied to the device."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return x[rows[0] : rows[0] + len(rows)]
    return torch.stack([x[row] for row in rows])
