"""Whether this machine can time an arch."""

from __future__ import annotations

import torch

from kda_tl.specs.archs import archs_for_capability

__all__ = ["why_not"]


def why_not(arch: str) -> str | None:
    """The reason; None where it can. Artifacts of another arch may run through their PTX, but their times say nothing of it."""
    if arch == "cpu":
        return None
    if not torch.cuda.is_available():
        return f"no CUDA device here: candidates of {arch} are timed on one (kda-tl doctor says what is missing)"
    properties = torch.cuda.get_device_properties(0)
    limit = getattr(properties, "shared_memory_per_block_optin", None)
    served = archs_for_capability((properties.major, properties.minor), limit)
    if not served or served[0] != arch:
        return f"{properties.name} runs {served[0] if served else 'no'} artifacts: candidates of {arch} are not timed on it"
    return None
