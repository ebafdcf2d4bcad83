"""The tile macros alone, on the cpu target against numpy."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.tilelang


@pytest.fixture(scope="module")
def programs() -> ModuleType:
    return importlib.import_module("tile_programs")


@pytest.fixture(scope="module")
def kernel(programs: ModuleType, compile_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """kernel(name, **sizes): the program around that macro, compiled for the cpu."""

    @functools.cache
    def compiled(name: str, **sizes: Any) -> Any:
        return compile_cpu("-".join([name, *map(str, sizes.values())]), programs.PROGRAMS[name]("cpu", **sizes))

    return compiled


# -- decay_products ------------------------------------------------------------------------------------------------------

GATES = {
    "zero": lambda r: 0.0 * r,
    "weak": lambda r: -1e-3 * r,
    "strong": lambda r: -20.0 * r,
    "minus 60": lambda r: np.full_like(r, -60.0),
    "masked": lambda r: np.where(r[:, :1] < 0.2, -1000.0, -0.01 * r),
    "minus infinity": lambda r: np.where(r < 0.1, -np.inf, -0.5 * r),
}


def decay_products_truth(
    a: np.ndarray, b: np.ndarray, g: np.ndarray, diagonal: bool, bonus: np.ndarray | None = None
) -> np.ndarray:
    """The definition, one pair of rows at a time in float64: no factors, no cumulative sum. With a bonus, RWKV6's."""
    a, b, g = (x.astype(np.float64) for x in (a, b, g))
    X = np.zeros((len(a), len(a)))
    last = 1 if bonus is None else 0
    for i, j in np.ndindex(X.shape):
        if j < i or (diagonal and j == i):
            weight = np.exp(g[j + 1 : i + last].sum(0)) if j < i else 1.0 if bonus is None else bonus
            X[i, j] = np.sum(a[i] * b[j] * weight)
    return X


def run_decay_products(kernel, q, k, g, rows: int, bonus: np.ndarray | None = None, parts: int = 4) -> list[np.ndarray]:
    """qk and kk of tiles whose rows past `rows` are filled as chunk_wy fills them: zeros in q and k, anything in g."""
    C, K = g.shape
    q, k, g = q.copy(), k.copy(), g.copy()
    q[rows:], k[rows:], g[rows:] = 0.0, 0.0, np.nan
    out = [torch.full((C, C), torch.nan) for _ in range(2)]
    given = np.full(K, np.nan, np.float32) if bonus is None else bonus
    program = kernel("decay_products", chunk_size=C, head_dim=K, parts=parts, read_first=bonus is not None)
    program(*map(torch.from_numpy, (q, k, g, given)), *out, rows)
    return [x.numpy() for x in out]


def random_tiles(seed: int, gate: str, C: int = 64, K: int = 128) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    q, k = (random.standard_normal((C, K), np.float32) for _ in range(2))
    return q, k, GATES[gate](random.random((C, K))).astype(np.float32)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rows", [1, 2, 17, 32, 33, 64])
def test_decay_products(kernel, gate: str, rows: int) -> None:
    q, k, g = random_tiles(rows, gate)
    for found, a, diagonal in zip(run_decay_products(kernel, q, k, g, rows), (q, k), (True, False)):
        truth = np.zeros((64, 64))
        truth[:rows, :rows] = decay_products_truth(a[:rows], k[:rows], g[:rows], diagonal)
        # Absolute, by the norms of the two rows: the sum over channels may cancel.
        assert np.abs(found - truth).max() <= 3e-7 * 128
        assert not found[truth == 0].any()
        assert not (diagonal or (rows > 2 and gate != "minus 60")) or np.abs(truth).max() > 1e-3


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("gate", GATES)
def test_decay_products_in_any_number_of_parts(kernel, parts: int, gate: str) -> None:
    q, k, g = random_tiles(parts, gate)
    for found, a, diagonal in zip(run_decay_products(kernel, q, k, g, 64, parts=parts), (q, k), (True, False)):
        assert np.abs(found - decay_products_truth(a, k, g, diagonal)).max() <= 3e-7 * 128


@pytest.mark.parametrize("parts", [4, 8])
@pytest.mark.parametrize("gate", GATES)
def test_decay_products_that_read_first(kernel, parts: int, gate: str) -> None:
    q, k, g = random_tiles(parts, gate)
    bonus = np.random.default_rng(9).standard_normal(128, np.float32)
    qk, _ = run_decay_products(kernel, q, k, g, 50, bonus, parts)
    truth = np.zeros((64, 64))
    truth[:50, :50] = decay_products_truth(q[:50], k[:50], g[:50], True, bonus)
    assert np.abs(qk - truth).max() <= 3e-7 * 128 * 2


