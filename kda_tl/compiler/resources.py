"""What a compiled kernel takes of a multiprocessor, checked against the arch: TileLang itself does not check."""

from __future__ import annotations

import re

from kda_tl.compiler.errors import BuildError
from kda_tl.specs.archs import Arch

__all__ = ["check_shared_memory", "parse_ptxas"]


def check_shared_memory(kernel: str, size: int, arch: Arch) -> None:
    """Raises BuildError where a block asks for more shared memory (bytes) than the arch has."""
    if size > arch.shared_memory:
        raise BuildError(f"{kernel} needs {size} bytes of shared memory per block; {arch.name} allows {arch.shared_memory}")


def parse_ptxas(text: str) -> list[dict[str, int]]:
    """Registers, and bytes of stack and spills, of every kernel in the output of ptxas -v."""
    rows: list[dict[str, int]] = []
    frame = {"stack": 0, "spill_stores": 0, "spill_loads": 0}
    for line in text.splitlines():
        if match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            frame = dict(zip(frame, map(int, match.groups()), strict=True))
        elif match := re.search(r"Used (\d+) registers", line):
            rows.append({"registers": int(match[1]), **frame})
    return rows
