"""The spec that a key names: `parse_spec(spec.key) == spec`."""

from __future__ import annotations

import re
from dataclasses import fields

from kda_tl.specs.kernels import KERNEL_SPECS, KernelSpec

__all__ = ["parse_spec"]


def parse_spec(key: str) -> KernelSpec:
    """The spec whose `key` this is, as `kda-tl list` and error messages print it: "chunk_wy[head_dim_k=128,dtype=bfloat16]".

    Fields that the key leaves out take their defaults.

    Raises:
        ValueError: no such kernel, no such field, or a value that the spec does not allow.
    """
    match = re.fullmatch(r"(\w+)(?:\[(.*)\])?", key.strip())
    kind = KERNEL_SPECS.get(match[1]) if match else None
    if match is None or kind is None:
        raise ValueError(f"a spec is KERNEL[FIELD=VALUE,...] with one of the kernels {', '.join(KERNEL_SPECS)}, got {key!r}")
    defaults = {f.name: f.default for f in fields(kind)}
    values: dict[str, object] = {}
    for part in filter(None, (match[2] or "").split(",")):
        name, _, text = part.partition("=")
        if name not in defaults:
            raise ValueError(f"{match[1]} has the fields {', '.join(defaults)}, got {name!r} in {key!r}")
        values[name] = _value(text, defaults[name])
    return kind(**values)


def _value(text: str, default: object) -> object:
    """Keys hold str() of the values; a field's default tells its type, and None any."""
    if text in ("True", "False"):
        return text == "True"
    if text == "None":
        return None
    if not isinstance(default, str) and re.fullmatch(r"-?\d+", text):
        return int(text)
    return text
