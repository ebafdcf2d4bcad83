"""Which NVIDIA driver is installed, asked of the driver itself: no nvidia-smi, no CUDA context."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

__all__ = ["cuda_of_driver", "cuda_version", "driver_version", "too_old"]

_FIRST_CUDA = {525: 12000, 530: 12010, 535: 12020, 545: 12030, 550: 12040, 555: 12050, 560: 12060, 570: 12080, 575: 12090,
               580: 13000, 590: 13010}  # fmt: skip
"""Driver series (R580) -> the CUDA version that it brought, as cuDriverGetVersion counts (1000 major + 10 minor)."""


@functools.cache
def cuda_version() -> int | None:
    """The newest CUDA version that the driver supports, 13000 for 13.0; None where there is no driver that tells.

    This is the version of the user-mode driver, which loads modules and compiles PTX; with NVIDIA's forward-compatibility
    package it is newer than the kernel module.
    """
    try:
        query = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion
    except (OSError, AttributeError):
        return None
    version = ctypes.c_int(0)
    return version.value if query(ctypes.byref(version)) == 0 and version.value > 0 else None


def driver_version() -> str | None:
    """The kernel module's version, "580.65.06"; None where it is not to be read (containers may hide it)."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else None


def cuda_of_driver(series: int) -> int | None:
    """The CUDA version that drivers of a series support at least; None for a series older than the table."""
    return max((cuda for first, cuda in _FIRST_CUDA.items() if first <= series), default=None)


def too_old(min_driver: int | None) -> str | None:
    """Why the driver cannot load what needs the series `min_driver`; None where it can, or where nobody tells."""
    needed = None if min_driver is None else cuda_of_driver(min_driver)
    found = cuda_version()
    if needed is None or found is None or found >= needed:
        return None
    version = driver_version()
    return (
        f"an NVIDIA driver R{min_driver} or newer (CUDA {_dotted(needed)}) is needed; this one supports CUDA {_dotted(found)}"
        + (f", kernel module {version}" if version else "")
    )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
