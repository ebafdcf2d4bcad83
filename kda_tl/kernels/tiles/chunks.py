"""Where a block's chunk lies: from a slot of the workspace to a sequence and its tokens, on the device.

Dense batches give every sequence ceil(T / C) slots. Packed batches give sequence n the slots from cu_seqlens[n] // C + n on:
since ceil((b - a) / C) <= b // C - a // C + 1, the slots of two sequences never meet, T // C + N slots are always enough, and
a block finds its sequence by bisection, with no table, no launch and no sync before it.
"""

import tilelang.language as T


@T.macro
def locate_chunk(slot, uniform, seq_len, num_seqs, cu_seqlens, chunk_size, found):
    """Writes (batch row, first token, number of tokens) of `slot` into found; a slot that no chunk uses gets <= 0 tokens."""
    if uniform != 0:
        per_sequence = T.truncdiv(seq_len + (chunk_size - 1), chunk_size)
        found[0] = T.truncdiv(slot, per_sequence)
        found[1] = T.truncmod(slot, per_sequence) * chunk_size
        found[2] = T.min(chunk_size, seq_len - found[1])
    else:
        low = T.alloc_var("int32", init=0)
        high = T.alloc_var("int32", init=0)
        low = 0
        high = num_seqs
        while high - low > 1:
            middle = (low + high) >> 1
            if T.truncdiv(cu_seqlens[middle], chunk_size) + middle <= slot:
                low = middle
            else:
                high = middle
        found[0] = 0
        found[1] = cu_seqlens[low] + (slot - (T.truncdiv(cu_seqlens[low], chunk_size) + low)) * chunk_size
        found[2] = T.min(chunk_size, cu_seqlens[low + 1] - found[1])


@T.macro
def locate_segment(
    block, tiles, HV, segments, segment_chunks, uniform, seq_len, num_seqs, cu_seqlens, chunk_size, indexed, state_indices,
    null_index, num_states, found,
):  # fmt: skip
    """What one block of a scan walks, written into found:

    0 tile, 1 value head, 2 sequence (num_seqs for the tokens past a pack's end), 3 segment, 4 batch row, 5 first token,
    6 tokens (<= 0 where the sequence has no such segment), 7 slot of its first chunk, 8 whether it ends the sequence,
    9 the sequence's state (-1 where null_index or an index outside the pool says that it has none)
    """
    found[0] = block % tiles
    found[1] = T.truncdiv(block, tiles) % HV
    found[2] = T.truncdiv(T.truncdiv(T.truncdiv(block, tiles), HV), segments)
    found[3] = T.truncdiv(T.truncdiv(block, tiles), HV) % segments
    found[4] = 0
    found[5] = 0
    found[6] = seq_len
    found[7] = found[2] * T.truncdiv(seq_len + (chunk_size - 1), chunk_size) + found[3] * segment_chunks
    found[9] = found[2]
    if uniform == 0:
        found[5] = cu_seqlens[found[2]]
        if found[2] < num_seqs:
            found[6] = cu_seqlens[found[2] + 1] - found[5]
        else:
            found[6] = seq_len - found[5]
        found[7] = T.truncdiv(found[5], chunk_size) + found[2] + found[3] * segment_chunks
    else:
        found[4] = found[2]
    found[5] = found[5] + found[3] * segment_chunks * chunk_size
    found[6] = found[6] - found[3] * segment_chunks * chunk_size
    found[8] = T.if_then_else(found[6] <= segment_chunks * chunk_size and (found[6] > 0 or found[3] == 0), 1, 0)
    if found[2] < num_seqs:
        found[6] = T.min(found[6], segment_chunks * chunk_size)
        if indexed != 0:
            found[9] = state_indices[found[2]]
            if found[9] == null_index or found[9] < 0 or found[9] >= num_states:
                found[9] = -1
