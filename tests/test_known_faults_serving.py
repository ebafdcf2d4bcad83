"""The second half of test_known_faults.py, which says what is covered where."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chunk_kda_cases import relative_error
from torch import Tensor

sys.path.append(str(Path(__file__).parent / "ops"))

import deltalog_cases
from decode_cases import OPS as RECURRENT
from fault_calls import LIMIT, PER_TOKEN, decode, deltalog, one_by_one, run
from rule_inputs import call, inputs, truth

import kda_tl

pytestmark = pytest.mark.usefixtures("cpu_kernels")


# -- E. large sizes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def far(tmp_path: Path) -> Callable[..., Tensor]:
    """far(x, axis, stride): x with that stride, in a file of mostly holes."""
    count = itertools.count()

    def place(x: Tensor, axis: int, stride: int) -> Tensor:
        strides = list(x.contiguous().stride())
        strides[axis] = stride
        elements = 1 + sum((size - 1) * step for size, step in zip(x.shape, strides))
        path = tmp_path / str(next(count))
        path.touch()
        os.truncate(path, elements * x.element_size())
        return torch.from_file(str(path), shared=True, size=elements, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)

    return place


@pytest.mark.parametrize("stride", [2**30 + 16, 2**31 + 16, 2**32 + 16])
def test_flashinfer_3230_slots_beyond_two_to_the_31_elements(stride: int, far: Callable[..., Tensor]) -> None:
    """Slot times stride does not fit in 32 bits; nor, further on, does the stride. The named slots change and no other."""
    slots = torch.tensor([2, 3], dtype=torch.int32)
    for rule in ("kda", "gdn"):
        pool = torch.randn(4, 2, 64, 64, generator=torch.Generator().manual_seed(0))
        x = inputs(rule, 3, B=2, HV=2)
        _, expected = run(rule, {**x, "initial_state": pool[2:]})
        there = far(pool, 0, stride)
        run(rule, {**x, "initial_state": there}, state_indices=slots)
        assert torch.equal(there[2:], expected) and torch.equal(there[:2], pool[:2])

        x = decode(rule, N=2, HV=2, H=1, K=64, V=64)
        pool = pool.transpose(-1, -2).contiguous()
        _, expected = RECURRENT[rule](**{**x, "initial_state": pool[2:]})
        there = far(pool, 0, stride)
        RECURRENT[rule](**{**x, "initial_state": there, "state_indices": slots, "inplace": True})
        assert torch.equal(there[2:], expected) and torch.equal(there[:2], pool[:2])

        pool = torch.randn(4, 2, 128, 128, generator=torch.Generator().manual_seed(0))
        steps = deltalog_cases.tokens(2, 1, 1, 2, rule, "weak", "cpu", 0)
        states = []
        for base in (pool.clone(), far(pool, 0, stride)):
            cache = kda_tl.DeltaLogCache(4, 2, rule=rule, base=base, merge_every=1)
            deltalog(rule, steps, cache, slots)
            states.append(base)
        assert torch.equal(states[0], states[1]) and torch.equal(states[1][:2], pool[:2])
        assert not torch.equal(states[1][2:], pool[2:])


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_tokens_beyond_two_to_the_31_elements(name: str, far: Callable[..., Tensor]) -> None:
    x = inputs("kda", 2, HV=2)
    expected = run("kda", x)
    assert all(torch.equal(a, b) for a, b in zip(run("kda", {**x, name: far(x[name], 1, 2**32 + 16)}), expected))
    x = decode("kda", N=1, T=2)
    expected = RECURRENT["kda"](**x)
    found = RECURRENT["kda"](**{**x, name: far(x[name], 1, 2**32 + 16)})
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_fla_1077_more_requests_than_a_grid_axis_has_blocks() -> None:
    """From a zero state one token gives o = scale beta (q . k) v."""
    N = 65_537
    q, k, v = torch.randn(3, 1, N, 1, 64, generator=torch.Generator().manual_seed(0))
    v, beta = v[..., :8].contiguous(), torch.rand(1, N, 1)
    o, _ = kda_tl.recurrent_kda(q, k, v, torch.zeros_like(q), beta, cu_seqlens=torch.arange(N + 1))
    torch.testing.assert_close(o, 0.125 * beta[..., None] * (q * k).sum(-1, keepdim=True) * v, rtol=1e-4, atol=1e-5)


# -- F, G. indices and counts that change in place, drafts -------------------------------------------------------------------


def test_sglang_38994_slots_and_counts_overwritten_in_place() -> None:
    """Nothing is kept from the call before: the buffers are what a CUDA graph would read again."""
    cache, twin = (kda_tl.DeltaLogCache(8, 2, merge_every=8) for _ in range(2))
    slots, counts = torch.tensor([3, 7], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    x = deltalog_cases.tokens(2, 2, 1, 2, "kda", "weak", "cpu", 0)
    for row, kept in ([[3, 7], [1, 2]], [[5, 1], [2, 1]], [[7, 5], [0, 2]]):
        slots.copy_(torch.tensor(row))
        counts.copy_(torch.tensor(kept))
        before = cache.read_state()
        o = deltalog("kda", x, cache, slots, valid=counts)
        for n in (0, 1):
            own = {name: y[n : n + 1, : kept[n]] for name, y in x.items()}
            if kept[n]:
                assert torch.equal(deltalog("kda", own, twin, [row[n]], verify=True)[0], o[n, : kept[n]])
        idle = [slot for slot in range(8) if slot not in row]
        assert torch.equal(cache.read_state(idle), before[idle]) and torch.equal(cache.read_state(), twin.read_state())


def test_vllm_50021_columns_of_a_table_and_counts_out_of_range() -> None:
    """A column of a slot table [B, 4] whose other entries, and whatever lies behind it, are wild."""
    table = torch.full((9, 4), 2**31 - 1, dtype=torch.int32)
    table[2:7, 1] = torch.tensor([4, 0, 5, 2, -7])
    column = table[2:7, 1]
    counts = torch.tensor([0, 1, 4, 5, -1], dtype=torch.int32)
    x = deltalog_cases.tokens(5, 4, 1, 2, "kda", "weak", "cpu", 1)
    cache = kda_tl.DeltaLogCache(5, 2)
    o = deltalog("kda", x, cache, column, valid=counts)
    assert cache.lengths().tolist() == [1, 0, 4, 0, 0]
    assert [bool(o[n, t].any()) for n, t in ((0, 0), (1, 0), (1, 1), (2, 0), (3, 3), (4, 0))] == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    for rule in ("kda", "gdn"):
        pool = torch.randn(5, 2, 128, 128)
        x = decode(rule, N=5, HV=2, H=1)
        for step, indices in enumerate((column, column.long(), column.clone())):
            states = pool.clone()
            o, _ = RECURRENT[rule](**{**x, "initial_state": states, "state_indices": indices, "inplace": True})
            moved = [slot for slot in range(5) if not torch.equal(states[slot], pool[slot])]
            assert moved == [0, 2, 4] and not o[[2, 4]].any(), step
    x = inputs("gdn", 3, B=5, HV=2)
    pool = torch.randn(5, 2, 64, 64)
    states = pool.clone()
    o, _ = run("gdn", {**x, "initial_state": states}, state_indices=column)
    assert [slot for slot in range(5) if not torch.equal(states[slot], pool[slot])] == [0, 2, 4] and not o[[2, 4]].any()


# -- H. caches, compilers, threads -------------------------------------------------------------------------------------------


def test_FlashQLA_23_fresh_lengths_in_every_call() -> None:
    """Nothing is remembered by the identity or the address of the offsets: some are new, some change in place."""
    generator = torch.Generator().manual_seed(0)
    x = inputs("kda", 160, N=4)
    reused = torch.zeros(5, dtype=torch.int64)
    for step in range(60):
        bounds = [0, *torch.randint(0, 161, (4,), generator=generator).sort().values.tolist()]
        given = reused.copy_(torch.tensor(bounds)) if step % 2 else torch.tensor(bounds)
        o, state = run("kda", x, cu_seqlens=given)
        o_alone, state_alone = one_by_one("kda", x, bounds)
        assert torch.equal(o[:, : bounds[-1]], o_alone) and torch.equal(state, state_alone)
        del given


def test_vllm_37338_and_52413_a_warm_process_loads_nothing() -> None:
    """Other dtypes of gates and offsets, other alignments of indices, than those of the warm-up."""
    kda_tl.warmup(device="cpu")
    kda_tl.reset_counters()
    buffer = torch.tensor([0, 0, 1, 2, 3], dtype=torch.int32)
    for rule in ("kda", "gdn", "rwkv6"):
        x = inputs(rule, 6, N=3, K=128, V=128)
        for given in (torch.tensor([0, 2, 4, 6]), torch.tensor([9, 0, 2, 4, 6], dtype=torch.int32)[1:]):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                call(rule, {name: y.to(dtype) for name, y in x.items()}, cu_seqlens=given)
        for first in (1, 2):
            slots = buffer[first : first + 2]
            RECURRENT[rule](**decode(rule, N=2, slots=4) | {"state_indices": slots})
            for launches in (1, 2) if rule == "kda" else (1,):
                cache = kda_tl.DeltaLogCache(4, 2, rule=rule, launches=launches)
                for T in (1, 3):
                    deltalog(rule, deltalog_cases.tokens(2, T, 1, 2, rule, "weak", "cpu", 0), cache, slots)
    counted = kda_tl.counters()
    assert counted.loads == counted.misses == 0 and counted.hits > 0


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_flashinfer_4476_threads_of_decode(rule: str) -> None:
    """Two threads, same shapes, nothing in common but the kernels."""
    found: dict[int, list[Tensor]] = {}

    def work(seed: int) -> None:
        cache = kda_tl.DeltaLogCache(3, 2, rule=rule, merge_every=3)
        state = torch.zeros(2, 2, 128, 128)
        results = []
        for step in range(30):
            x = deltalog_cases.tokens(2, 1, 1, 2, rule, "weak", "cpu", 100 * seed + step)
            with torch.no_grad():
                results.append(deltalog_cases.OPS[rule](**x, cache=cache, state_indices=torch.tensor([2, 0])))
                o, _ = RECURRENT[rule](**x, initial_state=state, inplace=True, output_final_state=True)
            results.append(o)
        found[seed] = [*results, cache.read_state(), state]

    for seed in (0, 1):
        work(seed)
    alone, found = found, {}
    threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for seed in (0, 1) for a, b in zip(alone[seed], found[seed]))


@pytest.mark.parametrize("rule", ["kda", "gdn"])
def test_fla_52_decode_inside_of_a_compiled_function(rule: str) -> None:
    """Whatever the compiler makes of the call, the numbers are those of eager mode, and the slots move on."""
    torch.compiler.reset()
    x = decode(rule, N=2, slots=4, inplace=True)
    steps = deltalog_cases.tokens(2, 1, 1, 2, rule, "weak", "cpu", 0)

    def step(pool: Tensor, cache: kda_tl.DeltaLogCache) -> tuple[Tensor, Tensor]:
        o, _ = RECURRENT[rule](**{**x, "initial_state": pool})
        return o.sin(), deltalog_cases.OPS[rule](**steps, cache=cache, state_indices=torch.tensor([1, 3])).cos()

    results = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        pool, cache = x["initial_state"].clone(), kda_tl.DeltaLogCache(4, 2, rule=rule)
        with torch.no_grad():
            outputs = [function(pool, cache) for _ in range(3)]
        results.append([*itertools.chain(*outputs), pool, cache.read_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


# -- I. sequences that are cut -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [-5.0, -0.05, -1e-4, 0.0, "one open channel"])
@pytest.mark.parametrize("cuts", [[150], [1, 64, 200], [31, 32, 100, 128, 129, 255]])
def test_FlashKDA_9_a_sequence_in_pieces(gate: float | str, cuts: list[int]) -> None:
    """Each piece starts from the state that the one before it left, in any op."""
    T = 300
    x = inputs("kda", T)
    x["g"].fill_(-5.0 if isinstance(gate, str) else gate)
    if isinstance(gate, str):
        x["g"][..., 7] = 0.0
    o_true, state_true = truth("kda", x)
    state, outputs = x["initial_state"], []
    for n, (first, last) in enumerate(itertools.pairwise([0, *cuts, T])):
        piece = {name: x[name][:, first:last] for name in PER_TOKEN}
        if n % 2:
            o, state = kda_tl.recurrent_kda(**piece, initial_state=state, output_final_state=True)
        else:
            o, state = run("kda", {**piece, "initial_state": state})
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1), o_true) < LIMIT and relative_error(state, state_true) < LIMIT
