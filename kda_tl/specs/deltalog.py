"""DeltaLog decode: its specs, schedules and default set.

The shape of a log is part of a spec, because it is the shape of a cache in memory: `capacity` entries per slot and value head.
When a log is folded into its base is none: it is a run-time number whose tuned value, `merge_every`, comes with the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kda_tl.specs import rules
from kda_tl.specs.kernels import DTYPES, KERNEL_SPECS, KernelSpec, check_one_of
from kda_tl.specs.schedules import SCHEDULES, Schedule

__all__ = [
    "CAPACITY",
    "CURSOR_ROWS",
    "K_FIRST",
    "RULES",
    "TWO_LAUNCHES",
    "DeltaLogDecodeSchedule",
    "DeltaLogDecodeSpec",
    "DeltaLogPrepSchedule",
    "DeltaLogPrepSpec",
    "cpu_state_dtype",
    "deltalog_default_specs",
]

CAPACITY = 16
CURSOR_ROWS = 16
"""Rows of V that share one copy of the cursor. Every block reads and writes the copies of its own rows and no others, so that
blocks of one slot never race, however many a schedule gives it."""

RULES = {name: rules.RULES[name].as_dict() for name in ("kda", "gdn", "rwkv6")}

TWO_LAUNCHES = (("kda", "float32"), ("kda", "bfloat16"))
"""Rules and bases that are built as two launches too."""

K_FIRST = ("kda", "gdn")
"""Rules that are built for float32 bases [K, V] too."""


def _check_rule(spec: DeltaLogDecodeSpec | DeltaLogPrepSpec) -> None:
    check_one_of("head_dim_k", spec.head_dim_k, (64, 128))
    check_one_of("dtype", spec.dtype, DTYPES)
    check_one_of("decay", spec.decay, ("scalar", "per_key"))
    check_one_of("delta", spec.delta, (True, False))
    check_one_of("read_first", spec.read_first, (False,) if spec.delta else (True, False))
    check_one_of("capacity", spec.capacity, (8, 16, 32))


@dataclass(frozen=True)
class DeltaLogDecodeSpec(KernelSpec):
    """Decode from a base and a log: reads the base once, appends an entry, writes the base only where a log is full.

    Attributes:
        head_dim_k, head_dim_v: K, V.
        dtype: of q, k, v, o and of the keys in the log; g and beta come in it or in float32.
        state_dtype: of the base.
        decay: "per_key" (KDA, RWKV6) or "scalar" (GDN): decays of the log are [.., capacity, K] or [.., capacity, 1].
        delta: u = beta (v - S^T k); otherwise u = v.
        read_first: RWKV6: read before decay and write, plus a bonus for the token at hand.
        capacity: entries that the log of a slot and value head has room for.
        state_v_first: the base is [V, K], read in accesses of 16 bytes; otherwise [K, V], read element by element.
        prepared: True for the second of two launches, behind DeltaLogPrepSpec.
        one_token: True for the step of one token per request that may fold its log; False for drafts, and for all of [K, V].
    """

    kernel: ClassVar[str] = "deltalog_decode"
    head_dim_k: int = 128
    head_dim_v: int = 128
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    decay: str = "per_key"
    delta: bool = True
    read_first: bool = False
    capacity: int = CAPACITY
    state_v_first: bool = True
    prepared: bool = False
    one_token: bool = False

    def __post_init__(self) -> None:
        _check_rule(self)
        check_one_of("one_token", self.one_token, (False,) if self.prepared or not self.state_v_first else (True, False))
        check_one_of("head_dim_v", self.head_dim_v, (64, 128))
        check_one_of("state_dtype", self.state_dtype, DTYPES)
        check_one_of("state_v_first", self.state_v_first, (True, False))
        check_one_of("prepared", self.prepared, (False,) if not self.state_v_first else (True, False))

    @property
    def decay_size(self) -> int:
        """Decays per entry."""
        return self.head_dim_k if self.decay == "per_key" else 1

    @property
    def prep_spec(self) -> DeltaLogPrepSpec:
        """What must run before this spec where it is `prepared`."""
        return DeltaLogPrepSpec(self.head_dim_k, self.dtype, self.decay, self.delta, self.read_first, self.capacity)


@dataclass(frozen=True)
class DeltaLogPrepSpec(KernelSpec):
    """ReplayPrep: what all V tiles of a slot and value head share, computed once. Attributes as DeltaLogDecodeSpec's."""

    kernel: ClassVar[str] = "deltalog_prep"
    head_dim_k: int = 128
    dtype: str = "bfloat16"
    decay: str = "per_key"
    delta: bool = True
    read_first: bool = False
    capacity: int = CAPACITY

    def __post_init__(self) -> None:
        _check_rule(self)

    @property
    def decay_size(self) -> int:
        return self.head_dim_k if self.decay == "per_key" else 1