@pytest.mark.parametrize(("C", "K"), [(64, 64), (32, 128)])
def test_decay_products_of_other_sizes(kernel, C: int, K: int) -> None:
    q, k, g = random_tiles(0, "strong", C, K)
    qk, kk = run_decay_products(kernel, q, k, g, C)
    assert np.abs(qk - decay_products_truth(q, k, g, True)).max() <= 3e-7 * K
    assert np.abs(kk - decay_products_truth(k, k, g, False)).max() <= 3e-7 * K


def test_small_decays_after_a_mask_keep_their_accuracy(kernel) -> None:
    """A float32 cumulative sum would round the decays after -1000 to multiples of 6e-5."""
    k = np.full((64, 128), 128**-0.5, np.float32)
    g = np.full((64, 128), -1e-3, np.float32)
    g[20] = -1000.0
    _, kk = run_decay_products(kernel, k, k, g, 64)
    i, j = np.tril_indices(64, -1)
    truth = np.where((j < 20) & (i >= 20), 0.0, np.exp(-1e-3 * (i - j)))
    assert np.abs(kk[i, j] - truth).max() < 64 * 2.0**-24


def test_decay_products_see_no_later_row(kernel) -> None:
    q, k, g = random_tiles(3, "strong")
    before = run_decay_products(kernel, q, k, g, 64)
    for t in (1, 15, 16, 31, 32, 48, 63):
        changed = [x.copy() for x in (q, k, g)]
        changed[0][t:] += 1.0
        changed[1][t:] *= -2.0
        changed[2][t:] -= 3.0
        after = run_decay_products(kernel, *changed, 64)
        assert all(np.array_equal(x[:t], y[:t]) for x, y in zip(before, after))
        assert not np.array_equal(before[0][t:], after[0][t:])


# -- scalar_decay --------------------------------------------------------------------------------------------------------

ROW_GATES = {
    "zero": lambda r: 0.0 * r,
    "weak": lambda r: -1e-3 * r,
    "strong": lambda r: -20.0 * r,
    "minus 60": lambda r: np.full_like(r, -60.0),
    "masked": lambda r: np.where(r < 0.1, -1000.0, -0.01 * r),
    "minus infinity": lambda r: np.where(r < 0.1, -np.inf, -0.5 * r),
    "weak after -5000": lambda r: np.where(np.arange(len(r)) < 40, -125.0, -1e-3 * r),
}


def run_scalar_decay(kernel, q, k, g, rows: int = 64, normalize: bool = False) -> list[np.ndarray]:
    """qk, kk, q_decayed, k_decayed and k_to_end; no decays where g is None. Past `rows`, what is read must not count."""
    C, K = q.shape
    q, k, g_given = q.copy(), k.copy(), np.full(C, np.nan, np.float32) if g is None else g.copy()
    q[rows:], k[rows:], g_given[rows:] = np.nan, np.nan, np.nan
    shapes = [(C, C)] * 2 + [(1, 1, C, K)] * 3
    out = [torch.full(shape, torch.nan) for shape in shapes]
    program = kernel("scalar_decay_products", decays=g is not None, chunk_size=C, head_dim=K)
    program(*map(torch.from_numpy, (q[None, :, None], k[None, :, None], g_given)), *out, rows, int(normalize))
    return [x.numpy().squeeze() for x in out]


def scalar_decay_truth(q, k, g) -> list[np.ndarray]:
    """The definitions in float64: every exponent a sum of its own, so that no mask is ever subtracted."""
    g = g.astype(np.float64)
    wide = np.repeat(g[:, None], q.shape[1], 1)
    down = np.exp([g[: i + 1].sum() for i in range(len(g))])[:, None]
    up = np.exp([g[i + 1 :].sum() for i in range(len(g))])[:, None]
    return [decay_products_truth(q, k, wide, True), decay_products_truth(k, k, wide, False), q * down, k * down, k * up]


def row_tiles(seed: int, gate: str, K: int = 128) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    q, k = (random.standard_normal((64, K), np.float32) for _ in range(2))
    return q, k, ROW_GATES[gate](random.random(64)).astype(np.float32)


