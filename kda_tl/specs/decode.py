"""Spec and schedule of dense recurrent decode, and the flags that are run-time values of its kernel.

The rule is a run-time value too: every rule of the family is the same pass over the state with other coefficients, and a
decay that all channels share is read with stride 0. So one artifact per K and dtypes serves KDA, GDN, RWKV6 and the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import ClassVar

from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.kernels import DTYPES, KERNEL_SPECS, KernelSpec, check_one_of
from kda_tl.specs.schedules import SCHEDULES, Schedule

__all__ = ["DecodeFlag", "RecurrentDecodeSchedule", "RecurrentDecodeSpec", "decode_specs"]

WARP = 32


class DecodeFlag(IntFlag):
    """What a launch of recurrent_decode does, one bit each."""

    UNIFORM = 1  # a dense batch: every request has T tokens; else cu_seqlens says which. Bit 0: the grid counts with it
    DELTA = 2  # write the residual against the decayed state, not v itself
    READ_FIRST = 4  # read before decay and write, and add the bonus of the token at hand (RWKV6)
    DECAY = 8  # there is a decay
    WIDE_GATE = 16  # g is float32
    WIDE_BETA = 32  # beta is float32
    HAS_BETA = 64  # else the write strength is 1
    HAS_DT_BIAS = 128
    L2NORM = 256  # q and k are divided by their norms
    LOAD_STATE = 512  # else every state starts from zero
    LOAD_FLAGS = 1024  # a state starts from zero where `starts` of its request is 0
    STORE_STATE = 2048
    INDEXED_IN = 4096  # the state of request n is read from slot state_indices[n], else from slot n
    INDEXED_OUT = 8192  # the same of where it is written
    V_FIRST_IN = 16384  # the pool that is read is [slots, HV, V, K], else [slots, HV, K, V]
    V_FIRST_OUT = 32768  # the same of the pool that is written
    HAS_A_LOG = 65536


@dataclass(frozen=True)
class RecurrentDecodeSpec(KernelSpec):
    """One or a few tokens per request: the state is read once, passed through the tokens in registers, and written once.

    Attributes:
        head_dim_k: K. V is a run-time value, any multiple of 8.
        dtype: of q, k, v and o, and of g and beta where these are not float32.
        state_dtype: of the states in memory; between the tokens of one launch they are float32.
    """

    kernel: ClassVar[str] = "recurrent_decode"
    head_dim_k: int = 128
    dtype: str = "bfloat16"
    state_dtype: str = "float32"

    def __post_init__(self) -> None:
        check_one_of("head_dim_k", self.head_dim_k, (64, 128))
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("state_dtype", self.state_dtype, DTYPES)

    @property
    def vector(self) -> int:
        """Elements of a state in one access of 16 bytes."""
        return 4 if self.state_dtype == "float32" else 8


@dataclass(frozen=True)
class RecurrentDecodeSchedule(Schedule):
    """How the K x V state of a value head is spread over threads.

    Attributes:
        threads: per block, a multiple of 32.
        lanes_k: neighbouring threads that share the K rows of their columns; a power of two up to 32.
        values: columns that a thread holds, 4 or 8.
        min_blocks: blocks per multiprocessor that the compiler keeps registers free for.
    """

    kernel: ClassVar[str] = "recurrent_decode"
    threads: int = 128
    lanes_k: int = 8
    values: int = 4
    min_blocks: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads % WARP or self.threads > 1024:
            raise ValueError(f"threads must be a multiple of {WARP} up to 1024, got {self.threads}")
        if self.lanes_k not in (2, 4, 8, 16, 32):
            raise ValueError(f"lanes_k must be 2, 4, 8, 16 or 32, got {self.lanes_k}")
        if self.values not in (4, 8):
            raise ValueError(f"values must be 4 or 8, got {self.values}")

    @property
    def block_v(self) -> int:
        """Columns of the state that one block holds."""
        return self.threads // self.lanes_k * self.values


def decode_specs(arch: str) -> list[KernelSpec]:
    """What ships for `arch`: bfloat16 activations with every dtype of the state, float32 ones with float32."""
    if arch_row(arch).is_cpu:
        return [RecurrentDecodeSpec(K, "float32", "float32") for K in (64, 128)]
    pairs = {64: ("float32", "bfloat16"), 128: ("float32", "bfloat16", "float16")}
    narrow = [RecurrentDecodeSpec(K, "bfloat16", state) for K, states in pairs.items() for state in states]
    return [*narrow, RecurrentDecodeSpec(128, "float32", "float32")]


KERNEL_SPECS[RecurrentDecodeSpec.kernel] = RecurrentDecodeSpec
SCHEDULES[RecurrentDecodeSchedule.kernel] = RecurrentDecodeSchedule
