from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_tl.reference import (
    chunk_affine,
    chunk_kda,
    chunk_wy,
    compose,
    decay_products,
    recurrent_kda,
    triangular_inverse,
)

GATES = ["none", "mild", "bounded", "strong", "constant -60", "half open", "masked"]


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Shapes of a dense batch or of a pack, often with empty and one-token sequences and tokens past the pack's end."""
    H = draw(st.integers(1, 2))
    problem: dict[str, Any] = {
        "H": H,
        "HV": H * draw(st.integers(1, 3)),
        "gate": draw(st.sampled_from(GATES)),
        "seed": draw(st.integers(0, 2**31)),
        "chunk_size": draw(st.sampled_from([16, 32, 64])),
        "state_v_first": draw(st.booleans()),
        "with_state": draw(st.booleans()),
    }
    if draw(st.booleans()):
        lengths = draw(st.lists(st.one_of(st.integers(0, 2), st.integers(0, 70)), max_size=4))
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        return {**problem, "B": 1, "T": bounds[-1] + draw(st.integers(0, 3)), "N": len(lengths), "cu_seqlens": bounds}
    B = draw(st.integers(1, 2))
    return {**problem, "B": B, "T": draw(st.integers(0, 140)), "N": B, "cu_seqlens": None}


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(problem=problems())
def test_chunk_form_equals_the_recurrence(inputs, relative_error, problem: dict[str, Any]) -> None:
    p = problem
    x = inputs(p["B"], p["T"], p["H"], p["HV"], 8, 6, p["gate"], p["seed"], p["N"])
    if p["state_v_first"]:
        x["initial_state"] = x["initial_state"].transpose(-1, -2)
    if not p["with_state"]:
        del x["initial_state"]
    options = {"cu_seqlens": p["cu_seqlens"], "state_v_first": p["state_v_first"]}
    o, state, _ = chunk_kda(**x, **options, chunk_size=p["chunk_size"])
    o_true, state_true = recurrent_kda(**x, **options)
    assert relative_error(o, o_true) < 1e-12
    assert relative_error(state, state_true) < 1e-12


@pytest.mark.parametrize("gate", GATES)
def test_chunk_form_against_a_token_loop(inputs, token_loop, relative_error, gate: str) -> None:
    x = inputs(2, 100, 2, 4, 32, 16, gate)
    o_true, state_true = token_loop(**x, scale=32**-0.5)
    o, state, _ = chunk_kda(**x)
    assert relative_error(o, o_true) < 1e-12 and relative_error(state, state_true) < 1e-12


@pytest.mark.parametrize("chunk_size", [1, 5, 48, 100, 128])
def test_chunk_sizes_that_are_no_power_of_two_or_exceed_the_sequence(inputs, relative_error, chunk_size: int) -> None:
    x = inputs(1, 101, 1, 2, 32, 16)
    o, state, _ = chunk_kda(**x, chunk_size=chunk_size)
    o_true, state_true = recurrent_kda(**x)
    assert relative_error(o, o_true) < 1e-12 and relative_error(state, state_true) < 1e-12


@pytest.mark.parametrize("gate", [-5.9, -6.0, -10.0, -20.0, -80.0, "alternating"])
def test_strong_gates_stay_finite_and_right(inputs, relative_error, gate: float | str) -> None:
    x = inputs(1, 64, 1, 1, 32, 32)
    x["g"].zero_()
    if gate == "alternating":
        x["g"][:, 1::2] = -20.0
    else:
        x["g"] += gate
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        o, state, _ = chunk_kda(**x, dtype=dtype)
        o_true, state_true = recurrent_kda(**x)
        assert relative_error(o, o_true) < limit and relative_error(state, state_true) < limit


def test_float32_with_masks_stays_accurate(inputs, token_loop, relative_error) -> None:
    # Small decays after a -1000: a float32 cumulative sum would round them to multiples of 6e-5.
    x = inputs(1, 192, 1, 2, 64, 64, "masked")
    x["g"][:, 10:60] = -0.01
    x["g"][:, [5, 70, 129]] = -1000.0
    x["beta"] *= 0.5
    x = {name: tensor.float() for name, tensor in x.items()}
    o_true, state_true = token_loop(**x, scale=0.125)
    o, state, _ = chunk_kda(**x, dtype=torch.float32)
    assert relative_error(o, o_true) < 1e-6 and relative_error(state, state_true) < 1e-6
    o, state = recurrent_kda(**x, dtype=torch.float32)
    assert relative_error(o, o_true) < 1e-6 and relative_error(state, state_true) < 1e-6


