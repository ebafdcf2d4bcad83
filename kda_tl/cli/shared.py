"""What the commands share: options, and figures as text."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kda_tl.registry import Registry, search_path
from kda_tl.specs.archs import ARCHS

__all__ = [
    "INTERRUPTED",
    "Minutes",
    "NamedPath",
    "arch_option",
    "bar",
    "build_command",
    "json_option",
    "registries",
    "registry_option",
    "size",
    "sized",
    "stored_bytes",
    "table",
]

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class NamedPath(click.Path):
    """A path that has a name: '' would be the current folder, and is what a variable that is not set leaves in a script.

    ~ is the home folder, as in KDA_TL_REGISTRY: shells leave it alone in --registry=~/artifacts.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(path_type=Path, **attributes)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if not os.fspath(value).strip():
            self.fail("it is empty: name a file or folder, '.' for this one", param, ctx)
        return super().convert(os.path.expanduser(value), param, ctx)


class Minutes(click.FloatRange):
    """A number of them. NaN is in no range, though no comparison says so."""

    name = "MINUTES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        minutes = float(super().convert(value, param, ctx))
        if math.isnan(minutes):
            self.fail(f"{value!r} is no number of minutes", param, ctx)
        return minutes


def arch_option(help: str, **attributes: Any) -> Decorator:
    return click.option("--arch", type=click.Choice(list(ARCHS)), help=help, **attributes)


def registry_option(help: str) -> Decorator:
    return click.option("--registry", type=NamedPath(file_okay=False), metavar="DIR", help=help)


def json_option(help: str) -> Decorator:
    return click.option("--json", "as_json", is_flag=True, help=help)


def registries(only: Path | None) -> list[Registry]:
    """One folder, or those of the search path in the order of their precedence."""
    return [Registry(only)] if only is not None else [Registry(root) for root in search_path()]


def build_command(arch: str | None, registry: Path | None) -> str:
    """What to type where something is missing."""
    where = f" --registry {shlex.quote(str(registry))}" if registry is not None else ""
    return f"kda-tl build --arch {arch or 'ARCH'}{where}" + ("" if arch else f"   (ARCH: {', '.join(ARCHS)})")


def size(count: int) -> str:
    """Bytes as a person reads them."""
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:.1f} KiB" if count < 1024**2 else f"{count / 1024**2:.1f} MiB"


def bar(count: float, most: float, width: int = 12) -> str:
    """A picture of count / most, `width` characters long at most; what is there at all shows."""
    mark = "#" if "utf" not in (sys.stdout.encoding or "").lower() else "\N{BLACK VERTICAL RECTANGLE}"
    filled = max(1, round(width * count / most)) if count > 0 else 0
    return (mark * filled).ljust(width)


def sized(key: str, up_to: int | None, classes: int) -> str:
    """A spec's key, and the problems (`kda_tl.specs.sizes`) that one of its `classes` artifacts is for."""
    if classes == 1:
        return key
    return f"{key} {'beyond that' if up_to is None else f'up to size {up_to}'}"


def stored_bytes(meta: Mapping[str, Any]) -> int:
    """Of an artifact's files, by its meta.json."""
    return sum(file["size"] for file in meta["files"].values())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns flush right, the last one flush left: it holds the long names."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    return "\n".join(
        "  " + "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) for line in lines
    )
