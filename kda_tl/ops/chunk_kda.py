"""chunk_kda: Kimi Delta Attention over whole sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kda_tl.ops.arguments import Arguments, Op
from kda_tl.ops.compatibility import renamed
from kda_tl.ops.context import local_sequences
from kda_tl.ops.prefill_checks import CHUNK_SIZE, check_names
from kda_tl.ops.prefill_library import public
from kda_tl.specs.rules import Rule

__all__ = ["CHUNK_KDA", "chunk_kda"]

CHUNK_KDA = Op("chunk_kda", Rule("per_key", delta=True))


@public(CHUNK_KDA)
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int | None = None,
    intracard_segments: int | None = None,
    **kwargs: Any,
) -> Arguments:
    """Kimi Delta Attention, forward. Per token: decay the state, form the residual against it, write, then read.

    Names, order, shapes and defaults are those of flash-linear-attention 0.6. The definition is
    `kda_tl.reference.recurrent_kda`; the source, Kimi Linear (arXiv 2510.26692).

    Args:
        q, k: [B, T, H, K], K up to 128 (64 and 128 as they are, others padded); bfloat16, float16 or float32. The cpu computes
            in float32.
        v: [B, T, HV, V], V up to 256 (64 and 128 as they are), HV a multiple of H (grouped value attention); dtype of q.
        g: [B, T, HV, K], natural-log decay (<= 0, no lower limit), or with `use_gate_in_kernel` the raw gate input.
        beta: [B, T, HV], or with `use_beta_sigmoid_in_kernel` its logits.
        scale: of the output; default K ** -0.5.
        initial_state: [N, HV, K, V] float32, bfloat16 or float16, or [N, HV, V, K] with `state_v_first`. N is B, or the number
            of packed sequences. With `state_indices` a pool of such states, [slots, ...].
        output_final_state: return the state after the last token; else None stands in its place.
        use_qk_l2norm_in_kernel: q and k become x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: g becomes -exp(A_log) softplus(g + dt_bias), or with `lower_bound`
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)), without the factor where A_log is None.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: beta becomes sigmoid(beta), or 2 sigmoid(beta).
        lower_bound: of the gate, < 0, natural log per token. Used with `use_gate_in_kernel` only.
        return_intermediate_states: a third result, the states before every chunk.
        state_v_first: all states are [..., V, K].
        cu_seqlens: [N + 1] int32 or int64, offsets of N sequences packed along T, with B = 1. Output past the last is zero.
        cu_seqlens_cpu: the same values on the host, so that they can be checked without a sync.
        A_log: [HV]. dt_bias: [HV * K] or [HV, K].
        cp_context: a `kda_tl.ContextParallel` or a context of flash-linear-attention, where other processes hold parts of the
            sequences. Collective: every rank calls. cu_seqlens may be left out; states have a row per local sequence, and which
            of them count is said at `ContextParallel`. Not with `state_indices`.
        chunk_size: 64.
        state_indices: [N] int32 or int64: sequence n starts from initial_state[state_indices[n]] and leaves its final state
            there, in place, whatever the pool's strides and dtype. No slot may be named twice. An index that is not in the pool
            marks padding, as null_index does.
        has_initial_state: [N] bool; where False the sequence starts from zero, whatever initial_state holds.
        null_index: of sequences that are padding: their output is zero, and no slot is read or written.
        intracard_segments: into how many segments, run side by side, a sequence is cut; exact for any gate. None: as many as
            pay, by a plan from sizes, head counts, the device and whether torch would have to copy a pool for it
            (`kda_tl.explain` shows it); 1: not cut; n: n for the longest sequence (for one of T tokens where the host does not
            know the lengths of a pack), segments as long as its for the others. Equal cuts give equal bits: for outputs that do
            not depend on what else is in the batch, pass 1, or any n with dense batches.
        safe_gate, disable_recompute, use_graph, max_num_seqs: accepted for flash-linear-attention's sake. They choose among
            its kernels; ours are right for any gate, keep nothing, and need no flag to be captured in a graph. `safe_gate` with
            `use_gate_in_kernel` needs `lower_bound`, as there.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the final state in float32 or None; with `state_indices` the pool itself, if
        `output_final_state`. With `return_intermediate_states` also [B, NT, HV, K, V] float32: the state that each chunk starts
        from, so that row i of a sequence is its state after 64 i tokens. A pack has B = 1, its NT chunks lie sequence by
        sequence; where the host does not know the lengths, or a compiler traces the call, NT is T // 64 + N and rows past
        the last chunk are zero, as are those of padding.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        ArtifactMissing: the kernels are not built for this device; the message names the command.
        ContextParallelError: another rank of `cp_context` failed; the message names it.
        NotImplementedError: an input requires a gradient and `state_indices`, `return_intermediate_states` or `cp_context` is
            given; `cp_context` meets `state_indices`; an input has a forward-mode tangent.

    Gradients: every input that requires one gets it, by recomputing the chunk form in torch (`kda_tl.ops.gradients`): right,
    and much slower than the forward call. Without cu_seqlens_cpu, backward waits for cu_seqlens.
    """
    if "transpose_state_layout" in kwargs:
        state_v_first = renamed(kwargs, "transpose_state_layout", "state_v_first")
    cu_seqlens, cu_seqlens_cpu = local_sequences(cp_context, q, cu_seqlens, cu_seqlens_cpu)
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError("safe_gate=True with use_gate_in_kernel=True needs lower_bound: it means the bounded gate")
    a = Arguments(
        q, k, v, g, beta, None, A_log if use_gate_in_kernel else None, dt_bias if use_gate_in_kernel else None, initial_state,
        has_initial_state, cu_seqlens, cu_seqlens_cpu, scale, lower_bound, bool(use_qk_l2norm_in_kernel),
        bool(use_gate_in_kernel), bool(use_beta_sigmoid_in_kernel), bool(allow_neg_eigval), bool(state_v_first),
        bool(output_final_state), bool(return_intermediate_states), intracard_segments, state_indices, null_index,
    )  # fmt: skip
    check_names(CHUNK_KDA, kwargs, chunk_size)
    return a
