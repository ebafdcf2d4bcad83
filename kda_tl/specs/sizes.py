"""The size of a problem: the number that decides between the schedules of one spec (`kda_tl.specs.schedules.SizeClass`).

It counts what fills a device, known before a launch from shapes alone: nothing is read from the device for it.
"""

from __future__ import annotations

__all__ = ["WORK_ITEMS", "problem_size", "size_meaning"]

WORK_ITEMS = {
    "chunk_wy": "chunk slots",
    "chunk_scan": "sequences or segments",  # segments of a sequence that is cut
    "intracard_pre_scan": "segments",
    "intracard_merge": "sequences",
    "recurrent_decode": "requests",
    "deltalog_prep": "requests",
    "deltalog_decode": "requests",
}
"""What a kernel runs side by side for every value head."""


def problem_size(kernel: str, items: int, HV: int) -> int:
    """The size of a problem of `kernel` with so many of its work items and HV value heads.

    Raises:
        ValueError: there is no such kernel.
    """
    if kernel not in WORK_ITEMS:
        raise ValueError(f"kernel must be one of {', '.join(WORK_ITEMS)}, got {kernel!r}")
    return items * HV


def size_meaning(kernel: str) -> str:
    """What `problem_size` multiplies, for messages."""
    return f"{WORK_ITEMS[kernel]} x value heads"
