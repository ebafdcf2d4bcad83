"""Schedules by measurement: candidates compiled anywhere, timed on the device, the fastest into schedules/ARCH.json."""

from kda_tl.tuning.apply import Applied, Gain, apply
from kda_tl.tuning.timings import Timing, TimingsError, read_timings

__all__ = ["Applied", "Gain", "Timing", "TimingsError", "apply", "read_timings"]
