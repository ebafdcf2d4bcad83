"""`python -m kda_tl` is `kda-tl`, where the script is not on PATH."""

from kda_tl.cli.main import cli

if __name__ == "__main__":
    cli(prog_name="kda-tl")