@pytest.mark.parametrize("gate", ROW_GATES)
@pytest.mark.parametrize(("rows", "K"), [(1, 128), (17, 128), (64, 128), (64, 64)])
def test_scalar_decay(kernel, gate: str, rows: int, K: int) -> None:
    q, k, g = row_tiles(rows, gate, K)
    for found, truth in zip(run_scalar_decay(kernel, q, k, g, rows), scalar_decay_truth(q[:rows], k[:rows], g[:rows])):
        used = found[: truth.shape[0], : truth.shape[1]]
        if truth.shape == (rows, rows):
            assert np.abs(used - truth).max() <= 3e-7 * K  # absolute: the sum over columns may cancel
        else:
            # The exponent of a small decay has a rounding of its own.
            assert (np.abs(used - truth) <= (3e-7 + 2e-7 * np.abs(np.log(np.abs(truth) + 1e-45))) * np.abs(truth) + 1e-37).all()
        assert not used[truth == 0].any()
        assert not found[rows:].any()


@pytest.mark.parametrize("before", [-1000.0, -np.inf, -125.0])
def test_weak_decays_after_strong_ones_keep_their_accuracy(kernel, before: float) -> None:
    """Forty rows of -125 make G -5000, where float32 has steps of 5e-4; so does a mask of -1000, 6e-5."""
    k = np.full((64, 128), 128**-0.5, np.float32)
    g = np.full(64, -1e-3, np.float32)
    g[20 if before != -125.0 else slice(0, 40)] = before
    _, kk, _, _, to_end = run_scalar_decay(kernel, k, k, g)
    first = 20 if before != -125.0 else 39
    rows = np.arange(first, 64)
    apart = rows[:, None] - rows
    assert np.abs(kk[first:, first:] - np.where(apart > 0, np.exp(-1e-3 * apart), 0.0)).max() < 8 * 2.0**-24
    assert np.abs(to_end[first:, 0] * 128**0.5 - np.exp(-1e-3 * (63 - rows))).max() < 8 * 2.0**-24
    assert before == -125.0 or not kk[first:, :first].any()


def test_no_decay_leaves_the_rows_as_they_are(kernel) -> None:
    q, k, _ = row_tiles(5, "zero")
    qk, kk, *gated = run_scalar_decay(kernel, q, k, None)
    assert np.abs(qk - np.tril(q.astype(np.float64) @ k.T)).max() <= 3e-7 * 128
    assert np.abs(kk - np.tril(k.astype(np.float64) @ k.T, -1)).max() <= 3e-7 * 128
    assert all(np.array_equal(found, rows) for found, rows in zip(gated, (q, k, k)))


def test_scalar_decay_of_normalised_rows(kernel) -> None:
    q, k, g = row_tiles(6, "weak")
    scale = np.exp(np.random.default_rng(6).normal(size=(2, 64, 1)) * 3).astype(np.float32)
    unit = [x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).sum(1, keepdims=True) + 1e-6) for x in scale * [q, k]]
    raw = (scale * np.stack([q, k])).astype(np.float32)
    for found, truth in zip(run_scalar_decay(kernel, *raw, g, normalize=True), scalar_decay_truth(*unit, g)):
        assert np.abs(found - truth).max() <= 3e-6


def test_nan_of_a_scalar_decay_spreads_to_later_rows_only(kernel) -> None:
    q, k, g = row_tiles(7, "weak")
    before = run_scalar_decay(kernel, q, k, g)
    g[30] = np.nan
    after = run_scalar_decay(kernel, q, k, g)
    for x, y in zip(before[:4], after[:4]):
        assert np.array_equal(x[:30], y[:30])
    assert np.isnan(after[2][30:]).all() and np.isnan(after[0][30:, :30]).all()


# -- unit_lower_inverse --------------------------------------------------------------------------------------------------


def forward_substitution(lower: np.ndarray) -> np.ndarray:
    """(I + strictly lower part)^-1, row by row in float64."""
    inverse = np.eye(len(lower))
    for i in range(len(lower)):
        inverse[i] -= lower[i, :i] @ inverse[:i]
    return inverse


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("spread", [0.0, 0.02, 0.2])
def test_unit_lower_inverse(kernel, size: int, spread: float) -> None:
    random = np.random.default_rng(size)
    lower = spread * random.standard_normal((size, size), np.float32)
    lower[np.triu_indices(size)] = np.nan  # never read
    row_scale = 2 * random.random(size, np.float32)
    out = torch.full((size, size), torch.nan)
    kernel("unit_lower_inverse", size=size)(torch.from_numpy(lower), torch.from_numpy(row_scale), out)
    system = row_scale[:, None].astype(np.float64) * np.tril(np.nan_to_num(lower), -1)
    truth = forward_substitution(system)
    assert np.allclose((np.eye(size) + system) @ truth, np.eye(size), atol=1e-9 * np.abs(truth).max())
    assert np.linalg.norm(out.numpy() - truth) < 1e-6 * np.linalg.norm(truth)
    assert not np.triu(out.numpy(), 1).any() and (out.diagonal() == 1).all()


