"""kda-tl list: what is built, and where."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from kda_tl.cli.shared import arch_option, bar, build_command, json_option, registries, registry_option, size, sized, table
from kda_tl.registry import Entry, Registry, RegistryError

__all__ = ["list_artifacts"]

EPILOG = """\b
Examples:
  kda-tl list
  kda-tl list --arch sm_90 --json

Exits 0, also where nothing is built; 1 where a manifest cannot be read.
"""


@click.command("list", epilog=EPILOG)
@arch_option("Only this architecture.")
@registry_option("Only this folder.  [default: every folder of the search path]")
@json_option("A JSON array of objects, sizes in bytes.")
def list_artifacts(arch: str | None, registry: Path | None, as_json: bool) -> None:
    """Show the artifacts of every registry on the search path.

    The search path is KDA_TL_REGISTRY, build/ of a checkout, the user cache and the artifacts that a wheel brings, in this
    order; where two registries hold one spec, the first one serves it. Files are not read: kda-tl verify does that. The bars
    compare sizes within a registry.
    """
    found, failures = [], []
    for where in registries(registry):
        try:
            names = where.archs() if arch is None else [arch]
        except RegistryError as error:
            failures.append(str(error))
            continue
        for name in names:
            try:
                found += [(where, entry, _bytes(entry)) for entry in where.entries(name)]
            except (RegistryError, OSError) as error:
                failures.append(str(error))
    if as_json:
        click.echo(json.dumps([_as_dict(*line) for line in found], indent=2))
    elif found:
        _print_tables(found)
    elif not failures:
        which = f" for {arch}" if arch else ""
        looked = "\n".join(f"  {where.root}" for where in registries(registry))
        click.echo(f"No artifacts{which}. Looked in\n{looked}\nTo build them: {build_command(arch, registry)}")
    if failures:
        raise click.ClickException("\n".join(failures))


def _bytes(entry: Entry) -> int | None:
    """Size of the artifact's files; None where the folder that the manifest names is gone."""
    if not entry.path.is_dir():
        return None
    return sum(file.stat().st_size for file in entry.path.iterdir())


def _as_dict(where: Registry, entry: Entry, count: int | None) -> dict[str, Any]:
    return {
        "registry": str(where.root),
        "arch": entry.arch,
        "spec": entry.spec_key,
        "up_to": entry.up_to,
        "id": entry.id,
        "bytes": count,
        "built": entry.fields.get("built"),
    }


def _print_tables(found: list[tuple[Registry, Entry, int | None]]) -> None:
    for root in dict.fromkeys(where.root for where, _, _ in found):
        here = [(entry, count) for where, entry, count in found if where.root == root]
        most = max(count or 0 for _, count in here)
        classes = Counter((entry.arch, entry.spec_key) for entry, _ in here)
        rows = [
            (entry.arch, str(entry.fields.get("built", "-")), "MISSING" if count is None else size(count),
             bar(count or 0, most), entry.id,
             sized(entry.spec_key, entry.up_to, classes[entry.arch, entry.spec_key]))
            for entry, count in here
        ]  # fmt: skip
        archs = ", ".join(
            f"{arch} {sum(entry.arch == arch for entry, _ in here)}" for arch in dict.fromkeys(entry.arch for entry, _ in here)
        )
        click.echo(f"{root}\n{table(('arch', 'built', 'size', '', 'artifact', 'spec'), rows)}")
        click.echo(f"  Together {size(sum(count or 0 for _, count in here))}: {archs}")
