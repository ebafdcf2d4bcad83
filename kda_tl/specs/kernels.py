"""What can be built: one frozen dataclass per kernel, printable and hashable, the key of its artifact.

A spec holds what is compiled in. Batch, sequence length, number of sequences, head counts, scale, layouts and strides are
run-time values: one artifact serves them all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import ClassVar

__all__ = ["KERNEL_SPECS", "ChunkScanSpec", "ChunkWySpec", "KernelSpec", "check_one_of", "spec_of_key"]

DTYPES = ("bfloat16", "float16", "float32")
DECAYS = ("none", "scalar", "per_key")


@dataclass(frozen=True)
class KernelSpec:
    """Base of all specs."""

    kernel: ClassVar[str] = ""

    @functools.cached_property
    def key(self) -> str:
        """The spec as one line of text, the name under which the manifest lists its artifact."""
        return f"{self.kernel}[" + ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self)) + "]"

    @property
    def operand_dtype(self) -> str:
        """Of the operands of matrix products and of the workspace. float16 where the activations are narrow: it rounds eight
        times finer than bfloat16 at the same speed, and chunk_scan keeps what could leave its range scaled."""
        return "float32" if getattr(self, "dtype", None) == "float32" else "float16"

    def as_dict(self) -> dict[str, object]:
        return {"kernel": self.kernel, **{f.name: getattr(self, f.name) for f in fields(self)}}


def check_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


@dataclass(frozen=True)
class ChunkWySpec(KernelSpec):
    """Per chunk and value head, all that does not depend on the state: the inputs of chunk_scan.

    Attributes:
        head_dim_k: K.
        chunk_size: C, tokens per chunk.
        dtype: of q and k.
        gate_dtype: of g and beta, raw or activated.
        decay: "none", "scalar" (GDN: g [B, T, HV]) or "per_key" (KDA: g [B, T, HV, K]).
        delta: whether the rule corrects what it writes (A_inv is stored), or writes v as it is.
        read_first: RWKV6: a token reads the state before its decay and its write, and adds its bonus.
    """

    kernel: ClassVar[str] = "chunk_wy"
    head_dim_k: int = 128
    chunk_size: int = 64
    dtype: str = "bfloat16"
    gate_dtype: str = "float32"
    decay: str = "per_key"
    delta: bool = True
    read_first: bool = False

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("gate_dtype", self.gate_dtype, DTYPES)
        check_one_of("decay", self.decay, DECAYS)
        check_one_of("chunk_size", self.chunk_size, (64,))
        check_one_of("head_dim_k", self.head_dim_k, (64, 128))
        if self.read_first and self.delta:
            raise ValueError("read_first must be False where delta is True: no rule has both")
        if self.read_first and self.decay != "per_key":
            raise ValueError(f"read_first must be False where decay is {self.decay}: no rule has both")


@dataclass(frozen=True)
class ChunkScanSpec(KernelSpec):
    """Affine state passing and output: walks the chunks of a sequence with the state on chip. The same for every decay.

    Attributes:
        head_dim_k, head_dim_v: K, V.
        chunk_size: C, tokens per chunk.
        dtype: of v and o; the workspace is of `operand_dtype`.
        state_dtype: of the states in and out.
        delta: whether A_inv is applied to the residual, or v is written as it is.
    """

    kernel: ClassVar[str] = "chunk_scan"
    head_dim_k: int = 128
    head_dim_v: int = 128
    chunk_size: int = 64
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    delta: bool = True

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("state_dtype", self.state_dtype, DTYPES)
        check_one_of("chunk_size", self.chunk_size, (64,))
        check_one_of("head_dim_k", self.head_dim_k, (64, 128))
        check_one_of("head_dim_v", self.head_dim_v, (64, 128))


KERNEL_SPECS: dict[str, type[KernelSpec]] = {spec.kernel: spec for spec in (ChunkWySpec, ChunkScanSpec)}


def spec_of_key(key: str) -> KernelSpec:
    """The spec whose `key` this is; fields that it leaves out have their defaults.

    Raises:
        ValueError: it names no kernel, or a field or value that the kernel does not have.
    """
    name, bracket, rest = key.strip().partition("[")
    if name not in KERNEL_SPECS:
        raise ValueError(f"a spec is KERNEL[FIELD=VALUE,...] with KERNEL one of {', '.join(KERNEL_SPECS)}, got {key!r}")
    if bracket and not rest.endswith("]"):
        raise ValueError(f"a spec is KERNEL[FIELD=VALUE,...], got {key!r}")
    kind = KERNEL_SPECS[name]
    defaults = {f.name: f.default for f in fields(kind)}
    given: dict[str, object] = {}
    for part in filter(None, rest.removesuffix("]").split(",")):
        field, _, text = (word.strip() for word in part.partition("="))
        if field not in defaults or field in given:
            raise ValueError(f"{name} takes each of {', '.join(defaults)} once, got {part.strip()!r} in {key!r}")
        given[field] = _read(text, defaults[field])
    return kind(**given)


def _read(text: str, default: object) -> object:
    """Keys hold str(value): a truth value, a number, or a word, as the field's default says."""
    if text == "None":
        return None
    if text in ("True", "False"):
        return text == "True"
    return text if isinstance(default, str) or not text.lstrip("-").isdecimal() else int(text)
