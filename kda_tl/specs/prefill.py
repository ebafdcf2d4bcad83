"""Which prefill kernels ship: by rule, dtype and head dim. The ops pad whatever lies between."""

from __future__ import annotations

from kda_tl.specs.intracard import intracard_specs
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec
from kda_tl.specs.rules import RULES, Rule

__all__ = ["POOL_DTYPES", "gate_dtypes", "prefill_specs", "shipped_head_dims"]

POOL_DTYPES = {
    "bfloat16": ("float32", "bfloat16", "float16"),
    "float16": ("float32",),
    "float32": ("float32",),
}
"""By dtype of the activations: state pools that chunk_scan reads and writes itself, at K = V = 128."""


def shipped_head_dims(rule: Rule, dtype: str) -> tuple[int, ...]:
    """K and V of the kernels of a rule, smallest first."""
    return (64, 128) if dtype != "float16" and rule in (RULES["kda"], RULES["gdn"]) else (128,)


def gate_dtypes(rule: Rule, dtype: str) -> tuple[str, ...]:
    """Of g and beta, as chunk_wy reads them; others are converted to float32."""
    return ("float32", "bfloat16") if dtype == "bfloat16" and (rule.delta or rule.decay != "none") else ("float32",)


def prefill_specs(is_cpu: bool) -> list[KernelSpec]:
    """The default set."""
    dtypes = ("float32",) if is_cpu else ("bfloat16", "float16", "float32")
    specs: dict[KernelSpec, None] = {}
    for dtype in dtypes:
        for rule in RULES.values():
            sizes = shipped_head_dims(rule, dtype)
            for K in sizes:
                for gate_dtype in gate_dtypes(rule, dtype):
                    wy = ChunkWySpec(K, 64, dtype, gate_dtype, rule.decay, rule.delta, rule.read_first)
                    specs[wy] = None
                for V in sizes:
                    specs[ChunkScanSpec(K, V, 64, dtype, "float32", rule.delta)] = None
            for state_dtype in POOL_DTYPES[dtype]:
                specs[ChunkScanSpec(128, 128, 64, dtype, state_dtype, rule.delta)] = None
    return [*specs, *intracard_specs(is_cpu)]
