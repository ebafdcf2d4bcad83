"""kda-tl verify: every file against the hash that it was built with."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kda_tl.cli.shared import arch_option, build_command, json_option, registries, registry_option
from kda_tl.registry import Registry, RegistryError

__all__ = ["verify"]

EPILOG = """\b
Examples:
  kda-tl verify
  kda-tl verify --arch sm_90 --registry /srv/artifacts
  kda-tl verify --json

Exits 1 where something is damaged, missing or unreadable, or nothing is there to verify; else 0.
"""


@click.command(epilog=EPILOG)
@arch_option("Only what this architecture's manifest names.")
@registry_option("Only this folder.  [default: every folder of the search path]")
@json_option("One JSON object: checked, ok, and failures with registry, path and error.")
def verify(arch: str | None, registry: Path | None, as_json: bool) -> None:
    """Compare every artifact with the hashes it was built with.

    What is damaged is named and moved to the registry's quarantine/, as a call that met it would do; the build command
    in the message makes it again.
    """
    checked = 0
    failures: list[dict[str, str | None]] = []
    for where in registries(registry):
        try:
            folders, errors = _folders(where, arch)
        except (RegistryError, OSError) as error:
            folders, errors = [], [str(error)]
        failures += [{"registry": str(where.root), "path": None, "error": error} for error in errors]
        for folder in folders:
            checked += 1
            try:
                where.verify(folder)
            except RegistryError as error:
                failures.append({"registry": str(where.root), "path": str(folder), "error": str(error)})
    if as_json:
        ok = bool(checked) and not failures
        click.echo(json.dumps({"ok": ok, "checked": checked, "failures": failures}, indent=2))
        if not ok:
            raise click.exceptions.Exit(1)
        return
    if failures:
        unread = sum(failure["path"] is None for failure in failures)
        counts = [f"{len(failures) - unread} of {checked} artifacts and libraries failed"] if len(failures) > unread else []
        counts += [f"manifests that cannot be read: {unread}"] if unread else []
        raise click.ClickException("\n".join([", ".join(counts), *(str(failure["error"]) for failure in failures)]))
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
        folders |= {registry.root / "artifacts" / id for id in manifest.ids()}
        if manifest.support is not None:
            folders.add(registry.root / "support" / manifest.support)
    if arch is None:
        for kind in ("artifacts", "support"):
            folders |= set((registry.root / kind).glob("[!.]*"))
    return sorted(folders), errors
