"""What every prefill op comes down to: one rule, and one list of arguments that all of them share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from kda_tl.specs.rules import Rule

__all__ = ["TENSORS", "Arguments", "Op"]


class Arguments(NamedTuple):
    """The arguments of a call in the order of the registered op's schema. Shapes and dtypes as in `chunk_kda`.

    bonus: [H, K], of the current token, where the rule reads first. state_indices and null_index come last: only the in-place
    variant of the registered op has them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    bonus: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    has_initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    scale: float | None = None
    lower_bound: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    output_final_state: bool = False
    return_intermediate_states: bool = False
    intracard_segments: int | None = None
    state_indices: Tensor | None = None
    null_index: int | None = None


TENSORS = (*Arguments._fields[: Arguments._fields.index("scale")], "state_indices")


@dataclass(frozen=True)
class Op:
    """A public op.

    Attributes:
        name: of the function, and of the registered op kda_tl::name.
        rule: what it computes.
        names: what the function calls a field of Arguments, where that is not the field's own name.
    """

    name: str
    rule: Rule
    names: Mapping[str, str] = field(default_factory=dict)

    def called(self, name: str) -> str:
        return self.names.get(name, name)

    def tensors(self, a: tuple[object, ...], fields: Iterable[str]) -> Iterator[tuple[str, Tensor | None]]:
        """What the function calls those fields of its arguments, each with its value."""
        return ((self.called(name), getattr(a, name)) for name in fields)

    @property
    def required(self) -> tuple[str, ...]:
        """Fields that must be tensors."""
        rule = self.rule
        by_rule = {"g": rule.decay != "none", "beta": rule.delta, "bonus": rule.read_first}
        return ("q", "k", "v", *(name for name, needed in by_rule.items() if needed))
