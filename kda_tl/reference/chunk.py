r"""The chunk form of every rule of the family, with every intermediate that a kernel may store.

Derivation, for one value head and one chunk of C tokens entered with the state S [K, V]. Let G_i be the sum of g over
the chunk's tokens up to and including i, and S_i the state after token i.

1. Outer-product sum. Unrolling S_i = Diag(e^{g_i}) S_{i-1} + k_i u_i^T gives

       S_i = Diag(e^{G_i}) S + sum_{j <= i} Diag(e^{G_i - G_j}) k_j u_j^T,

   so the state after the chunk is one product: S' = Diag(e^{G_last}) S + (k e^{G_last - G})^T u.

2. Residuals. u_i = beta_i (v_i - (Diag(e^{g_i}) S_{i-1})^T k_i). The decayed state is the sum above without its term
   j = i, hence with A_ij = sum_c k_ic k_jc e^{G_ic - G_jc} for j < i, zero elsewhere,

       u = Diag(beta) (v - (k e^G) S - A u)   =>   u = A_inv v - A_inv (k e^G) S = U - W S,
       A_inv = (I + Diag(beta) A)^-1 Diag(beta).

   The system is unit lower triangular: it always has an inverse, found by forward substitution.

3. Outputs. o = scale ((q e^G) S + P u), where P_ij = sum_c q_ic k_jc e^{G_ic - G_jc} for j <= i, zero elsewhere.

4. Affine map. Putting u into S' gives S' = M S + B, with M = Diag(e^{G_last}) - (k e^{G_last - G})^T W and
   B = (k e^{G_last - G})^T U. Such maps compose, so chunks and segments can be taken in any grouping (`affine`).

Without the delta correction u = v: A and W vanish, A_inv is the identity, U is v. One decay for all channels is a g that is
equal in every column, no decay is g = 0.

RWKV6 reads S_{i-1} before its own token, so its products are exclusive: o = scale ((q e^{G_{i-1}}) S + P v) with
P_ij = sum_c q_ic k_jc e^{G_{i-1,c} - G_jc} for j < i, and the bonus on the diagonal, P_ii = sum_c q_ic bonus_c k_ic.

Exponents. A_ij could be (k e^G)(k e^{-G})^T, but e^{-G} overflows for a strong gate. `decay_products` chooses reference
rows between j and i instead, so that both factors are at most 1. Nor is G_i - G_j ever formed by subtraction: after a
mask of -1000 a float32 G has lost the decays that follow, so every sum is taken outward from its reference row.

Gradients. The same holds backward: every exponential is at most 1 and its gradient is a product with it, every sum goes
one way, and no infinity ever meets a zero. A decay of a token that no earlier key or state meets gets a gradient of exactly 0.

Source: Kimi Linear, arXiv 2510.26692; the WY representation of the delta rule, arXiv 2406.06484.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._inputs import CumulativeLengths, Inputs, Lockstep, check_inputs


@dataclass(frozen=True, eq=False)
class ChunkIntermediates:
    """Every intermediate of the chunk form, over all NC chunks: sequence by sequence, in time order within each.

    A dense batch counts as B sequences. An empty sequence has no chunk. C is the chunk size. A partial last chunk is
    padded: past `length`, rows and columns of A, A_inv, P, W and U are zero and G repeats its last valid row.
    Without the delta correction A and W are zero, A_inv is the identity and U is v.
    """

    sequence: Tensor  # [NC] int64: batch row, or index in the pack
    start: Tensor  # [NC] int64: first token, counted in its batch row or pack
    length: Tensor  # [NC] int64: valid tokens, 1 to C
    G: Tensor  # [NC, HV, C, K]: cumulative natural-log decay from the chunk's start, that token's included; scalars repeated
    A: Tensor  # [NC, HV, C, C]: strictly lower decay products of k with k, without beta
    A_inv: Tensor  # [NC, HV, C, C]: (I + Diag(beta) A)^-1 Diag(beta)
    P: Tensor  # [NC, HV, C, C]: lower decay products of q with k, without scale; read_first: exclusive, bonus on the diagonal
    W: Tensor  # [NC, HV, C, K]: A_inv (k e^G)
    U: Tensor  # [NC, HV, C, V]: A_inv v
    states: Tensor  # [NC, HV, K, V]: the state before each chunk, in this layout whatever state_v_first says
    states_after: Tensor  # [NC, HV, K, V]: the state after each chunk; for the last one of a sequence, its final state


def _reverse_cumsum(x: Tensor) -> Tensor:
    return x.flip(-2).cumsum(-2).flip(-2)


def decay_to_end(g: Tensor) -> Tensor:
    """G_last - G, summed backward from the last row; g [..., C, K]."""
    return torch.cat([_reverse_cumsum(g[..., 1:, :]), torch.zeros_like(g[..., :1, :])], -2)


def decay_products(a: Tensor, b: Tensor, g: Tensor, strict: bool) -> Tensor:
    """X[i, j] = sum_c a[i, c] b[j, c] exp(g[j + 1, c] + ... + g[i, c]) for j < i (and j = i unless strict), else zero.

    a, b [..., C, K]; g [..., C, K] per-step natural-log decay, <= 0 (not its cumulative sum), or [..., C, 1] where all
    channels decay alike; leading dims broadcast; any C. Returns [..., C, C].

    A block of rows is halved down to single rows. The lower left quarter takes its first row m as the reference:
    rows i >= m get exp(g[m + 1] + ... + g[i]), columns j < m get exp(g[j + 1] + ... + g[m]). Both are at most 1 for any
    decay, both sums run outward from m, and m is never in the future of a row that uses it, so that row i is
    bit-identical whatever follows i.
    """
    C = g.shape[-2]
    if a.shape[-2] != C or b.shape[-2] != C:
        raise ValueError(f"a, b and g must have the same C rows, got {a.shape[-2]}, {b.shape[-2]} and {C}")
    size = 1 << max(C - 1, 0).bit_length()
    shape = torch.broadcast_shapes(a.shape, b.shape, g.shape)
    a, b, g = (torch.nn.functional.pad(x.expand(shape), (0, 0, 0, size - C)) for x in (a, b, g))
    diagonal = torch.zeros_like(a[..., 0]) if strict else (a * b).sum(-1)

    X = diagonal[..., None, None]  # [..., blocks, half, half]
    while (half := X.shape[-1]) < size:
        block_shape = (*shape[:-2], size // (2 * half), 2 * half, shape[-1])
        a_block, b_block, g_block = a.reshape(block_shape), b.reshape(block_shape), g.reshape(block_shape)
        from_reference = torch.cat([torch.zeros_like(g_block[..., :1, :]), g_block[..., half + 1 :, :].cumsum(-2)], -2)
        to_reference = _reverse_cumsum(g_block[..., 1 : half + 1, :])
        rows = a_block[..., half:, :] * from_reference.exp()
        columns = b_block[..., :half, :] * to_reference.exp()
        first, second = X[..., ::2, :, :], X[..., 1::2, :, :]
        upper = torch.cat([first, torch.zeros_like(first)], -1)
        lower = torch.cat([rows @ columns.transpose(-1, -2), second], -1)
        X = torch.cat([upper, lower], -2)
    return X[..., 0, :C, :C]


def exclusive_decay_products(a: Tensor, b: Tensor, g: Tensor) -> Tensor:
    """X[i, j] = sum_c a[i, c] b[j, c] exp(g[j + 1, c] + ... + g[i - 1, c]) for j < i, else zero: row i without its own decay.

    Arguments and result as in `decay_products`. Row i here is row i - 1 there, with the next a in it.
    """
    following = torch.cat([a[..., 1:, :], torch.zeros_like(a[..., :1, :])], -2)
    X = decay_products(following, b, g, strict=False)
    return torch.cat([torch.zeros_like(X[..., :1, :]), X[..., :-1, :]], -2)


def triangular_inverse(A: Tensor, beta: Tensor) -> Tensor:
    """A_inv = (I + Diag(beta) A)^-1 Diag(beta), lower triangular with beta on its diagonal.

    A [..., C, C], of which only the part below the diagonal is read; beta [..., C]. Returns [..., C, C]. Row i of A_inv
    depends on rows up to i of A and on beta up to i only.
    """
    if A.shape[-2:] != (beta.shape[-1], beta.shape[-1]):
        raise ValueError(f"A must be [..., C, C] with C = {beta.shape[-1]} as in beta, got {tuple(A.shape)}")
    system = beta.unsqueeze(-1) * A
    A_inv: Tensor = torch.linalg.solve_triangular(system, torch.diag_embed(beta), upper=False, unitriangular=True)
    return A_inv


def chunk_wy(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(A, A_inv, W, U) of a chunk: its residuals are u = U - W S for any incoming state S.

    k [..., C, K], v [..., C, V], beta [..., C]; g as in `decay_products`, per step. Returns A and A_inv [..., C, C],
    W [..., C, K], U [..., C, V]. Derivation: module docstring, step 2.
    """
    A = decay_products(k, k, g, strict=True)
    A_inv = triangular_inverse(A, beta)
    return A, A_inv, A_inv @ (k * g.cumsum(-2).exp()), A_inv @ v