def one_chunk(inputs, C: int, K: int, V: int, gate: str = "mild", seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k [C, K], v [C, V], g [C, K], beta [C], S [K, V] of one chunk."""
    x = inputs(1, C, 1, 1, K, V, gate, seed)
    return (*(x[name][0, :, 0] for name in ("q", "k", "v", "g", "beta")), x["initial_state"][0, 0])


def test_outer_product_sum(inputs, relative_error) -> None:
    """Diag(e^{G_last}) S + the sum of the decayed outer products k_j u_j^T is the state, and is one matrix product."""
    _, k, v, g, beta, S = one_chunk(inputs, 40, 8, 6)
    _, _, W, U = chunk_wy(k, v, g, beta)
    u, G = U - W @ S, g.cumsum(0)
    state = G[-1].exp().unsqueeze(-1) * S
    for j in range(40):
        state = state + torch.outer(k[j] * (G[-1] - G[j]).exp(), u[j])
    as_product = G[-1].exp().unsqueeze(-1) * S + (k * (G[-1] - G).exp()).T @ u
    _, state_true = recurrent_kda(*(x[None, :, None] for x in (k, k, v, g, beta)), initial_state=S[None, None])
    assert relative_error(state, state_true[0, 0]) < 1e-12
    assert relative_error(as_product, state_true[0, 0]) < 1e-12


@pytest.mark.parametrize("C", [1, 2, 16, 64])
def test_triangular_inverse(inputs, relative_error, C: int) -> None:
    _, k, _, g, beta, _ = one_chunk(inputs, C, 32, 4)
    A = decay_products(k, k, g, strict=True)
    A_inv = triangular_inverse(A, beta)
    system = torch.eye(C, dtype=torch.float64) + torch.diag(beta) @ A
    assert relative_error(system @ A_inv, torch.diag(beta)) < 1e-13
    assert torch.equal(A_inv.triu(1), torch.zeros_like(A_inv)) and torch.equal(A_inv.diagonal(), beta)
    assert torch.equal(triangular_inverse(A + torch.ones_like(A).triu(), beta), A_inv)
    with pytest.raises(ValueError, match=r"^A must"):
        triangular_inverse(A, beta[1:])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("C", [1, 7, 16, 64])
@pytest.mark.parametrize("strict", [True, False])
def test_decay_products_against_their_definition(inputs, gate: str, C: int, strict: bool) -> None:
    a, b, _, g, _, _ = one_chunk(inputs, C, 8, 1, gate)
    X = decay_products(a, b, g, strict)
    expected = torch.zeros(C, C, dtype=torch.float64)
    for i in range(C):
        for j in range(i if strict else i + 1):
            expected[i, j] = (a[i] * b[j] * g[j + 1 : i + 1].sum(0).exp()).sum()
    assert X.shape == (C, C)
    assert (X - expected).abs().max() < 1e-14
    assert torch.equal(X.triu(0 if strict else 1), torch.zeros_like(X))


def test_decay_factorisation(inputs, relative_error) -> None:
    """For a mild gate the textbook factors e^G and e^-G give the same products; for a strong one they overflow."""
    a, b, _, g, _, _ = one_chunk(inputs, 64, 8, 1, "mild")
    G = g.cumsum(0)
    factored = ((a * G.exp()) @ (b * (-G).exp()).T).tril()
    assert relative_error(decay_products(a, b, g, strict=False), factored) < 1e-12
    a, b, _, g, _, _ = one_chunk(inputs, 64, 8, 1, "strong")
    G = g.cumsum(0)
    assert not ((a * G.exp()) @ (b * (-G).exp()).T).tril().isfinite().all()
    assert decay_products(a, b, g, strict=False).isfinite().all()


def test_decay_products_broadcast_and_refuse_unequal_rows(inputs) -> None:
    a, b, _, g, _, _ = one_chunk(inputs, 20, 8, 1)
    X = decay_products(a, b, g[:, :1], strict=False)
    assert torch.equal(X, decay_products(a, b, g[:, :1].expand(-1, 8), strict=False))
    batch = decay_products(torch.stack([a, 2 * a])[:, None], b, torch.stack([g, g, g]), strict=False)
    assert batch.shape == (2, 3, 20, 20)
    assert torch.allclose(batch[1, 2], 2 * decay_products(a, b, g, strict=False), rtol=1e-13)
    assert decay_products(a[:0], b[:0], g[:0], strict=True).shape == (0, 0)
    with pytest.raises(ValueError, match="same C rows"):
        decay_products(a, b[1:], g, strict=True)


@pytest.mark.parametrize("gate", GATES)
def test_affine_map_of_a_chunk(inputs, relative_error, gate: str) -> None:
    _, k, v, g, beta, S = one_chunk(inputs, 50, 16, 6, gate)
    M, B = chunk_affine(k, v, g, beta)
    for state in (S, torch.zeros_like(S), 100 * S):
        args = (x[None, :, None] for x in (k, k, v, g, beta))
        _, state_true = recurrent_kda(*args, initial_state=state[None, None])
        assert relative_error(M @ state + B, state_true[0, 0]) < 1e-11
    with pytest.raises(ValueError, match="at least one token"):
        chunk_affine(k[:0], v[:0], g[:0], beta[:0])


def test_affine_map_of_one_token_is_the_delta_rule(inputs) -> None:
    _, k, v, g, beta, _ = one_chunk(inputs, 1, 4, 3)
    M, B = chunk_affine(k, v, g, beta)
    eye = torch.eye(4, dtype=torch.float64)
    assert torch.allclose(M, (eye - beta * torch.outer(k[0], k[0])) @ torch.diag(g[0].exp()), rtol=1e-14, atol=1e-15)
    assert torch.allclose(B, beta * torch.outer(k[0], v[0]), rtol=1e-14, atol=1e-15)


def test_affine_composition(inputs, relative_error) -> None:
    _, k, v, g, beta, S = one_chunk(inputs, 90, 16, 6)
    maps = [chunk_affine(*(x[a:b] for x in (k, v, g, beta))) for a, b in ((0, 16), (16, 17), (17, 90))]
    whole = chunk_affine(k, v, g, beta)
    left = compose(maps[2], compose(maps[1], maps[0]))
    right = compose(compose(maps[2], maps[1]), maps[0])
    for composed in (left, right):
        assert relative_error(composed[0], whole[0]) < 1e-11 and relative_error(composed[1], whole[1]) < 1e-11
    state = S
    for M, B in maps:
        state = M @ state + B
    assert relative_error(left[0] @ S + left[1], state) < 1e-11
    unit = (torch.eye(16, dtype=torch.float64), torch.zeros(16, 6, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(compose(whole, unit), whole))


def test_kda_with_equal_decays_is_gdn_in_chunk_form(inputs, relative_error) -> None:
    x = inputs(1, 70, 1, 2, 16, 8)
    decay = x["g"][..., 0]
    o, state, _ = chunk_kda(**{**x, "g": decay})
    o_kda, state_kda, _ = chunk_kda(**{**x, "g": decay.unsqueeze(-1).expand(-1, -1, -1, 16)})
    assert torch.equal(o, o_kda) and torch.equal(state, state_kda)
    # With one decay per token the products factor: A_ij = (k_i . k_j) e^{G_i - G_j}.
    _, k, _, g, _, _ = one_chunk(inputs, 64, 8, 1)
    G = g[:, 0].cumsum(0)
    expected = ((k @ k.T) * (G[:, None] - G[None]).clamp(max=0.0).exp()).tril(-1)
    assert relative_error(decay_products(k, k, g[:, :1], strict=True), expected) < 1e-13


@pytest.mark.parametrize("cu_seqlens", [[0, 0, 63, 64, 64, 129, 150], [0, 64, 65], [0, 63, 64], [0, 1, 2]])
def test_each_sequence_of_a_pack_equals_its_own_run_in_chunk_form(inputs, relative_error, cu_seqlens) -> None:
    T, N = 152, len(cu_seqlens) - 1
    x = inputs(1, T, 1, 2, 32, 8, N=N)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, cu_seqlens[-1] :] = torch.nan
    o, state, _ = chunk_kda(**x, cu_seqlens=cu_seqlens)
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        own = {name: tensor[:, start:end] for name, tensor in x.items()}
        own["initial_state"] = x["initial_state"][n : n + 1]
        o_own, state_own, _ = chunk_kda(**own)
        assert relative_error(o[:, start:end], o_own) < 1e-13
        assert relative_error(state[n : n + 1], state_own) < 1e-13
    assert torch.equal(o[:, cu_seqlens[-1] :], torch.zeros_like(o[:, cu_seqlens[-1] :]))


@pytest.mark.parametrize("T", [17, 22, 33, 47])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_do_not_depend_on_the_future(inputs, T: int, dtype: torch.dtype) -> None:
    x = inputs(1, T, 4, 4, 32, 32, "bounded")
    x["beta"].fill_(1.0)

    def run(g: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in {**x, "g": g}.items()}
        o = chunk_kda(**leaves, dtype=dtype)[0][:, : T - 1]
        o.sum().backward()
        return o, [leaves[name].grad[:, : T - 1] for name in ("q", "k", "v", "g", "beta")]

    changed = x["g"].clone()
    changed[:, -1] = -4.999
    o, gradients = run(x["g"])
    o_changed, gradients_changed = run(changed)
    assert torch.equal(o, o_changed)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_changed))


def test_decay_products_rows_do_not_depend_on_the_future(inputs) -> None:
    a, b, _, g, _, _ = one_chunk(inputs, 64, 8, 1, "bounded")
    X = decay_products(a, b, g, strict=False)
    for t in (1, 15, 16, 21, 40, 63):
        a_t, b_t, g_t = a.clone(), b.clone(), g.clone()
        a_t[t:], b_t[t:], g_t[t:] = torch.nan, torch.nan, torch.nan
        assert torch.equal(decay_products(a_t, b_t, g_t, strict=False)[:t, :t], X[:t, :t])


def test_nan_stays_in_its_sequence_and_head_in_chunk_form(inputs) -> None:
    x = inputs(1, 200, 2, 4, 8, 8, N=3)
    cu_seqlens = [0, 70, 150, 190]
    o, state, _ = chunk_kda(**x, cu_seqlens=cu_seqlens)
    x["v"][:, 80, 1] = torch.inf
    o_bad, state_bad, _ = chunk_kda(**x, cu_seqlens=cu_seqlens)
    clean = torch.ones(200, 4, dtype=torch.bool)
    clean[70:150, 1] = False
    assert torch.equal(o_bad[0, clean], o[0, clean])
    assert torch.equal(state_bad[::2], state[::2]) and torch.equal(state_bad[:, [0, 2, 3]], state[:, [0, 2, 3]])


def test_intermediates_of_a_pack(inputs, relative_error) -> None:
    x = inputs(1, 60, 1, 2, 16, 8, N=4)
    cu_seqlens = [0, 20, 20, 21, 54]
    o, state, of_chunks = chunk_kda(**x, cu_seqlens=cu_seqlens, chunk_size=16)
    assert of_chunks.sequence.tolist() == [0, 0, 2, 3, 3, 3]
    assert of_chunks.start.tolist() == [0, 16, 20, 21, 37, 53]
    assert of_chunks.length.tolist() == [16, 4, 1, 16, 16, 1]
    assert all(getattr(of_chunks, name).dtype == torch.int64 for name in ("sequence", "start", "length"))
    shapes = {"G": (16, 16), "A": (16, 16), "A_inv": (16, 16), "P": (16, 16), "W": (16, 16), "U": (16, 8)}
    for name, shape in {**shapes, "states": (16, 8)}.items():
        assert getattr(of_chunks, name).shape == (6, 2, *shape)

    for c, (n, start, length) in enumerate(zip(of_chunks.sequence, of_chunks.start, of_chunks.length)):
        for h in range(2):
            q, k = (x[name][0, start : start + length, 0] for name in ("q", "k"))
            v, g, beta = (x[name][0, start : start + length, h] for name in ("v", "g", "beta"))
            G, A, A_inv, P, W, U, S = (getattr(of_chunks, name)[c, h] for name in (*shapes, "states"))
            A_own, A_inv_own, W_own, U_own = chunk_wy(k, v, g, beta)
            P_own = decay_products(q, k, g, strict=False)
            for padded, own in ((A, A_own), (A_inv, A_inv_own), (P, P_own), (W, W_own), (U, U_own)):
                valid = padded[:length, : own.shape[1]]
                assert torch.allclose(valid, own, rtol=1e-12, atol=1e-14)
                assert padded.count_nonzero() == valid.count_nonzero()
            assert torch.allclose(G[:length], g.cumsum(0), rtol=1e-14)
            assert torch.equal(G[length:], G[length - 1].expand(16 - length, -1))
            if start == cu_seqlens[n]:
                assert torch.equal(S, x["initial_state"][n, h])
            M, B = chunk_affine(k, v, g, beta)
            last = c + 1 == 6 or of_chunks.sequence[c + 1] != n
            assert relative_error(M @ S + B, state[n, h] if last else of_chunks.states[c + 1, h]) < 1e-12
            o_own = 0.25 * ((q * G[:length].exp()) @ S + P_own @ (U_own - W_own @ S))
            assert relative_error(o[0, start : start + length, h], o_own) < 1e-12


def test_intermediates_of_a_dense_batch_count_starts_in_each_row(inputs) -> None:
    x = inputs(2, 20, 1, 1, 4, 4)
    _, _, of_chunks = chunk_kda(**x, chunk_size=16)
    assert of_chunks.sequence.tolist() == [0, 0, 1, 1]
    assert of_chunks.start.tolist() == [0, 16, 0, 16]
    assert of_chunks.length.tolist() == [16, 4, 16, 4]


def test_intermediates_are_frozen_and_states_keep_one_layout(inputs) -> None:
    x = inputs(1, 20, 1, 1, 4, 6)
    _, _, of_chunks = chunk_kda(**x, chunk_size=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        of_chunks.G = of_chunks.A  # type: ignore[misc]
    x["initial_state"] = x["initial_state"].transpose(-1, -2)
    _, _, v_first = chunk_kda(**x, chunk_size=16, state_v_first=True)
    assert torch.equal(v_first.states, of_chunks.states)


@pytest.mark.parametrize(
    ("B", "T", "cu_seqlens", "N"), [(2, 0, None, 2), (0, 3, None, 0), (1, 0, [0, 0, 0], 2), (1, 4, [0], 0)]
)
def test_no_tokens_or_no_sequences_in_chunk_form(inputs, B: int, T: int, cu_seqlens, N: int) -> None:
    x = {name: tensor.requires_grad_() for name, tensor in inputs(B, T, 1, 2, 8, 4, N=N).items()}
    o, state, of_chunks = chunk_kda(**x, cu_seqlens=cu_seqlens)
    assert torch.equal(o, torch.zeros(B, T, 2, 4, dtype=torch.float64)) and torch.equal(state, x["initial_state"])
    assert of_chunks.sequence.shape == (0,) and of_chunks.A_inv.shape == (0, 2, 64, 64)
    assert of_chunks.states.shape == (0, 2, 8, 4)
    (o.sum() + state.sum()).backward()
    assert all(tensor.grad is None or not tensor.grad.isnan().any() for tensor in x.values())


@pytest.mark.parametrize("gate", ["none", "mild", "strong", "masked"])
def test_gradients_equal_those_of_the_recurrence(inputs, relative_error, gate: str) -> None:
    x = inputs(1, 75, 1, 2, 16, 8, gate, N=3)
    x["g"][:, [0, 16, 32, 48]] -= 100.0
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 72:] = torch.nan
    gradients = []
    for run in (recurrent_kda, chunk_kda):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
        o, state = run(**leaves, cu_seqlens=[0, 70, 70, 72])[:2]
        (o.sin().sum() + state.sin().sum()).backward()
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, truth in gradients[0].items():
        assert relative_error(gradients[1][name], truth) < 1e-10
        if name != "initial_state":
            assert not gradients[1][name][:, 72:].any()


def test_gradients_by_finite_differences(inputs) -> None:
    x = {name: tensor.requires_grad_() for name, tensor in inputs(1, 7, 1, 2, 3, 2, N=2).items()}

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return chunk_kda(**dict(zip(x, tensors)), cu_seqlens=[0, 5, 6], chunk_size=4)[:2]

    assert torch.autograd.gradcheck(run, tuple(x.values()))


@pytest.mark.parametrize("chunk_size", [0, -16, 16.0, None, True])
def test_chunk_size_must_be_a_positive_integer(inputs, chunk_size) -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        chunk_kda(**inputs(1, 4, 1, 1, 4, 4), chunk_size=chunk_size)
