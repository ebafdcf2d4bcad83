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
