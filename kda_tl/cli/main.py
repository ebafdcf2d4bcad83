"""The group that every command belongs to; `python -m kda_tl` is `kda-tl`."""

from __future__ import annotations

from typing import Any

import click

from kda_tl import __version__
from kda_tl.cli.autotune import autotune
from kda_tl.cli.build import build
from kda_tl.cli.bundle import bundle
from kda_tl.cli.demo import demo
from kda_tl.cli.doctor import doctor
from kda_tl.cli.explain import explain
from kda_tl.cli.gc import gc
from kda_tl.cli.list import list_artifacts
from kda_tl.cli.shared import INTERRUPTED
from kda_tl.cli.verify import verify

__all__ = ["cli"]


EPILOG = """\b
Examples:
  kda-tl demo                     one call on the best device here, checked against the float64 recurrence
  kda-tl doctor                   what is installed, what serves which device, what is in the way
  kda-tl build --arch sm_90       compile for an H100 or H200; no GPU is needed
  kda-tl autotune --arch sm_90    find the fastest schedules by measurement
  kda-tl list                     what is built, and where
  kda-tl verify                   compare every file with the hash it was built with
  kda-tl explain chunk_kda --tokens 8192 --heads 96 --arch sm_90

\b
Exit codes of every command:
  0    done
  1    something failed, is damaged or is missing; the message names it and the command that helps
  2    wrong options or arguments
  130  stopped by Ctrl-C
"""


class Commands(click.Group):
    """After Ctrl-C the exit code is that of every command, also where none of them has begun to look out for it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nStopped.", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kda-tl")
def cli() -> None:
    """Build and inspect ahead-of-time compiled kernels for delta-rule linear attention."""


for command in (autotune, build, bundle, demo, doctor, explain, gc, list_artifacts, verify):
    cli.add_command(command)

if __name__ == "__main__":
    cli(prog_name="kda-tl")
