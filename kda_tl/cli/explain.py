"""kda-tl explain: what a call would launch, from its sizes alone."""

from __future__ import annotations

import ast
import inspect
import json
import math
from collections import Counter
from typing import Any

import click
import torch

from kda_tl.cli.shared import arch_option, json_option
from kda_tl.ops.example import example_inputs, op_named
from kda_tl.ops.explain import DELTALOG_OPS, PLANNERS
from kda_tl.ops.plan import Plan, size_choice
from kda_tl.registry import RegistryError
from kda_tl.runtime import dispatcher
from kda_tl.runtime.build_on_miss import build_command
from kda_tl.runtime.errors import KdaTlError

__all__ = ["explain"]

LARGEST_SIZE = 2**31 - 1  # kernels take sizes as 32-bit integers, and cu_seqlens is one of them
LARGEST_TENSOR = 2**60  # elements, whose bytes torch can still count
NATURAL, POSITIVE = click.IntRange(0, LARGEST_SIZE), click.IntRange(1, LARGEST_SIZE)
DTYPES = ("bfloat16", "float16", "float32")


class Numbers(click.ParamType):
    """Comma-separated whole numbers, none negative: lengths of packed sequences (one may be empty), or a shape."""

    name = "N,N,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 100,200", param, ctx)
        if min(numbers) < 0:
            self.fail(f"{min(numbers)} is negative: a sequence cannot have so many tokens, nor a shape", param, ctx)
        if max(numbers) > LARGEST_SIZE:
            self.fail(f"{max(numbers)} is too large: a length or size is at most {LARGEST_SIZE}", param, ctx)
        return numbers


class Assignment(click.ParamType):
    """NAME=VALUE; the value is a shape, or a Python literal, or a word."""

    name = "NAME=VALUE"

    def __init__(self, shapes: bool) -> None:
        self.shapes = shapes

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        if self.shapes:
            shape = Numbers().convert(text, param, ctx)
            if math.prod(shape) > LARGEST_TENSOR:
                self.fail(f"{value!r} has {math.prod(shape)} elements: a tensor has at most {LARGEST_TENSOR}", param, ctx)
            return name, shape
        try:
            return name, ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: brackets beyond any depth
            return name, text


EPILOG = f"""OP is one of {", ".join(PLANNERS)}.

\b
Examples:
  kda-tl explain chunk_kda --tokens 8192 --heads 96 --arch sm_90
  kda-tl explain chunk_kda --heads 16 --value-heads 32 --lengths 100,2000,1
  kda-tl explain chunk_kda --tokens 512 --heads 4 --set output_final_state=true --json
  kda-tl explain chunk_kda --tokens 64 --heads 2 --shape initial_state=1,2,128,128

Exits 0 with a plan, also where artifacts are missing (the plan says so); 1 where there can be none; 2 for wrong options.
"""


@click.command(epilog=EPILOG)
@click.argument("op", type=click.Choice(list(PLANNERS)), metavar="OP")
@click.option("--tokens", type=NATURAL, help="T, tokens per sequence; of the whole pack with --lengths.")
@click.option("--heads", type=POSITIVE, required=True, help="H, heads of q and k.")
@click.option("--value-heads", type=POSITIVE, help="HV, heads of v, a multiple of H.  [default: as many as --heads]")
@click.option("--head-dim-k", type=POSITIVE, default=128, show_default=True, help="K, size of a key.")
@click.option("--head-dim-v", type=POSITIVE, default=128, show_default=True, help="V, size of a value.")
@click.option("--batch", type=NATURAL, help="B, sequences of equal length.  [default: 1]")
@click.option("--lengths", type=Numbers(), help="Sequences packed along T (cu_seqlens), e.g. 100,200, instead of --batch.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the activations.  [default: float32 on cpu, else bfloat16]")
@click.option("--shape", "shapes", type=Assignment(True), multiple=True, metavar="NAME=N,N,...",
              help="Shape of a tensor argument, where its name does not imply it, or another.")  # fmt: skip