def chunk_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    bonus: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    dtype: torch.dtype = torch.float64,
    *,
    decay: str,
    delta: bool,
    read_first: bool = False,
) -> tuple[Tensor, Tensor, ChunkIntermediates]:
    """`recurrent_rule` in the chunk form: same arguments, results and errors, plus the intermediates.

    chunk_size is any positive number of tokens. Chunks start anew at the start of every sequence.

    The results agree with the recurrence up to rounding, for any decay. Outputs up to t are bit-identical whatever
    finite values follow t, but a NaN or inf reaches the whole of its chunk (of its own sequence and head only), since
    products with the zeros above the diagonal spread it.

    Derivation: module docstring.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive number of tokens, got {chunk_size!r}")
    x = check_inputs(q, k, v, g, beta, bonus, decay, delta, read_first, scale, initial_state, cu_seqlens, state_v_first, dtype)
    chunks = _Chunks.of(x, chunk_size)

    q_c, k_c = (chunks.gather(tokens).repeat_interleave(x.group, 1) for tokens in (x.q, x.k))
    v_c, g_c = chunks.gather(x.v), chunks.gather(x.g)

    G = g_c.cumsum(-2)
    if delta:
        A, A_inv, W, U = chunk_wy(k_c, v_c, g_c, chunks.gather(x.beta.unsqueeze(-1)).squeeze(-1))
    else:
        A_inv = torch.diag_embed(chunks.valid.to(dtype)).unsqueeze(1).expand(-1, v.shape[2], -1, -1)
        A, W, U = torch.zeros_like(A_inv), torch.zeros_like(k_c), v_c
    if read_first:
        own = (q_c * x.bonus.unsqueeze(-2) * k_c).sum(-1)
        P = exclusive_decay_products(q_c, k_c, g_c) + torch.diag_embed(own)
        decay_to_read = torch.cat([torch.zeros_like(G[..., :1, :]), G[..., :-1, :]], -2)
    else:
        P = decay_products(q_c, k_c, g_c, strict=False)
        decay_to_read = G

    walk = Lockstep.of(chunks.first, chunks.count, q.device)
    W_step, U_step = walk.split(W), walk.split(U)
    keys_to_end = walk.split((k_c * decay_to_end(g_c).exp()).transpose(-1, -2))
    decays = walk.split(G[..., -1, :].exp().unsqueeze(-1))
    before: list[Tensor] = []
    after: list[Tensor] = []

    def step(state: Tensor, i: int) -> Tensor:
        before.append(state)
        u = U_step[i] - W_step[i] @ state if delta else U_step[i]
        after.append(decays[i] * state + keys_to_end[i] @ u)
        return after[-1]

    final_state = walk.scan(x.state, step)
    no_states = x.state.new_zeros(len(chunks.length), *x.state.shape[1:])
    S = walk.join(before, no_states)
    u = U - W @ S if delta else U
    o_c = x.scale * ((q_c * decay_to_read.exp()) @ S + P @ u)
    o = chunks.scatter(o_c, torch.zeros_like(x.v)).reshape(v.shape)
    final_state = (final_state.transpose(-1, -2) if state_v_first else final_state).contiguous()
    intermediates = ChunkIntermediates(
        sequence=chunks.sequence,
        start=chunks.start,
        length=chunks.length,
        G=G,
        A=A,
        A_inv=A_inv,
        P=P,
        W=W,
        U=U,
        states=S,
        states_after=walk.join(after, no_states),
    )
    return o, final_state, intermediates


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, ChunkIntermediates]:
    """`chunk_rule` for Kimi Delta Attention (`recurrent_kda`)."""
    return chunk_rule(
        q, k, v, g, beta, None, scale, initial_state, cu_seqlens, state_v_first, chunk_size, dtype,
        decay="per_key", delta=True,
    )  # fmt: skip


def chunk_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: CumulativeLengths | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, ChunkIntermediates]:
    """`chunk_rule` for Gated DeltaNet (`recurrent_gdn`)."""
    return chunk_rule(
        q, k, v, g, beta, None, scale, initial_state, cu_seqlens, state_v_first, chunk_size, dtype,
        decay="scalar", delta=True,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Which tokens are in which chunk. first[n], count[n]: the chunks of sequence n."""

    first: list[int]
    count: list[int]
    sequence: Tensor  # [NC]
    start: Tensor  # [NC]
    length: Tensor  # [NC]
    token: Tensor  # [NC, C] flat token; past the end, the chunk's last one
    valid: Tensor  # [NC, C]

    @staticmethod
    def of(x: Inputs, C: int) -> _Chunks:
        count = [-(-length // C) for length in x.lengths]
        first = [0]
        for n in count:
            first.append(first[-1] + n)
        device = x.q.device
        repeats = torch.tensor(count, dtype=torch.int64)

        def per_chunk(of_sequences: list[int]) -> Tensor:
            return torch.tensor(of_sequences, dtype=torch.int64).repeat_interleave(repeats)

        within = C * (torch.arange(first[-1]) - per_chunk(first[:-1]))
        length = (per_chunk(x.lengths) - within).clamp(max=C)
        row = torch.arange(C)
        token = (per_chunk(x.starts) + within).unsqueeze(-1) + torch.minimum(row, length.unsqueeze(-1) - 1)
        return _Chunks(
            first=first[:-1],
            count=count,
            sequence=per_chunk(list(range(len(count)))).to(device),
            start=(per_chunk(x.offsets) + within).to(device),
            length=length.to(device),
            token=token.to(device),
            valid=(row < length.unsqueeze(-1)).to(device),
        )

    def gather(self, tokens: Tensor) -> Tensor:
        """[B * T, heads, D] -> [NC, heads, C, D], zero past the end."""
        rows = tokens.index_select(0, self.token.flatten()).reshape(*self.token.shape, *tokens.shape[1:])
        return rows.masked_fill(~self.valid[..., None, None], 0.0).transpose(1, 2)

    def scatter(self, of_chunks: Tensor, into: Tensor) -> Tensor:
        """[NC, heads, C, D] -> [B * T, heads, D], on top of `into` where no chunk covers a token."""
        return into.index_copy(0, self.token[self.valid], of_chunks.transpose(1, 2)[self.valid])
