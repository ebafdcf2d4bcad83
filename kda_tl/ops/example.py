"""Inputs of an op made from sizes alone: what plans, warm-ups and the command line call it with."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kda_tl.ops.deltalog_cache import DeltaLogCache

__all__ = ["LAYOUTS", "example_inputs", "op_named"]

Op = Callable[..., Any]

# By argument name; "g" of an op with one decay per head has no K. An argument that no row names needs a shape of its own.
LAYOUTS = {
    "q": "B T H K",
    "k": "B T H K",
    "v": "B T HV V",
    "r": "B T H K",
    "w": "B T HV K",
    "g": "B T HV K",
    "gk": "B T HV K",
    "beta": "B T HV",
    "u": "H K",
}


def op_named(name: str) -> Op:
    """The public op of that name. Raises ValueError where kda_tl.ops has none."""
    for module_name, module in sorted(sys.modules.items()):
        found = getattr(module, name, None) if module_name.startswith("kda_tl.ops.") else None
        # An op may import its own reference, a function of another room by the same name.
        if inspect.isfunction(found) and found.__module__.startswith("kda_tl.ops."):
            return found
    raise ValueError(f"op must be the name of a public op, got {name!r}")


def example_inputs(
    op: Op,
    *,
    tokens: int = 1,
    batch: int = 1,
    heads: int = 1,
    value_heads: int | None = None,
    head_dim_k: int = 128,
    head_dim_v: int = 128,
    lengths: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shapes: Mapping[str, Sequence[int]] | None = None,
    real: bool = False,
) -> dict[str, Any]:
    """Tensor arguments of `op` by name, zeros all of them, and its cache, where it needs one, of one slot.

    Args:
        tokens: T; of the whole pack where `lengths` are given.
        lengths: of the sequences packed along T; adds cu_seqlens and takes B = 1.
        dtype: of the activations; gates and write strengths are float32.
        shapes: by argument, in place of what its name implies, or for arguments whose names imply nothing.
        real: tensors with memory of their own; else views of one zero, which only a plan may look at.

    Raises:
        ValueError: an argument without a default has a name that implies no shape, or `op` takes no cu_seqlens.
    """
    if lengths is not None:
        batch = 1
    sizes = {"B": batch, "T": tokens, "H": heads, "HV": heads if value_heads is None else value_heads,
             "K": head_dim_k, "V": head_dim_v}  # fmt: skip
    parameters = inspect.signature(op).parameters
    given = dict(shapes or {})
    if unknown := given.keys() - parameters.keys():
        raise ValueError(f"{op.__name__} has no argument {min(unknown)!r}; it takes {', '.join(parameters)}")
    inputs: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if name in given:
            shape = list(given[name])
        elif name == "cache":  # plans and one call of zeros need no more than one slot
            rule = op.__name__.removeprefix("deltalog_decode_")
            inputs[name] = DeltaLogCache(1, sizes["HV"], head_dim_k, head_dim_v, rule, dtype=dtype, device=device)
            continue
        elif name == "state_indices" and parameter.default is parameter.empty:
            shape = [batch]
        elif name in LAYOUTS:
            shape = [sizes[size] for size in _layout(op, name).split()]
        elif parameter.default is parameter.empty:
            raise ValueError(f"the shape of {name} does not follow from its name: give one, e.g. {name}=1,64,2,128")
        else:
            continue
        kind = torch.float32 if name in ("g", "gk", "w", "beta", "u") else _dtype(name, dtype)
        inputs[name] = torch.zeros(shape if real else (), dtype=kind, device=device).expand(shape)
    if lengths is not None:
        if "cu_seqlens" not in parameters:
            raise ValueError(f"{op.__name__} takes no packed sequences: it has no argument cu_seqlens")
        inputs["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return inputs


def _layout(op: Op, name: str) -> str:
    if name == "g" and op.op.rule.decay != "per_key":  # type: ignore[attr-defined]
        return "B T HV"
    return LAYOUTS[name]


def _dtype(name: str, activations: torch.dtype) -> torch.dtype:
    """Index arguments are named so; a state is float32."""
    if name.endswith(("indices", "seqlens", "lengths")):
        return torch.int32
    return torch.float32 if "state" in name or name in ("A_log", "dt_bias") else activations