# -- locate_chunk --------------------------------------------------------------------------------------------------------


def run_locate_chunk(kernel, offsets: list[int], slots: int, seq_len: int, uniform: int) -> list[tuple[int, ...]]:
    out = torch.full((slots, 3), -77, dtype=torch.int32)
    kernel("locate_chunk")(torch.tensor(offsets, dtype=torch.int32), out, seq_len, uniform)
    return [tuple(row) for row in out.tolist()]


@pytest.mark.parametrize("T", [1, 63, 64, 65, 200, 256])
@pytest.mark.parametrize("B", [1, 3])
def test_locate_chunk_in_a_dense_batch(kernel, B: int, T: int) -> None:
    truth = [(b, start, min(64, T - start)) for b in range(B) for start in range(0, T, 64)]
    assert run_locate_chunk(kernel, [-5], len(truth), T, 1) == truth


@pytest.mark.parametrize(
    "lengths",
    [
        [64],
        [1],
        [0],
        [0, 0, 0],
        [130],
        [63, 1],
        [64, 64],
        [1, 63],
        [1] * 70,
        [0, 1, 63, 0, 64, 65, 1, 1, 300, 0],
        [0, 0, 200, 0, 0],
        [127, 129, 128, 1, 255],
        [5, 0, 0, 0, 0, 0, 0, 0, 0, 64],
    ],
)
@pytest.mark.parametrize("tail", [0, 90])
def test_locate_chunk_in_a_pack(kernel, lengths: list[int], tail: int) -> None:
    offsets = np.cumsum([0, *lengths]).tolist()
    T, N = offsets[-1] + tail, len(lengths)
    slots = T // 64 + N  # what the op allocates
    found = run_locate_chunk(kernel, offsets, slots, T, 0)
    truth = {
        offsets[n] // 64 + n + c: (0, offsets[n] + 64 * c, min(64, length - 64 * c))
        for n, length in enumerate(lengths)
        for c in range(-(-length // 64))
    }
    assert len(truth) == sum(-(-length // 64) for length in lengths) and all(slot < slots for slot in truth)
    assert {slot: row for slot, row in enumerate(found) if row[2] > 0} == truth


# -- range_scale ---------------------------------------------------------------------------------------------------------


def test_range_scale(kernel) -> None:
    powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    random = np.random.default_rng(0)
    mantissas = np.concatenate([[1.0, 2 - 2.0**-23], 1 + random.random(6)]).astype(np.float32)
    peaks = np.unique(np.concatenate([[np.float32(0)], np.outer(powers[23:], mantissas).ravel(), powers[:23]]))
    peaks = peaks[np.isfinite(peaks)].astype(np.float32)
    assert peaks.max() == np.finfo(np.float32).max and peaks[1] == np.float32(2.0**-149)
    out = torch.full((len(peaks),), torch.nan)
    kernel("range_scale")(torch.from_numpy(peaks), out)
    scale = out.numpy().astype(np.float64)

    mantissa = np.frexp(scale)[0]
    assert (mantissa == 0.5).all()  # powers of two
    reciprocal = (np.float32(1) / scale.astype(np.float32)).astype(np.float64)
    assert (reciprocal * scale == 1).all() and (scale >= 2.0**-126).all() and (reciprocal >= 2.0**-126).all()
    scaled = peaks.astype(np.float64) * scale
    zero = peaks < 2.0**-126  # subnormal numbers count as zero
    ordinary = ((peaks >= 2.0**-10) & (peaks < 2.0**12)) | zero
    assert (scale[ordinary] == 1).all()
    # Outside these bounds a scale that reaches [1, 2), or its reciprocal, would leave float32.
    tiny, huge = (peaks < 2.0**-125) & ~zero, peaks >= 2.0**126
    assert ((scaled >= 1) & (scaled < 2))[~(ordinary | tiny | huge)].all()
    assert (scale[tiny] == 2.0**125).all() and (scale[huge] == 2.0**-125).all()


def test_range_scale_of_inf_and_nan_is_finite(kernel) -> None:
    out = torch.full((2,), torch.nan)
    kernel("range_scale")(torch.tensor([torch.inf, torch.nan]), out)
    assert out.isfinite().all() and (out > 0).all()
