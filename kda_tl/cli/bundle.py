"""kda-tl bundle: a registry as one file, out and in."""

from __future__ import annotations

import re
from pathlib import Path

import click

from kda_tl.cli.shared import NamedPath, arch_option, registry_option, size
from kda_tl.registry import Bundled, Registry, RegistryError, default_root, export_bundle, import_bundle

__all__ = ["bundle"]


class Sha256(click.ParamType):
    """64 hexadecimal digits."""

    name = "HEX"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch("[0-9a-fA-F]{64}", value):
            self.fail(f"{value!r} is no sha256, which has 64 hexadecimal digits", param, ctx)
        return value


@click.group()
def bundle() -> None:
    """Carry a registry to another machine as one file.

    \b
    Examples:
      kda-tl bundle export kernels.tar --arch sm_90
      kda-tl bundle import kernels.tar --registry /srv/artifacts
    """


@bundle.command("export")
@click.argument("file", type=NamedPath(dir_okay=False))
@arch_option("Only this architecture; may be given several times.  [default: all that the registry has]", multiple=True)
@registry_option("What to export.  [default: the folder that a build goes to]")
def export(file: Path, arch: tuple[str, ...], registry: Path | None) -> None:
    """Write artifacts, their libraries and manifests to FILE, a tar archive.

    Every file is compared with the hash it was built with. Equal registries give equal bytes. The sha256 that is printed is
    what `kda-tl bundle import --sha256` takes.
    """
    try:
        done = export_bundle(Registry(registry if registry is not None else default_root()), file, arch or None)
    except (RegistryError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(_report(done))


@bundle.command("import")
@click.argument("file", type=NamedPath(dir_okay=False, exists=True))
@click.option("--sha256", type=Sha256(), metavar="HEX", help="Refuse the file unless this is its hash.")
@registry_option("Where it goes.  [default: the first writable folder of the search path]")
def import_(file: Path, sha256: str | None, registry: Path | None) -> None:
    """Put the content of FILE into a registry, beside what that has.

    Everything is verified first; a damaged file leaves the registry as it was. The artifacts run native code: import files from
    those that you would run programs from.
    """
    try:
        target = Registry(registry if registry is not None else default_root())
        done = import_bundle(file, target, sha256)
    except (RegistryError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{_report(done)}\nRegistry {target.root}")


def _report(done: Bundled) -> str:
    archs = ", ".join(f"{count} for {name}" for name, count in done.archs.items())
    return f"{done.file}: {size(done.size)}, artifacts: {archs}\nsha256 {done.sha256}"
