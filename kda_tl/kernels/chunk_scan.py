"""chunk_scan: affine state passing and output. One block walks the chunks of one (segment, value head, V tile).

With the state S before the chunk and what chunk_wy stored, per chunk:

    residual = v - k_decayed S
    u        = A_inv residual                       (= U - W S: the product with A_inv after the subtraction needs neither)
    o        = scale (q_decayed S + P u)
    S        = Diag(chunk_decay) S + k_to_end^T u

S stays in registers in float32. The same program serves every rule; without the delta correction u is v.

Which plan. One bfloat16 [T, HV, 128] tensor is a unit, 0.047 ms at 96 heads, T 8192 and the 4.27 TB/s that a copy moves on one
NVIDIA H200. Three were counted and timed, the scan of the wide one with W and U from torch; milliseconds of chunk_wy +
chunk_scan, best V tile, at 96 and 32 heads:

    lean    chunk_wy stores A_inv and P; the scan reads q, k, g, v again      5 + 7 units   0.73 + 0.69   0.26 + 0.41
    gated   chunk_wy stores the gated q and k as well; the scan reads them    8 + 6         0.58 + 0.36   0.22 + 0.16
    wide    W and U in place of A_inv and k_decayed, v                        9.5 + 5.5        ? + 0.33      ? + 0.16

The gated plan is the one that stays. The lean scan spent 3.3 of 3.6 microseconds per chunk on gating, once per V tile; without
it a chunk takes 1.3 (V tile 32) to 2.9 (128), the plain variant went from 7.3 to 1.4 ms, and every rule, gate and norm is
chunk_wy's business alone. The wide scan saves 0.033 and 0.008 ms, one product of its chain; chunk_wy would have to read v and
write U for it, 0.071 and 0.024 ms at a copy's bandwidth before it computes anything.
A cluster of blocks that hold a head's V tiles and load once what all of them read (T.tma_copy with cluster_mask, stages handed
back by remote arrivals) gives the same bits and no time: 0.49 for 0.47 ms with V tile 32 and clusters of two, 0.66 with four,
whether one block loads for all or each a part. So loads are not the limit.
What limits the scan is the chain of four products through shared memory, at 44 % of the tensor cores' time with 96 heads and V
tile 128. What limits chunk_wy are its phases: 16,500 instructions of a warp per chunk, 1.5 of 4 issued per cycle by 12 warps in
three blocks; its bytes alone would take 58 % of its time. Of a warp's time 16 % goes to waits for shared memory and
exponentials, 15 % to short dependences, 13 % to the first loads, 11 % to fetching instructions, 9 % to barriers. More warps
alone do not help: 32 of them, in blocks of 512 threads, issue as much per cycle, and more in all; nor does a prefetch of later
chunks into the second-level cache.
The gated plan's times are those of `kda-tl autotune --measure`, gate and norms fused, g in bfloat16; the others are older, with
g in float32, computed before. Shares and counts are ncu's.
"""

from typing import Any

import tilelang.language as T

from kda_tl.kernels.tiles.chunks import locate_segment
from kda_tl.kernels.tiles.products import product
from kda_tl.kernels.tiles.state_passing import pass_state, scale_operands, store_u
from kda_tl.kernels.tiles.target import TileTarget, run_time_strides
from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.candidates import Block, Candidate, objection, space
from kda_tl.specs.kernels import ChunkScanSpec
from kda_tl.specs.schedules import ChunkScanSchedule

# Registers of the warp-specialized roles: a V tile of 128 needs more where values are, and loads make do with fewer.
ROLES = (208, 120, 112, 64)
WIDE_ROLES = (208, 152, 112, 40)


def candidates(spec: ChunkScanSpec, arch: str) -> list[Candidate]:
    """The plain variant everywhere, in one form where the warp-specialized one runs, which is three times as fast."""
    if arch_row(arch).is_cpu:
        return space(ChunkScanSchedule, lambda schedule: judge(spec, schedule, arch), block_v=(32, 64, 128))
    two_variants = arch == "sm_90" and spec.operand_dtype == "float16"
    threads, columns = ((128,), (64,)) if two_variants else ((128, 256), (16, 32, 64, 128))
    found = space(ChunkScanSchedule, lambda schedule: judge(spec, schedule, arch), variant=("plain",), threads=threads,
                  block_v=columns)  # fmt: skip
    for block_v in (16, 32, 64, 128):
        names = ("state_registers", "value_registers", "output_registers", "load_registers")
        roles = {name: (count,) for name, count in zip(names, WIDE_ROLES if block_v == 128 else ROLES, strict=True)}
        found += space(ChunkScanSchedule, lambda schedule: judge(spec, schedule, arch), variant=("warp_specialized",),
                       block_v=(block_v,), stages=(2, 3, 4), **roles)  # fmt: skip
    return found


