"""kda-tl gc: what no manifest names any more."""

from __future__ import annotations

from pathlib import Path

import click

from kda_tl.cli.shared import Minutes, registry_option, size
from kda_tl.registry import Registry, RegistryError, default_root
from kda_tl.tuning.problems_plan import PLAN

__all__ = ["gc"]


@click.command(short_help="Remove what no manifest names any more.")
@click.option("-n", "--dry-run", is_flag=True, help="Only tell what would be removed.")
@click.option(
    "--min-age",
    type=Minutes(min=0),
    default=60.0,
    show_default=True,
    metavar="MINUTES",
    help="Keep what is younger: a build may be about to publish it.",
)
@click.option("--quarantine", is_flag=True, help="Remove quarantined artifacts as well.")
@registry_option("What to clean.  [default: the folder that a build goes to]")
def gc(dry_run: bool, min_age: float, quarantine: bool, registry: Path | None) -> None:
    """Remove artifacts and libraries that no manifest names, and what interrupted builds left behind.

    A build whose schedule or compiler changed leaves the artifact that it replaced. Processes that have it loaded are not
    disturbed.

    \b
    Examples:
      kda-tl gc --dry-run
      kda-tl gc --registry /srv/artifacts
    """
    try:
        target = Registry(registry if registry is not None else default_root())
        if (target.root / PLAN).exists():
            raise RegistryError(
                f"{target.root} holds candidates of `kda-tl autotune`, which its {PLAN} names and no manifest does: nothing "
                "was removed. Remove the whole folder when it is not needed any more"
            )
        sizes = {path: _bytes(path) for path in target.collect_garbage(True, min_age * 60, quarantine)}
        removed = list(sizes) if dry_run else target.collect_garbage(False, min_age * 60, quarantine)
    except (RegistryError, OSError) as error:
        raise click.ClickException(str(error)) from None
    for path in removed:
        click.echo(f"  {size(sizes.get(path, 0)).rjust(10)}  {path.relative_to(target.root)}")
    verb = "would be removed" if dry_run else "removed"
    total = sum(sizes.get(path, 0) for path in removed)
    folders = "1 folder" if len(removed) == 1 else f"{len(removed)} folders"
    click.echo(f"{target.root}: {folders}, {size(total)} {verb}")


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
