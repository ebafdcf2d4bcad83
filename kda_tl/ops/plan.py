"""What a call will launch, decided before anything is launched and printable as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kda_tl.ops.intracard import SplitInfo
from kda_tl.runtime.build_on_miss import build_command
from kda_tl.runtime.dispatcher import LARGEST, choose, schedule_classes
from kda_tl.specs.kernels import KernelSpec
from kda_tl.specs.schedules import SizeClass
from kda_tl.specs.sizes import size_meaning

__all__ = ["Launch", "Plan", "SizeChoice", "counted", "size_choice"]


def counted(number: int, what: str) -> str:
    """1 token, 2 tokens."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@dataclass(frozen=True)
class Launch:
    """One kernel of a plan: its spec, what its grid counts, and its size (`kda_tl.specs.sizes`), which picks the artifact."""

    spec: KernelSpec
    grid: str
    size: int = LARGEST


@dataclass(frozen=True)
class SizeChoice:
    """Why a launch has its schedule: the class that its size falls into, among all classes of its spec."""

    launch: Launch
    chosen: SizeClass
    classes: tuple[SizeClass, ...]

    @property
    def limits(self) -> tuple[int | None, ...]:
        """The largest size of each class; None for any."""
        return tuple(one.up_to for one in self.classes)

    def __str__(self) -> str:
        default = type(self.chosen.schedule)()
        told = [  # what some class has of its own
            name for name, usual in default.as_dict().items() if any(getattr(c.schedule, name) != usual for c in self.classes)
        ]
        fields = ", ".join(f"{name} {getattr(self.chosen.schedule, name)}" for name in told) or "all defaults"
        if len(self.limits) == 1:
            return f"{fields} ({self.chosen.source}), for every size"
        limits = ", ".join("any" if limit is None else str(limit) for limit in self.limits)
        meaning = size_meaning(self.launch.spec.kernel)
        which = "larger ones" if self.chosen.up_to is None else f"sizes up to {self.chosen.up_to}"
        return f"{fields} ({self.chosen.source}), for {which}: it is {self.launch.size} ({meaning}), classes end at {limits}"


def size_choice(launch: Launch, arch: str) -> SizeChoice:
    """Raises what `kda_tl.runtime.dispatcher.schedule_classes` raises."""
    classes = schedule_classes(launch.spec, arch)
    chosen = next(one for one in classes if one.up_to is None or launch.size <= one.up_to)
    return SizeChoice(launch, chosen, classes)


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
            choice = choose(launch.spec, self.arch, launch.size)
            found = f"artifact {choice.path.name}, {choice.reason}" if choice.path else f"MISSING, {choice.reason}"
            lines += [f"  {launch.spec.key}", f"    grid {launch.grid}"]
            lines += [f"    schedule {size_choice(launch, self.arch)}", f"    {found}"]
            if choice.path is None:
                commands[build_command(launch.spec, self.arch)] = None
        lines += [f"  build what is missing: {command}" for command in commands]
        return "\n".join(lines)