def judge(spec: ChunkScanSpec, schedule: ChunkScanSchedule, arch: str) -> str | None:
    """Why a schedule is not legal; None where it is."""
    C, K, V, block_v, width = spec.chunk_size, spec.head_dim_k, spec.head_dim_v, schedule.block_v, 2
    narrow = spec.operand_dtype == "float16"
    if V % block_v:
        return f"divisibility: block_v {block_v} does not divide V = {V}"
    if schedule.variant == "plain":
        width = 2 if narrow else 4
        shared = (K * block_v + C * K + C * C + C * block_v) * width + 64
        # Accumulators of the state, the residual and the output; float32 products keep operands in registers too.
        held = (K + 2 * C) * block_v // schedule.threads * (1 if narrow else 2)
        return objection(Block(schedule.threads, shared, held + 40), arch)
    if arch != "sm_90":
        return "warp_specialized: runs on sm_90 alone"
    if not narrow:
        return "warp_specialized: its products take 16-bit operands"
    if block_v == 128 and spec.state_dtype != "float32":
        return "registers: a whole head's state leaves none to convert it with, and the loops spill"
    per_stage = (3 if spec.delta else 2) * C * K + C * block_v + (2 if spec.delta else 1) * C * C
    shared = width * (schedule.stages * per_stage + K * block_v + 2 * C * block_v) + 8 * K + 512
    column = block_v / 128  # accumulator registers of a warpgroup per row of a tile
    needs = {"state": K * column + 56, "value": 1.5 * C * column + 48, "output": C * column + 40}
    for role, needed in needs.items():
        if needed > (given := getattr(schedule, f"{role}_registers")):
            return f"registers: a thread of the {role} role needs about {needed:.0f}, the schedule gives it {given}"
    return objection(Block(512, shared, 128), arch)