@dataclass(frozen=True)
class DeltaLogDecodeSchedule(Schedule):
    """How a slot's state is split over blocks, and when its log is folded.

    Attributes:
        block_v: rows of the base, which is [V, K], per block; a multiple of 16 that divides V.
        threads: per block; 8 of them share a row, or 4 in the step of one token.
        min_blocks: blocks per multiprocessor that the compiler keeps registers free for.
        merge_every: tokens from one fold to the next. Traffic is lowest near sqrt(2 s d^2 / E), s bytes per element of the
            base that a fold writes (and reads beside the base: 1.5 more than a float16 has for bfloat16), E bytes per entry:
            about 10 for KDA with a float32 base, 13 for GDN; 7 and 9 for float16, 9 and 11 for bfloat16.
        launches: 1, or 2 with ReplayPrep first.
    """

    kernel: ClassVar[str] = "deltalog_decode"
    block_v: int = 32
    threads: int = 128
    min_blocks: int = 4
    merge_every: int = 8
    launches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_v not in (16, 32, 64, 128):
            raise ValueError(f"block_v must be 16, 32, 64 or 128, a divisor of V, got {self.block_v}")
        if self.threads not in (128, 256, 512) or self.threads > 8 * self.block_v:
            raise ValueError(f"threads must be 128, 256 or 512, at most 8 per row of block_v, got {self.threads}")
        if self.launches not in (1, 2):
            raise ValueError(f"launches must be 1 or 2, got {self.launches}")
        if self.merge_every > CAPACITY:
            raise ValueError(f"merge_every must be at most {CAPACITY}, the capacity of the log, got {self.merge_every}")


@dataclass(frozen=True)
class DeltaLogPrepSchedule(Schedule):
    """threads: per block, one block per request and value head."""

    kernel: ClassVar[str] = "deltalog_prep"
    threads: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads not in (64, 128, 256):
            raise ValueError(f"threads must be 64, 128 or 256, got {self.threads}")


def deltalog_default_specs(is_cpu: bool) -> list[KernelSpec]:
    """One launch for every rule and base, of one token and of several; two launches for KDA.

    The cpu has those that `cpu_state_dtype` names.
    """
    dtype = "float32" if is_cpu else "bfloat16"
    single = {(rule, base) for rule in RULES for base in DTYPES}
    double = set(TWO_LAUNCHES)
    if is_cpu:
        single = {(rule, cpu_state_dtype(rule, base, 1)) for rule, base in single}
        double = {(rule, cpu_state_dtype(rule, base, 2)) for rule, base in double}
    several: list[KernelSpec] = [_spec(dtype, rule, base) for rule, base in sorted(single)]
    several.extend(_spec(dtype, rule, "float32", state_v_first=False) for rule in K_FIRST)
    one: list[KernelSpec] = [_spec(dtype, rule, base, one_token=True) for rule, base in sorted(single)]
    two: list[KernelSpec] = [_spec(dtype, rule, base, prepared=True) for rule, base in sorted(double)]
    return [*one, *several, DeltaLogPrepSpec(dtype=dtype), *two]


def cpu_state_dtype(rule: str, state_dtype: str, launches: int) -> str:
    """The base that the cpu's kernels read: float32, from which ops round to the pool's dtype where a log was folded.

    The C target has no bfloat16. One kernel with a float16 base is there too, so that the programs for narrow bases run.
    """
    return "float16" if (rule, state_dtype, launches) == ("kda", "float16", 1) else "float32"


def _spec(dtype: str, rule: str, state_dtype: str, **fields: bool) -> DeltaLogDecodeSpec:
    return DeltaLogDecodeSpec(dtype=dtype, state_dtype=state_dtype, **RULES[rule], **fields)  # type: ignore[arg-type]


KERNEL_SPECS.update({spec.kernel: spec for spec in (DeltaLogDecodeSpec, DeltaLogPrepSpec)})
SCHEDULES.update({schedule.kernel: schedule for schedule in (DeltaLogDecodeSchedule, DeltaLogPrepSchedule)})
