"""intracard_pre_scan: the affine map of every segment but the last of its sequence. One block walks a tile of its columns.

The state after a segment is M S + B for the state S before it. Columns of a state never mix, so columns of M and B follow the
recurrence of the state itself: B is what a scan from zero leaves, M what a scan from the identity leaves where v is zero.
With X a tile of columns of either, and what chunk_wy stored, per chunk:

    residual = v - k_decayed X          (v: zero for columns of M)
    u        = A_inv residual
    X        = Diag(chunk_decay) X + k_to_end^T u

X stays in registers in float32. Without the delta correction u is v, and M is the diagonal of the decays of all chunks.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.chunks import locate_segment
from kda_tl.kernels.tiles.state_passing import pass_state, scale_operands, store_u
from kda_tl.kernels.tiles.target import TileTarget, run_time_strides
from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.candidates import Block, Candidate, objection, space
from kda_tl.specs.intracard import IntracardPreScanSchedule, IntracardPreScanSpec


def candidates(spec: IntracardPreScanSpec, arch: str) -> list[Candidate]:
    """The plain variant everywhere, in one form where the warp-specialized one runs."""
    if arch_row(arch).is_cpu:
        return space(IntracardPreScanSchedule, lambda schedule: judge(spec, schedule, arch), block=(16, 32, 64))
    two_variants = arch == "sm_90" and spec.operand_dtype == "float16"
    threads, columns = ((128,), (32,)) if two_variants else ((128, 256), (16, 32, 64))
    plain = space(IntracardPreScanSchedule, lambda schedule: judge(spec, schedule, arch), variant=("plain",),
                  threads=threads, block=columns)  # fmt: skip
    return plain + space(IntracardPreScanSchedule, lambda schedule: judge(spec, schedule, arch), variant=("warp_specialized",),
                         block=(16, 32, 64), stages=(2, 3, 4))  # fmt: skip


def judge(spec: IntracardPreScanSpec, schedule: IntracardPreScanSchedule, arch: str) -> str | None:
    """Why a schedule is not legal; None where it is."""
    C, K, block = spec.chunk_size, spec.head_dim_k, schedule.block
    narrow = spec.operand_dtype == "float16"
    if K % block or spec.head_dim_v % block:
        return f"divisibility: block {block} does not divide K = {K} and V = {spec.head_dim_v}"
    if schedule.variant == "plain":
        shared = (K * block + C * K + C * C + C * block) * (2 if narrow else 4) + 64
        held = (K + 2 * C) * block // schedule.threads * (1 if narrow else 2)
        return objection(Block(schedule.threads, shared, held + 40), arch)
    if arch != "sm_90":
        return "warp_specialized: runs on sm_90 alone"
    if not narrow:
        return "warp_specialized: its products take 16-bit operands"
    per_stage = (2 if spec.delta else 1) * C * K + C * block + (C * C if spec.delta else 0)
    shared = 2 * (schedule.stages * per_stage + K * block + C * block) + 8 * K + 512
    return objection(Block(384, shared, 168), arch)


def program(spec: IntracardPreScanSpec, schedule: IntracardPreScanSchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments, in order:

    v [B, T, HV, V] dtype; cu_seqlens [N + 1] int32; k_decayed, k_to_end, chunk_decay, A_inv as chunk_wy wrote them;
    transitions [N, cuts, HV, K, K] float32, out: M transposed, [.., c, d] is row d of its column c; without the delta
    correction [N, cuts, HV, 1, K], its diagonal; biases [N, cuts, HV, K, V] float32, out: B; then int32: num_seqs: N;
    uniform: 1 for a dense batch; segments: of a sequence that have a row in the maps, which is `cuts`; segment_chunks: chunks
    of a segment; every: 1 to map the last segment of a sequence too, 0 to leave its row, and those of segments that a sequence
    does not have, as they are.
    """
    if schedule.variant == "warp_specialized":
        from kda_tl.kernels import intracard_pre_scan_warp_specialized

        return intracard_pre_scan_warp_specialized.program(spec, schedule, arch)
    t = TileTarget(arch)
    C, K, V, dtype, operand_dtype = (
        spec.chunk_size, spec.head_dim_k, spec.head_dim_v, spec.dtype, spec.operand_dtype,
    )  # fmt: skip
    delta, block_columns, threads = spec.delta, schedule.block, schedule.threads
    tiles_k = K // block_columns if delta else 0
    tiles = tiles_k + V // block_columns
    B, seq_len, HV, slots, num_offsets, cut_seqs, cuts, a, b = T.dynamic(
        "B, seq_len, HV, slots, num_offsets, cut_seqs, cuts, a, b"
    )
    delta_slots, delta_heads = (slots, HV) if delta else (a, b)
    v_strides = run_time_strides("v", "bth")

    @T.prim_func
    def intracard_pre_scan(
        v: T.StridedTensor((B, seq_len, HV, V), (*v_strides, 1), dtype),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        k_decayed: T.Tensor((delta_slots, delta_heads, C, K), operand_dtype),
        k_to_end: T.Tensor((slots, HV, C, K), operand_dtype),
        chunk_decay: T.Tensor((slots, HV, K), "float32"),
        A_inv: T.Tensor((delta_slots, delta_heads, C, C), operand_dtype),
        transitions: T.Tensor((cut_seqs, cuts, HV, K if delta else 1, K), "float32"),
        biases: T.Tensor((cut_seqs, cuts, HV, K, V), "float32"),
        num_seqs: T.int32,
        uniform: T.int32,
        segments: T.int32,
        segment_chunks: T.int32,
        every: T.int32,
    ):
        with T.Kernel(num_seqs * segments * HV * tiles, threads=threads) as block:
            where = T.alloc_local((10,), "int32")
            locate_segment(block, tiles, HV, segments, segment_chunks, uniform, seq_len, num_seqs, cu_seqlens, C, 0, cu_seqlens,
                           -1, 0, where)  # fmt: skip
            value_head, sequence, segment, batch = where[1], where[2], where[3], where[4]
            first, length, first_slot, ends = where[5], where[6], where[7], where[8]

            if length > 0 and (ends == 0 or every != 0):
                state = t.fragment((K, block_columns), "float32")
                state_operand = t.shared((K, block_columns), operand_dtype)
                gated = t.shared((C, K), operand_dtype)
                block_tile = t.shared((C, C), operand_dtype)
                u_operand = t.shared((C, block_columns), operand_dtype)
                residual = t.fragment((C, block_columns), "float32")
                out = t.fragment((C, block_columns), "float32")
                whole_decay = t.fragment((K,), "float32")
                peaks = t.shared((threads // 32,), "float32")
                down = T.alloc_var("float32", init=1.0)
                of_bias = T.alloc_var("int32", init=0)
                first_column = T.alloc_var("int32", init=0)

                of_bias = T.if_then_else(where[0] >= tiles_k, 1, 0)
                first_column = (where[0] - of_bias * tiles_k) * block_columns
                for d, j in t.parallel(K, block_columns):
                    state[d, j] = T.if_then_else(of_bias == 0 and d == first_column + j, 1.0, 0.0)
                if not delta:
                    for d in t.parallel(K):
                        whole_decay[d] = 1.0
                for chunk in T.serial(T.truncdiv(length + (C - 1), C)):
                    start = first + chunk * C
                    rows = T.min(C, length - chunk * C)
                    slot = first_slot + chunk
                    T.clear(residual)
                    if of_bias != 0:
                        for i, j in t.parallel(C, block_columns):
                            residual[i, j] = T.if_then_else(i < rows, v[batch, start + i, value_head, first_column + j], 0.0)
                    scale_operands(t, state, residual, state_operand, peaks, down)
                    store_u(t, k_decayed, A_inv, slot, value_head, state_operand, residual, out, gated, block_tile, u_operand,
                            delta)  # fmt: skip
                    pass_state(t, k_to_end, chunk_decay, slot, value_head, gated, u_operand, state, down)
                    if not delta:
                        for d in t.parallel(K):
                            whole_decay[d] = whole_decay[d] * chunk_decay[slot, value_head, d]
                if of_bias != 0:
                    for d, j in t.parallel(K, block_columns):
                        biases[sequence, segment, value_head, d, first_column + j] = state[d, j]
                if delta:
                    if of_bias == 0:
                        for d, j in t.parallel(K, block_columns):
                            transitions[sequence, segment, value_head, first_column + j, d] = state[d, j]
                elif first_column == 0:
                    for d in t.parallel(K):
                        transitions[sequence, segment, value_head, 0, d] = whole_decay[d]

    return intracard_pre_scan
