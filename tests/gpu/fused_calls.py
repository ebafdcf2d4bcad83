"""Calls of chunk_kda that come again with other values, and what they give without being recognised; shared with tests/runtime.

float32 on the cpu, bfloat16 on a device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kda_tl
from kda_tl.runtime import fused


def inputs(seed: int, device: str, T: int = 150, K: int = 128, heads: int = 2) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q, k = (torch.nn.functional.normalize(normal(1, T, heads, K), dim=-1) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": normal(1, T, heads, K),
        "g": -normal(1, T, heads, K).abs(),
        "beta": normal(1, T, heads).sigmoid(),
    }


def unfused(x: dict[str, Any], op: Any = kda_tl.chunk_kda) -> Any:
    """The call as if nothing had gone before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "native", lambda name: None)
        patch.setattr(op.repeated, "call", lambda *given: None)
        patch.setattr("kda_tl.ops.prefill_library.known", lambda key: None)
        patch.setattr("kda_tl.ops.prefill_library.once", lambda key, make: make())
        return op(**x)


def with_everything(seed: int, device: str) -> dict[str, Any]:
    options = dict.fromkeys(
        ("use_gate_in_kernel", "output_final_state", "state_v_first", "return_intermediate_states", "use_qk_l2norm_in_kernel"),
        True,
    )
    given = {"A_log": torch.randn(2), "dt_bias": torch.randn(2, 128), "initial_state": torch.randn(1, 2, 128, 128)}
    return inputs(seed, device) | options | {name: x.to(device) for name, x in given.items()}


def apart(seed: int, device: str) -> dict[str, Any]:
    """Rows that no kernel can read where they lie."""
    return {name: torch.stack([x, x], -1)[..., 0] if name != "beta" else x for name, x in inputs(seed, device).items()}


def in_a_pool(seed: int, device: str, T: int = 150) -> dict[str, Any]:
    mask = torch.tensor([seed % 2 == 0])
    pool = {"initial_state": torch.randn(5, 2, 128, 128), "state_indices": torch.tensor([3]), "has_initial_state": mask}
    return inputs(seed, device, T) | {name: x.to(device) for name, x in pool.items()} | {"output_final_state": True}


def pack(seed: int, device: str) -> dict[str, Any]:
    offsets = torch.tensor([0, 10, 10, 140], device=device)
    return inputs(seed, device, K=64) | {"cu_seqlens": offsets, "output_final_state": True}


CALLS: dict[str, Any] = {
    "dense": inputs,
    "gate and states": with_everything,
    "pack": pack,
    "segments": lambda seed, device: inputs(seed, device, T=300) | {"intracard_segments": 3, "output_final_state": True},
    "converted": lambda seed, device: {name: x.half() for name, x in inputs(seed, device).items()},
    "apart": apart,
    "pool": in_a_pool,
    "segments in a pool": lambda seed, device: in_a_pool(seed, device, T=300) | {"intracard_segments": 3},
}
