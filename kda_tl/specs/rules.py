"""The rules of the family: what happens to the state at one token."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["DECAYS", "RULES", "Rule"]

DECAYS = ("none", "scalar", "per_key")


@dataclass(frozen=True)
class Rule:
    """How a token changes the state S [K, V]: decay, then write k u^T with u = v, or with the delta correction
    u = beta (v - S^T k). `kda_tl.reference.recurrent_rule(..., **rule.as_dict())` is its definition.

    Attributes:
        decay: "none" (there is no g), "scalar" (g [B, T, HV]) or "per_key" (g [B, T, HV, K]).
        delta: with the delta correction, and with beta [B, T, HV].
        read_first: the output reads the state before this token's decay and write, plus a bonus [H, K] for the token itself
            (RWKV6). Only without the delta correction.
    """

    decay: str = "per_key"
    delta: bool = True
    read_first: bool = False

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ValueError(f"decay must be one of {', '.join(DECAYS)}, got {self.decay!r}")
        for name in ("delta", "read_first"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.read_first and self.delta:
            raise ValueError("read_first=True needs delta=False: no rule reads before a delta-corrected write")

    def as_dict(self) -> dict[str, str | bool]:
        """The fields by name, as keyword arguments."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


RULES = {
    "kda": Rule("per_key", True),
    "gdn": Rule("scalar", True),
    "delta_rule": Rule("none", True),
    "gla": Rule("per_key", False),
    "simple_gla": Rule("scalar", False),
    "linear_attention": Rule("none", False),
    "rwkv6": Rule("per_key", False, read_first=True),
}
