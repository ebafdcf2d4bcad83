"""recurrent_kda: Kimi Delta Attention for one or a few tokens per request, the dense decode step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_tl.ops.arguments import Op
from kda_tl.ops.decode import DecodeArguments, public, refuse_unknown
from kda_tl.specs.rules import RULES

__all__ = ["RECURRENT_KDA", "recurrent_kda"]

RECURRENT_KDA = Op("recurrent_kda", RULES["kda"])


@public(RECURRENT_KDA)
def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    null_index: int | None = None,
    has_initial_state: Tensor | None = None,
    inplace: bool = False,
    **kwargs: Any,
) -> DecodeArguments:
    """Kimi Delta Attention (arXiv 2510.26692) token by token, in one launch.

    The state of a request is read once and written once.

    Names are those of flash-linear-attention's fused_recurrent_kda. Right for any number of tokens, fast for few; gate,
    l2 norm and sigmoid are computed in float32 inside the kernel. Nothing waits for the device, and a call may be captured
    in a CUDA graph (make one before, so that the kernel is loaded). torch.compile traces it, writes in place included.

    Args:
        q, k: [B, T, H, K], K = 64 or 128, any strides. bfloat16, or float16 and float32 where K = 128 and the state is
            float32 (float16 is computed in float32).
        v: [B, T, HV, V], V a multiple of 8, HV a multiple of H; dtype of q.
        g: [B, T, HV, K], natural-log decay (<= 0, no lower limit), or with `use_gate_in_kernel` the raw gate input.
        beta: [B, T, HV], or with `use_beta_sigmoid_in_kernel` its logits; 1 if left out.
        scale: of the output; default K ** -0.5.
        initial_state: [N, HV, K, V], or [N, HV, V, K] with `state_v_first`; float32, bfloat16 or float16; zero if left out.
            N is B, or the number of packed sequences. With `state_indices` a pool [slots, ...] of any slot stride.
        output_final_state: return the state after the last token, in the dtype of initial_state; else None.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: g becomes -exp(A_log) softplus(g + dt_bias), or with `lower_bound`
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)), without the factor where A_log is None.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: beta becomes sigmoid(beta), or 2 sigmoid(beta).
        cu_seqlens: [N + 1] int32 or int64, offsets of N requests packed along T, with B = 1. Output past the last is zero.
        cu_seqlens_cpu: the same values on the host, so that they can be checked.
        A_log: [HV]. dt_bias: [HV * K] or [HV, K]. Other dtypes than float32 are converted in a launch of their own.
        state_indices: [N] int32 (int64 is converted): request n has its state in slot state_indices[n] of initial_state.
            No slot may be named twice, but for null ones. A slot that is negative or beyond the pool is null: the outputs of
            its request are zero, and no state is read or written.
        null_index: one more slot that is null, e.g. 0.
        has_initial_state: [N] bool; where False the state starts from zero, whatever its slot holds.
        inplace: write the states back to where they were read, and return initial_state itself. It needs a contiguous K or V
            axis, and all else at multiples of 16 bytes.
        kwargs: `safe_gate` is accepted and changes nothing, since the gate is exact.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state or None.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        ArtifactMissing: the kernel is not built for this device; the message names the command.
        NotImplementedError: an input requires a gradient.
    """
    if kwargs:
        refuse_unknown(RECURRENT_KDA, kwargs, ("safe_gate",))
    return DecodeArguments(
        q, k, v, g, beta, None, A_log if use_gate_in_kernel else None, dt_bias if use_gate_in_kernel else None, initial_state,
        has_initial_state, cu_seqlens, cu_seqlens_cpu, state_indices, null_index, scale, lower_bound,
        bool(use_qk_l2norm_in_kernel), bool(use_gate_in_kernel), bool(use_beta_sigmoid_in_kernel), bool(allow_neg_eigval),
        bool(state_v_first), bool(output_final_state), bool(inplace),
    )  # fmt: skip