@click.option("--set", "options", type=Assignment(False), multiple=True, help="Any other argument of the op.")
@arch_option("Plan for this architecture.  [default: that of the first CUDA device, cpu where there is none]")
@json_option("One JSON object, sizes in bytes.")
def explain(
    op: str,
    tokens: int | None,
    heads: int,
    value_heads: int | None,
    head_dim_k: int,
    head_dim_v: int,
    batch: int | None,
    lengths: tuple[int, ...] | None,
    dtype: str | None,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    options: tuple[tuple[str, Any], ...],
    arch: str | None,
    as_json: bool,
) -> None:
    """Print what a call of OP would launch.

    The plan holds the sizes, the kernels and their grids, the artifacts that serve them, and the command that builds what is
    missing.
    It needs no device: with --arch it tells what a call would do on another machine that has these registries. In Python,
    kda_tl.explain does the same for given tensors.
    """
    names = Counter(name for name, _ in (*shapes, *options))
    if twice := [name for name, count in names.items() if count > 1]:
        raise click.UsageError(f"{twice[0]} is given {names[twice[0]]} times by --shape and --set")
    value_heads = heads if value_heads is None else value_heads
    if value_heads % heads:
        raise click.BadParameter(f"{value_heads} is not a multiple of --heads, {heads}", param_hint="--value-heads")
    if lengths is None:
        if tokens is None:
            raise click.UsageError("give --tokens, or --lengths")
    else:
        if batch is not None:
            raise click.UsageError("--batch and --lengths exclude each other: a pack has batch size 1")
        if sum(lengths) > LARGEST_SIZE:
            too_many = f"{sum(lengths)} tokens together: a pack has at most {LARGEST_SIZE}"
            raise click.BadParameter(too_many, param_hint="--lengths")
        tokens = sum(lengths) if tokens is None else tokens
        if tokens < sum(lengths):
            raise click.BadParameter(f"{tokens} is less than the {sum(lengths)} tokens of --lengths", param_hint="--tokens")
    elements = (1 if batch is None else batch) * tokens * value_heads * max(head_dim_k, head_dim_v)
    if elements > LARGEST_TENSOR:
        raise click.UsageError(
            "--tokens, --batch, --heads, --value-heads and the head dims are too large together: a tensor would have "
            f"{elements} elements, and has at most {LARGEST_TENSOR}"
        )
    try:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        name = dispatcher.device_arch(device) if arch is None else arch
        with dispatcher.assume_arch(name):
            inputs = example_inputs(
                op_named(op), tokens=tokens, batch=1 if batch is None else batch, heads=heads, value_heads=value_heads,
                head_dim_k=head_dim_k, head_dim_v=head_dim_v, lengths=lengths, shapes=dict(shapes),
                dtype=getattr(torch, dtype or ("float32" if name == "cpu" else "bfloat16")),
                device="meta" if op in DELTALOG_OPS else "cpu",  # a cache has memory of its own: gigabytes at many heads
            )  # fmt: skip
            _check_options(op, options)
            plan = PLANNERS[op](**{**inputs, **dict(options)})
            click.echo(json.dumps(_as_dict(plan), indent=2) if as_json else str(plan))
    except (RegistryError, KdaTlError, ValueError, TypeError, NotImplementedError) as error:
        raise click.ClickException(str(error)) from None


def _check_options(op: str, options: tuple[tuple[str, Any], ...]) -> None:
    """Raises click.BadParameter for what the op does not take, and for a word in place of true or false, which it would take
    for true."""
    parameters = inspect.signature(op_named(op)).parameters
    others = any(one.kind is one.VAR_KEYWORD for one in parameters.values())  # the op itself tells which
    for name, value in options:
        if name not in parameters and not others:
            taken = ", ".join(parameters)
            raise click.BadParameter(f"{op} has no argument {name!r}; it takes {taken}", param_hint="--set")
        if name in parameters and isinstance(parameters[name].default, bool) and not isinstance(value, bool):
            raise click.BadParameter(f"{name} must be true or false, got {value!r}", param_hint="--set")


def _as_dict(plan: Plan) -> dict[str, Any]:
    launches, missing = [], []
    for launch in plan.launches:
        choice = dispatcher.choose(launch.spec, plan.arch, launch.size)
        sized = size_choice(launch, plan.arch)
        launches.append({
            "kernel": launch.spec.kernel,
            "spec": launch.spec.key,
            "grid": launch.grid,
            "size": launch.size,
            "size_limits": sized.limits,
            "schedule": sized.chosen.schedule.as_dict(),
            "schedule_source": sized.chosen.source,
            "artifact": choice.path.name if choice.path else None,
            "registry": str(choice.registry.root) if choice.registry else None,
            "reason": choice.reason,
        })  # fmt: skip
        if choice.path is None:
            missing.append(build_command(launch.spec, plan.arch))
    return {
        "op": plan.op,
        "arch": plan.arch,
        "problem": dict(plan.problem),
        "workspace_bytes": plan.workspace_bytes,
        "segments": None
        if plan.split is None
        else {
            "per_sequence": plan.split.segments,
            "chunks": plan.split.segment_chunks,
            "reason": plan.split.reason,
        },
        "launches": launches,
        "build": list(dict.fromkeys(missing)),
    }
