"""kda-tl explain: what a call would launch, from its sizes alone."""

from __future__ import annotations

import click
import torch

from kda_tl.cli.shared import arch_option
from kda_tl.ops.explain import PLANNERS, PREFILL_OPS
from kda_tl.ops.offered import MAX_HEAD_DIM_K, MAX_HEAD_DIM_V
from kda_tl.ops.prefill import plan_problem
from kda_tl.ops.prefill_checks import Problem
from kda_tl.registry import RegistryError
from kda_tl.runtime import dispatcher
from kda_tl.runtime.errors import UnsupportedDevice

__all__ = ["explain"]

POSITIVE = click.IntRange(min=1)


class Lengths(click.ParamType):
    """Comma-separated lengths of packed sequences; a sequence may be empty."""

    name = "N,N,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            lengths = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 100,200", param, ctx)
        if min(lengths) < 0:
            self.fail(f"a sequence cannot have {min(lengths)} tokens", param, ctx)
        return lengths


@click.command()
@click.argument("op", type=click.Choice(list(PLANNERS)))
@click.option("--tokens", type=click.IntRange(min=0), help="T, tokens per sequence; of the whole pack with --lengths.")
@click.option("--heads", type=POSITIVE, required=True, help="H, heads of q and k.")
@click.option("--value-heads", type=POSITIVE, help="HV, heads of v, a multiple of H.  [default: as many as --heads]")
@click.option("--head-dim-k", type=click.IntRange(1, MAX_HEAD_DIM_K), default=128, help="K.  [default: 128]")
@click.option("--head-dim-v", type=click.IntRange(1, MAX_HEAD_DIM_V), default=128, help="V.  [default: 128]")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    help="Of q, k and v.  [default: bfloat16]",
)
@click.option("--batch", type=click.IntRange(min=0), help="B, sequences of equal length.  [default: 1]")
@click.option("--lengths", type=Lengths(), help="Sequences packed along T (cu_seqlens), e.g. 100,200, instead of --batch.")
@arch_option("Plan for this architecture.  [default: that of the first CUDA device, cpu where there is none]")
def explain(
    op: str,
    tokens: int | None,
    heads: int,
    value_heads: int | None,
    head_dim_k: int,
    head_dim_v: int,
    dtype: str,
    batch: int | None,
    lengths: tuple[int, ...] | None,
    arch: str | None,
) -> None:
    """Print what a call of OP would launch.

    The plan holds the sizes, the kernels and their grids, the artifacts that serve them, and the command that builds what is
    missing.
    It needs no device: with --arch it tells what a call would do on another machine that has these registries. In Python,
    kda_tl.explain does the same for given tensors.

    \b
    Examples:
      kda-tl explain chunk_kda --tokens 8192 --heads 96 --arch sm_90
      kda-tl explain chunk_kda --heads 16 --value-heads 32 --lengths 100,2000,1
    """
    value_heads = heads if value_heads is None else value_heads
    if value_heads % heads:
        raise click.BadParameter(f"{value_heads} is not a multiple of --heads, {heads}", param_hint="--value-heads")
    if lengths is None:
        if tokens is None:
            raise click.UsageError("give --tokens, or --lengths")
        sequences = batch = 1 if batch is None else batch
    else:
        if batch is not None:
            raise click.UsageError("--batch and --lengths exclude each other: a pack has batch size 1")
        sequences, batch, tokens = len(lengths), 1, sum(lengths) if tokens is None else tokens
        if tokens < sum(lengths):
            raise click.BadParameter(f"{tokens} is less than the {sum(lengths)} tokens of --lengths", param_hint="--tokens")
    try:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        name = dispatcher.device_arch(device) if arch is None else arch
        function = PREFILL_OPS[op].op
        problem = Problem(
            function.rule, batch, tokens, sequences, heads, value_heads, head_dim_k, head_dim_v, lengths is not None,
            getattr(torch, dtype), name,
        )  # fmt: skip
        click.echo(str(plan_problem(function, problem)))
    except (RegistryError, UnsupportedDevice, NotImplementedError) as error:
        raise click.ClickException(str(error)) from None
