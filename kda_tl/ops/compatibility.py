"""Arguments of flash-linear-attention that have another name by now."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["renamed"]


def renamed(kwargs: dict[str, Any], old: str, new: str) -> bool:
    """Takes the flag `old` out of kwargs."""
    # The caller is beyond this frame, the op's arguments and the public wrapper.
    warnings.warn(f"{old} is now named {new}", DeprecationWarning, stacklevel=4)
    return bool(kwargs.pop(old))
