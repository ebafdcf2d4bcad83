"""Context parallelism: one sequence over several ranks, exact for any gate, with one all-gather per call.

    import torch.distributed as dist
    from kda_tl.distributed import ContextParallel

    dist.init_process_group("cpu:gloo,cuda:nccl")
    context = ContextParallel.packed(cu_seqlens)             # of the whole pack, the same on all ranks
    q, k, v, g, beta = (context.take(x, cu_seqlens) for x in (q, k, v, g, beta))   # or loaded as the local part to begin with
    o, state = kda_tl.chunk_kda(q, k, v, g, beta, cp_context=context, output_final_state=True)

`ContextParallel` documents how tokens map to ranks, whose states are whose, and what happens where a rank fails. `Layout` takes
any placement of tokens, zigzag included. The ops also take the contexts of flash-linear-attention (`from_fla`).
"""

from kda_tl.ops.context import register_adapter

from .context import ContextParallel
from .errors import ContextParallelError
from .fla import from_fla
from .layout import Layout, Piece

__all__ = ["ContextParallel", "ContextParallelError", "Layout", "Piece", "from_fla"]

register_adapter(from_fla)
