"""Every kernel's legal schedules by its spec."""

from __future__ import annotations

import importlib

from kda_tl.specs.candidates import IDLE, Candidate
from kda_tl.specs.kernels import KernelSpec
from kda_tl.specs.schedules import Schedule

__all__ = ["candidates", "rejection"]


def candidates(spec: KernelSpec, arch: str) -> list[Candidate]:
    """Every schedule that a tuner tries for `spec` on `arch`, and those it does not, with the reason."""
    found: list[Candidate] = importlib.import_module(f"kda_tl.kernels.{spec.kernel}").candidates(spec, arch)
    return found


def rejection(spec: KernelSpec, schedule: Schedule, arch: str) -> str | None:
    """Why `schedule`, one of another spec of the same kernel, does not serve `spec`; None where it does."""
    for candidate in candidates(spec, arch):
        if candidate.schedule == schedule:
            return None if candidate.reason is None or candidate.reason.startswith(IDLE) else candidate.reason
    return f"not among the candidates of {spec.key}"