def program(spec: ChunkScanSpec, schedule: ChunkScanSchedule, arch: str) -> Any:
    """The PrimFunc. Positional arguments, in order:

    v [B, T, HV, V] dtype; cu_seqlens [N + 1] int32; q_decayed, k_decayed, k_to_end, chunk_decay, A_inv, P as chunk_wy wrote
    them; o [B, T, HV, V] dtype, out; initial_state, final_state [N or pool, HV, K, V] state_dtype with any strides (so both
    layouts are one program, and both may be one pool); state_indices [N] int32; has_initial_state [N] uint8;
    segment_states [N, segments, HV, K, V] float32, the state before every segment, read in place of the initial one where
    there are several: a block that ends a sequence may then overwrite the slot that it began with; states [slots, HV, K, V]
    float32, out, the state before each chunk; scale: float32; then int32:
    uniform: 1 for a dense batch; load_state, masked, store_final_state, indexed, store_states: flags of the tensors above;
    null_index: of state_indices, one that stands for no state; segments: per sequence; segment_chunks: chunks of a segment.
    What a flag leaves unread may be any tensor of its rank and dtype.
    Packed batches run one more sequence, the tokens past cu_seqlens[N]. Its outputs are zero, and so are those of a sequence
    that has no state in the pool.
    """
    if schedule.variant == "warp_specialized":
        from kda_tl.kernels import chunk_scan_warp_specialized

        return chunk_scan_warp_specialized.program(spec, schedule, arch)
    t = TileTarget(arch)
    C, K, V, dtype, state_dtype, operand_dtype = (
        spec.chunk_size, spec.head_dim_k, spec.head_dim_v, spec.dtype, spec.state_dtype, spec.operand_dtype,
    )  # fmt: skip
    delta, block_v, threads = spec.delta, schedule.block_v, schedule.threads
    tiles_v = V // block_v
    B, seq_len, HV, N, slots, num_offsets = T.dynamic("B, seq_len, HV, N, slots, num_offsets")
    initials, finals, num_indices, num_masks, cut_seqs, cuts, state_slots, a, b = T.dynamic(
        "initials, finals, num_indices, num_masks, cut_seqs, cuts, state_slots, a, b"
    )
    delta_slots, delta_heads = (slots, HV) if delta else (a, b)
    v_strides, o_strides = run_time_strides("v", "bth"), run_time_strides("o", "bth")
    initial_strides = run_time_strides("i", "nhkv")
    final_strides = run_time_strides("f", "nhkv")

    @T.prim_func
    def chunk_scan(
        v: T.StridedTensor((B, seq_len, HV, V), (*v_strides, 1), dtype),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        q_decayed: T.Tensor((slots, HV, C, K), operand_dtype),
        k_decayed: T.Tensor((delta_slots, delta_heads, C, K), operand_dtype),
        k_to_end: T.Tensor((slots, HV, C, K), operand_dtype),
        chunk_decay: T.Tensor((slots, HV, K), "float32"),
        A_inv: T.Tensor((delta_slots, delta_heads, C, C), operand_dtype),
        P: T.Tensor((slots, HV, C, C), operand_dtype),
        o: T.StridedTensor((B, seq_len, HV, V), (*o_strides, 1), dtype),
        initial_state: T.StridedTensor((initials, HV, K, V), initial_strides, state_dtype),
        final_state: T.StridedTensor((finals, HV, K, V), final_strides, state_dtype),
        state_indices: T.Tensor((num_indices,), "int32"),
        has_initial_state: T.Tensor((num_masks,), "uint8"),
        segment_states: T.Tensor((cut_seqs, cuts, HV, K, V), "float32"),
        states: T.Tensor((state_slots, HV, K, V), "float32"),
        scale: T.float32,
        num_seqs: T.int32,
        uniform: T.int32,
        load_state: T.int32,
        masked: T.int32,
        store_final_state: T.int32,
        indexed: T.int32,
        store_states: T.int32,
        null_index: T.int32,
        segments: T.int32,
        segment_chunks: T.int32,
    ):
        with T.Kernel((num_seqs + 1 - uniform) * segments * HV * tiles_v, threads=threads) as block:
            where = T.alloc_local((10,), "int32")
            locate_segment(block, tiles_v, HV, segments, segment_chunks, uniform, seq_len, num_seqs, cu_seqlens, C, indexed,
                           state_indices, null_index, T.if_then_else(load_state != 0, initials, finals), where)  # fmt: skip
            value_head, sequence, segment, batch = where[1], where[2], where[3], where[4]
            first, length, first_slot, ends, state_slot = where[5], where[6], where[7], where[8], where[9]
            first_v = where[0] * block_v

            if sequence < num_seqs and state_slot >= 0:
                state = t.fragment((K, block_v), "float32")
                state_operand = t.shared((K, block_v), operand_dtype)
                gated = t.shared((C, K), operand_dtype)
                block_tile = t.shared((C, C), operand_dtype)
                u_operand = t.shared((C, block_v), operand_dtype)
                residual = t.fragment((C, block_v), "float32")
                out = t.fragment((C, block_v), "float32")
                peaks = t.shared((threads // 32,), "float32")
                down = T.alloc_var("float32", init=1.0)
                starts = T.alloc_var("int32", init=0)

                starts = load_state
                if masked != 0:
                    starts = T.if_then_else(T.cast(has_initial_state[sequence], "int32") != 0, load_state, 0)
                if segments > 1:
                    for d, j in t.parallel(K, block_v):
                        state[d, j] = segment_states[sequence, segment, value_head, d, first_v + j]
                elif starts != 0:
                    for d, j in t.parallel(K, block_v):
                        state[d, j] = initial_state[state_slot, value_head, d, first_v + j]
                else:
                    T.clear(state)
                for chunk in T.serial(T.truncdiv(length + (C - 1), C)):
                    start = first + chunk * C
                    rows = T.min(C, length - chunk * C)
                    slot = first_slot + chunk
                    if store_states != 0:
                        for d, j in t.parallel(K, block_v):
                            states[slot, value_head, d, first_v + j] = state[d, j]
                    for i, j in t.parallel(C, block_v):
                        residual[i, j] = T.if_then_else(i < rows, v[batch, start + i, value_head, first_v + j], 0.0)
                    scale_operands(t, state, residual, state_operand, peaks, down)
                    store_u(t, k_decayed, A_inv, slot, value_head, state_operand, residual, out, gated, block_tile, u_operand,
                            delta)  # fmt: skip
                    for i, j in t.parallel(C, K):
                        gated[i, j] = q_decayed[slot, value_head, i, j]
                    for i, j in t.parallel(C, C):
                        block_tile[i, j] = P[slot, value_head, i, j]
                    T.clear(out)
                    product(t, gated, state_operand, out, C, block_v, K)
                    product(t, block_tile, u_operand, out, C, block_v, C)
                    for i, j in t.parallel(C, block_v):
                        if i < rows:
                            o[batch, start + i, value_head, first_v + j] = out[i, j] * (scale / down)
                    pass_state(t, k_to_end, chunk_decay, slot, value_head, gated, u_operand, state, down)
                if store_final_state != 0 and ends != 0:
                    for d, j in t.parallel(K, block_v):
                        final_state[state_slot, value_head, d, first_v + j] = state[d, j]
            else:
                for chunk in T.serial(T.truncdiv(length + (C - 1), C)):
                    for i, j in t.parallel(C, block_v):
                        if chunk * C + i < length:
                            o[batch, first + chunk * C + i, value_head, first_v + j] = 0.0

    return chunk_scan
