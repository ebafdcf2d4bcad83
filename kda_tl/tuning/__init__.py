"""Schedules by measurement: candidates compiled anywhere, timed on the device, the fastest into schedules/ARCH.json."""
