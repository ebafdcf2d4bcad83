"""What a call will launch, decided before anything is launched and printable as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kda_tl.ops.intracard import SplitInfo
from kda_tl.runtime.build_on_miss import build_command
from kda_tl.runtime.dispatcher import choose
from kda_tl.specs.kernels import KernelSpec

__all__ = ["Launch", "Plan", "counted"]


def counted(number: int, what: str) -> str:
    """1 token, 2 tokens."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@dataclass(frozen=True)
class Launch:
    """One kernel of a plan: its spec and what its grid counts."""

    spec: KernelSpec
    grid: str


@dataclass(frozen=True)
class Plan:
    """The launches of one call, in order. `str(plan)` is what `kda_tl.explain` prints.

    split: how sequences are cut into segments, None for an op that never does.
    """

    op: str
    problem: Mapping[str, object]
    arch: str
    launches: tuple[Launch, ...]
    workspace_bytes: int
    split: SplitInfo | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.op} on {self.arch}",
            "  problem    " + ", ".join(f"{name} {value}" for name, value in self.problem.items()),
            f"  workspace  {self.workspace_bytes / 2**20:.1f} MiB",
        ]
        if self.split is not None:
            lines.append(f"  segments   {self.split}")
        commands: dict[str, None] = {}
        for launch in self.launches:
            choice = choose(launch.spec, self.arch)
            found = f"artifact {choice.path.name}, {choice.reason}" if choice.path else f"MISSING, {choice.reason}"
            lines += [f"  {launch.spec.key}", f"    grid {launch.grid}", f"    {found}"]
            if choice.path is None:
                commands[build_command(launch.spec, self.arch)] = None
        lines += [f"  build what is missing: {command}" for command in commands]
        return "\n".join(lines)
