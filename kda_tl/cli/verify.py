"""kda-tl verify: every file against the hash that it was built with."""

from __future__ import annotations

from pathlib import Path

import click

from kda_tl.cli.shared import arch_option, build_command, registries, registry_option
from kda_tl.registry import Registry, RegistryError

__all__ = ["verify"]


@click.command()
@arch_option("Only what this architecture's manifest names.")
@registry_option("Only this folder.  [default: every folder of the search path]")
def verify(arch: str | None, registry: Path | None) -> None:
    """Compare every artifact with the hashes it was built with.

    What is damaged is named and moved to the registry's quarantine/, as a call that met it would do; the build command
    in the message makes it again. Exits 1 where something is damaged, missing or unreadable, or nothing is there to verify.

    \b
    Examples:
      kda-tl verify
      kda-tl verify --arch sm_90 --registry /srv/artifacts
    """
    checked, failures = 0, []
    for where in registries(registry):
        folders, errors = _folders(where, arch)
        failures += errors
        for folder in folders:
            checked += 1
            try:
                where.verify(folder)
            except RegistryError as error:
                failures.append(str(error))
    if failures:
        count = f"{len(failures)} of {checked} artifacts and libraries failed"
        raise click.ClickException("\n".join([count, *failures]))
    if not checked:
        looked = ", ".join(str(where.root) for where in registries(registry))
        raise click.ClickException(f"nothing to verify in {looked}. To build: {build_command(arch, registry)}")
    click.echo(f"{checked} artifacts and libraries verified, all as they were built")


def _folders(registry: Registry, arch: str | None) -> tuple[list[Path], list[str]]:
    """What the manifests name, there or not, and without `arch` also what no manifest names; and manifests that are damaged."""
    folders: set[Path] = set()
    errors = []
    for name in registry.archs() if arch is None else [arch]:
        try:
            manifest = registry.manifest(name)
        except RegistryError as error:
            errors.append(str(error))
            continue
        folders |= {registry.root / "artifacts" / entry["id"] for entry in manifest.artifacts.values()}
        if manifest.support is not None:
            folders.add(registry.root / "support" / manifest.support)
    if arch is None:
        for kind in ("artifacts", "support"):
            folders |= set((registry.root / kind).glob("[!.]*"))
    return sorted(folders), errors
