"""deltalog_decode_*: one token per request, or a few drafts, from a DeltaLogCache."""

from __future__ import annotations

from torch import Tensor

from kda_tl.ops.arguments import Op
from kda_tl.ops.deltalog_cache import DeltaLogCache, DeltaLogSnapshot
from kda_tl.ops.deltalog_library import DeltaLogArguments, public
from kda_tl.specs.rules import RULES

__all__ = ["DeltaLogCache", "DeltaLogSnapshot", "deltalog_decode_gdn", "deltalog_decode_kda", "deltalog_decode_rwkv6"]

Arguments = tuple[DeltaLogCache, DeltaLogArguments]
KDA = Op("deltalog_decode_kda", RULES["kda"])
GDN = Op("deltalog_decode_gdn", RULES["gdn"])
RWKV6 = Op("deltalog_decode_rwkv6", RULES["rwkv6"], {"q": "r", "g": "w", "bonus": "u"})


@public(KDA)
def deltalog_decode_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cache: DeltaLogCache,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    null_index: int | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    valid: Tensor | None = None,
    verify: bool | None = None,
) -> Arguments:
    """One step of Kimi Delta Attention for n requests, on the states in `cache`, in place.

    The base is read once; the token becomes an entry of the log, or, on every `merge_every`-th token of a slot, base, log and
    token are folded together, in the same launch. A call may be captured in a CUDA graph once its kernels are loaded, and
    torch.compile traces it with the cache as an input. Definition: `kda_tl.reference.recurrent_kda`; source: arXiv 2608.15533.

    Args:
        q, k: [n, T, H, K] in the cache's dtype (any float dtype on the cpu). T = 1, or T drafts of each request, up to 16.
        v: [n, T, HV, V]. g: [n, T, HV, K], natural-log decay (<= 0), or with `use_gate_in_kernel` the raw gate input. beta:
            [n, T, HV], or with `use_beta_sigmoid_in_kernel` its logits. g and beta in the dtype of q, or in float32.
        state_indices: [n] int32 (int64 costs a conversion), no slot twice. Requests whose slot is null_index or out of range
            are padding: their output is zero, and nothing else is read or written.
        scale: of the output; default K ** -0.5.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, A_log [HV],
            dt_bias [HV * K] or [HV, K]: as in `chunk_kda`, evaluated in the kernel in float32.
        valid: [n] int32: only the first valid[i] tokens of request i count; the output of the others is zero.
        verify: keep the tokens of this call in the log, so that `cache.truncate` can take them back; a log without room for
            them is folded first, in a launch of its own. Default, and necessary: T > 1.

    Returns:
        o [n, T, HV, V] in the dtype of v.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        ArtifactMissing: the kernels are not built for this device; the message names the command.
        NotImplementedError: an input requires a gradient.
    """
    return cache, DeltaLogArguments(
        q, k, v, g, beta, None, A_log, dt_bias, state_indices, valid, null_index, scale, lower_bound,
        bool(use_qk_l2norm_in_kernel), bool(use_gate_in_kernel), bool(use_beta_sigmoid_in_kernel), bool(allow_neg_eigval),
        verify,
    )  # fmt: skip


@public(GDN)
def deltalog_decode_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cache: DeltaLogCache,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    null_index: int | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    valid: Tensor | None = None,
    verify: bool | None = None,
) -> Arguments:
    """One step of Gated DeltaNet: as `deltalog_decode_kda` with one decay for all keys, g [n, T, HV] and dt_bias [HV]."""
    return cache, DeltaLogArguments(
        q, k, v, g, beta, None, A_log, dt_bias, state_indices, valid, null_index, scale, None,
        bool(use_qk_l2norm_in_kernel), bool(use_gate_in_kernel), bool(use_beta_sigmoid_in_kernel), bool(allow_neg_eigval),
        verify,
    )  # fmt: skip


@public(RWKV6)
def deltalog_decode_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    cache: DeltaLogCache,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    null_index: int | None = None,
    valid: Tensor | None = None,
    verify: bool | None = None,
) -> Arguments:
    """One step of RWKV6: o = scale (r^T S + (r . (u k)) v), then S <- Diag(e^w) S + k v^T.

    r, k [n, T, H, K]; v [n, T, HV, V]; w [n, T, HV, K] natural-log decay; u [H, K], the bonus of the token at hand, any float
    dtype. The rest, what is returned and what is raised as for `deltalog_decode_kda`.
    """
    return cache, DeltaLogArguments(
        r, k, v, w, None, u, None, None, state_indices, valid, null_index, scale, None, False, False, False, False, verify
    )
