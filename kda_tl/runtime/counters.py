"""How often the dispatcher found, loaded, missed and built kernels in this process."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

__all__ = ["Counters", "count_fallback", "counters", "counts", "reset_counters"]

log = logging.getLogger("kda_tl")


@dataclass(frozen=True)
class Counters:
    """One reading.

    Attributes:
        hits: lookups that a loaded kernel answered.
        loads: kernels that were verified and loaded, once per spec, size class, device and registry setting.
        misses: lookups that no registry had an artifact for.
        builds: compiles in a child process (KDA_TL_ON_MISS=build).
        fallbacks: times that something right but slower than this package's best was chosen: a kernel that the driver
            compiles from PTX, or whatever an op reports. The logger "kda_tl" names each one.
    """

    hits: int
    loads: int
    misses: int
    builds: int
    fallbacks: int


class _Counts:
    """The running figures. `counts.hits += 1` holds no lock: a call may cost tenths of a microsecond, and between its read and
    its write CPython switches no thread."""

    __slots__ = ("builds", "fallbacks", "hits", "loads", "misses")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.hits = self.loads = self.misses = self.builds = self.fallbacks = 0


counts = _Counts()
_told: set[str] = set()
_lock = threading.Lock()


def counters() -> Counters:
    """What happened since the start of the process, or since `reset_counters`."""
    return Counters(counts.hits, counts.loads, counts.misses, counts.builds, counts.fallbacks)


def reset_counters() -> None:
    """Every count back to zero. Loaded kernels stay loaded."""
    counts.clear()


def count_fallback(reason: str) -> None:
    """Counts a choice that is right but slow, and warns of it once per process and reason."""
    counts.fallbacks += 1
    with _lock:
        if reason in _told:
            return
        _told.add(reason)
    log.warning("fallback: %s", reason)
