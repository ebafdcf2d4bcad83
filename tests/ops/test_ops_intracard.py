"""Sequences cut into segments: every prefill op against the token recurrence, and the maps and states in between."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from chunk_kda_cases import nan_filled_memory, relative_error
from op_inputs import offsets, poisoned, sequences
from rule_inputs import OPS, call, inputs, truth
from torch import Tensor

import kda_tl
from kda_tl.ops import prefill
from kda_tl.ops.context import segment_maps
from kda_tl.ops.prefill_checks import check as check_call
from kda_tl.ops.prefill_context import maps_by_kernels
from kda_tl.ops.prefill_kernels import (
    GateOptions,
    Maps,
    Pool,
    Segments,
    Workspace,
    launch_chunk_wy,
    launch_intracard_merge,
    launch_intracard_pre_scan,
)
from kda_tl.reference import kda_gate, l2norm, segment_affine
from kda_tl.runtime import dispatcher
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkWySpec
from kda_tl.specs.rules import RULES

pytestmark = pytest.mark.usefixtures("cpu_kernels")
LIMIT = 1e-5
GATES = {"-5": -5.0, "-0.05": -0.05, "-1e-4": -1e-4, "0": 0.0}
PACK = [0, 1, 400, 63, 0, 193, 64, 1]


def gated(x: dict[str, Tensor], gate: str) -> dict[str, Tensor]:
    """The same decay everywhere, or "mixed": one channel without, the others with -5."""
    if gate in GATES:
        x["g"].fill_(GATES[gate])
    else:
        x["g"].fill_(-5.0)
        x["g"][..., 3] = 0.0
    return x


def check(rule: str, x: dict[str, Any], cu_seqlens: list[int] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Every token and every state, against the recurrence and against the call in one piece."""
    given = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    with nan_filled_memory():
        o, state = call(rule, x, cu_seqlens=given, output_final_state=True, **options)
    whole, whole_state = call(rule, x, cu_seqlens=given, output_final_state=True, intracard_segments=1)
    o_true, state_true = truth(rule, x, cu_seqlens=cu_seqlens)
    for n, (b, tokens) in enumerate(sequences(x, cu_seqlens)):
        for true, state_of in ((o_true, state_true), (whole.double(), whole_state.double())):
            assert relative_error(state[n], state_of[n]) < LIMIT, f"state of sequence {n}"
            assert relative_error(o[b, tokens], true[b, tokens]) < LIMIT, f"o of sequence {n}"
        error = (o[b, tokens].double() - o_true[b, tokens]).norm(dim=-1)
        assert (error <= 1e-4 * o_true[b, tokens].norm(dim=-1) + 1e-6).all(), f"a token of sequence {n}"
    if cu_seqlens is not None:
        assert not o[:, cu_seqlens[-1] :].any()
    return o, state


@functools.cache
def long_input(gate: str) -> dict[str, Tensor]:
    return gated(inputs("kda", 13 * 64 + 17, H=1, HV=2), gate)


@pytest.mark.parametrize("segments", [2, 4, 7])
@pytest.mark.parametrize("gate", [*GATES, "mixed"])
def test_any_gate_is_exact(gate: str, segments: int) -> None:
    """MoonshotAI/FlashKDA#9: chained by end states alone, segments lose what comes before them where the decay is weak."""
    x = long_input(gate)
    assert kda_tl.explain("chunk_kda", **x, intracard_segments=segments).split.segments == segments
    check("kda", x, intracard_segments=segments)


@pytest.mark.parametrize("rule", OPS)
def test_every_rule(rule: str) -> None:
    heads = {"H": 1, "HV": 1 if rule == "rwkv6" else 2}
    check(rule, inputs(rule, 300, B=2, **heads), intracard_segments=3)
    x = inputs(rule, sum(PACK) + 20, N=len(PACK), **heads)
    for name in x.keys() - {"initial_state", "bonus"}:
        x[name][:, sum(PACK) :] = torch.nan
    check(rule, x, offsets(PACK), intracard_segments=4)


def test_sizes_of_their_own() -> None:
    """K = V = 128, two runs over V, V first, no initial state, the host's lengths."""
    check("kda", inputs("kda", 200, H=2, HV=4, K=128, V=128), intracard_segments=2)
    check("gla", inputs("gla", 200, K=40, V=200), intracard_segments=2)
    x = inputs("kda", 200, B=2)
    o, state = check("kda", x, intracard_segments=4)
    first = {**x, "initial_state": x["initial_state"].transpose(-1, -2).contiguous()}
    o_first, state_first = call("kda", first, state_v_first=True, output_final_state=True, intracard_segments=4)
    assert torch.equal(o_first, o) and torch.equal(state_first.transpose(-1, -2), state)
    del x["initial_state"]
    check("kda", x, intracard_segments=4)


def test_equal_cuts_give_equal_bits() -> None:
    x = inputs("kda", 400, B=3, HV=2)
    o, state = call("kda", x, output_final_state=True, intracard_segments=3)
    own = {name: tensor[1:2] for name, tensor in x.items()}
    o_own, state_own = call("kda", own, output_final_state=True, intracard_segments=3)
    assert torch.equal(o_own[0], o[1]) and torch.equal(state_own[0], state[1])
    cu_seqlens = torch.tensor([0, 400])
    for options in ({}, {"cu_seqlens_cpu": cu_seqlens}):
        again = call("kda", own, cu_seqlens=cu_seqlens, output_final_state=True, intracard_segments=3, **options)
        assert torch.equal(again[0], o_own) and torch.equal(again[1], state_own)


def test_states_before_every_chunk() -> None:
    x = inputs("kda", 300, HV=2)
    *whole, between = call("kda", x, output_final_state=True, return_intermediate_states=True, intracard_segments=1)
    *cut, found = call("kda", x, output_final_state=True, return_intermediate_states=True, intracard_segments=3)
    assert relative_error(found, between.double()) < LIMIT and found.shape == between.shape
    assert all(relative_error(a, b.double()) < LIMIT for a, b in zip(cut, whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pools(dtype: torch.dtype) -> None:
    """A slot that one segment reads first is one that another writes last."""
    lengths = [130, 0, 200, 64]
    x = inputs("kda", sum(lengths), HV=2, K=128, V=128, N=4)
    pool = torch.full((6, 2, 128, 128), torch.nan, dtype=dtype)
    indices = torch.tensor([4, 1, -1, 0], dtype=torch.int32)
    pool[[4, 1, 0]] = x.pop("initial_state")[[0, 1, 3]].to(dtype)
    before = pool.clone()
    cu_seqlens, fresh = torch.tensor(offsets(lengths)), torch.tensor([True, True, True, False])
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "state_indices": indices, "has_initial_state": fresh}
    o_whole, _ = call("kda", {**x, "initial_state": before}, intracard_segments=1, **options)
    with nan_filled_memory():
        o, _ = call("kda", {**x, "initial_state": pool}, intracard_segments=3, **options)
    assert relative_error(o, o_whole.double()) < LIMIT and not o[:, 130:330].any()
    kept = [0, 1, 4]
    assert relative_error(pool[kept].float(), before[kept].double()) < (LIMIT if dtype == torch.float32 else 0.003)
    assert pool[[2, 3, 5]].isnan().all()


@pytest.mark.parametrize("v_first", [False, True])
def test_a_float32_pool_gives_the_bits_of_states_of_their_own(v_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """intracard_merge reads its slots, and chunk_scan writes them: nothing is copied out and back."""
    lengths = [200, 70, 0, 129]
    x = inputs("kda", sum(lengths), HV=2, K=128, V=128, N=4)
    states = x.pop("initial_state").transpose(-1, -2).contiguous() if v_first else x.pop("initial_state")
    options: dict[str, Any] = {"cu_seqlens": torch.tensor(offsets(lengths)), "intracard_segments": 3, "state_v_first": v_first}
    o_own, final = call("kda", {**x, "initial_state": states}, output_final_state=True, **options)
    pool = torch.full((5, 2, 128, 128), torch.nan)
    slots = torch.tensor([3, 0, 4, 1])
    pool[slots] = states
    monkeypatch.delattr(prefill, "load_states")
    o, _ = call("kda", {**x, "initial_state": pool}, state_indices=slots, **options)
    assert torch.equal(o, o_own) and torch.equal(pool[slots], final) and pool[2].isnan().all()


def test_gradients() -> None:
    x = {name: tensor.clone() for name, tensor in inputs("kda", 150).items()}
    found = []
    for segments in (1, 2):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
        o, state = call("kda", leaves, output_final_state=True, intracard_segments=segments)
        (o.sum() + state.sum()).backward()
        found.append([leaf.grad for leaf in leaves.values()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_under_a_compiler() -> None:
    x = inputs("kda", 150)
    compiled = torch.compile(lambda **x: kda_tl.chunk_kda(**x, intracard_segments=2), backend="eager", fullgraph=True)
    assert torch.equal(compiled(**x)[0], call("kda", x, intracard_segments=2)[0])


@pytest.mark.parametrize(("segments", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_wrong_numbers_of_segments(segments: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^intracard_segments must be .*, got"):
        call("kda", inputs("kda", 10), intracard_segments=segments)


def test_shapes_that_are_not_cut() -> None:
    x = inputs("kda", 200, K=64, V=128)
    plan = kda_tl.explain("chunk_kda", **x)
    assert plan.split.segments == 1
    with pytest.raises(ValueError, match=r"^intracard_segments must be None or 1 here, .* K = 64, V = 128 in float32 .*got 2$"):
        call("kda", x, intracard_segments=2)


def test_nothing_to_cut() -> None:
    for x, cu_seqlens in ((inputs("kda", 0, B=2), None), (inputs("kda", 0, N=2), [0, 0, 0]), (inputs("kda", 7, N=0), [0])):
        given = None if cu_seqlens is None else torch.tensor(cu_seqlens)
        o, state = call("kda", x, cu_seqlens=given, output_final_state=True, intracard_segments=4)
        assert not o.any() and torch.equal(state, x["initial_state"])


def test_explain() -> None:
    x = inputs("kda", sum(PACK), N=len(PACK))
    plan = kda_tl.explain("chunk_kda", **x, cu_seqlens=torch.tensor(offsets(PACK)), intracard_segments=4)
    kernels = ["chunk_wy", "intracard_pre_scan", "intracard_merge", "chunk_scan"]
    assert [launch.spec.kernel for launch in plan.launches] == kernels
    text = str(plan)
    assert "segments   up to 4 per sequence (0, 1, 4, 1, 0, 2, 1, 1 by sequence), 2 chunks each: intracard_segments=4" in text
    assert "grid 9 sequences x 4 segments x 1 head x V tiles" in text and "MISSING" not in text
    whole = kda_tl.explain("chunk_kda", **x, cu_seqlens=torch.tensor(offsets(PACK)))
    assert plan.workspace_bytes - whole.workspace_bytes == 4 * len(PACK) * (3 * 2 + 4) * 64 * 64
    assert "segments   1 per sequence: the cpu runs one block after another" in str(whole)
    with dispatcher.assume_arch("sm_90"):
        plan = kda_tl.explain("chunk_kda", **inputs("kda", 64 * 200, K=128, V=128))
    assert plan.split.segments > 1 and "by the model" in str(plan)


def test_a_pool_is_cut_where_that_pays_for_leaving_the_kernel() -> None:
    """What torch copies out and back where sequences are cut: a bfloat16 pool, not a float32 one."""
    cut = []
    with dispatcher.assume_arch("sm_90"):
        for chunks in (128, 512):
            q, k, v, g = (torch.zeros(1, 64 * chunks, 8, 128, dtype=torch.bfloat16) for _ in range(4))
            for dtype in (torch.float32, torch.bfloat16):
                pool = {"initial_state": torch.zeros(3, 8, 128, 128, dtype=dtype), "state_indices": torch.tensor([1])}
                cut.append(kda_tl.explain("chunk_kda", q, k, v, g, g[..., 0], **pool).split.segments > 1)
    assert cut == [True, False, True, True]


# -- the two kernels alone -----------------------------------------------------------------------------------------------


def kernel(spec: Any) -> Any:
    return dispatcher.kernel(spec, "cpu", torch.device("cpu"))


def mapped(rule: str, x: dict[str, Tensor], cu_seqlens: Tensor | None, chunks: int, cuts: int, every: bool) -> Maps:
    K, V, HV, delta = x["k"].shape[-1], x["v"].shape[-1], x["v"].shape[2], RULES[rule].delta
    N = len(x["k"]) if cu_seqlens is None else len(cu_seqlens) - 1
    T = x["k"].shape[1]
    slots = N * -(-T // 64) if cu_seqlens is None else T // 64 + N
    wy = ChunkWySpec(K, 64, "float32", "float32", RULES[rule].decay, delta)
    with nan_filled_memory():
        workspace = Workspace.empty(slots, HV, K, torch.float32, delta, torch.device("cpu"))
        launch_chunk_wy(kernel(wy), x["q"], x["k"], x.get("g"), x.get("beta"), GateOptions(), cu_seqlens, workspace)
        maps = Maps.empty(N, cuts, HV, K, V, delta, torch.device("cpu"))
        pre_scan = kernel(IntracardPreScanSpec(K, V, 64, "float32", delta))
        launch_intracard_pre_scan(pre_scan, x["v"], workspace, cu_seqlens, chunks, maps, every)
    return maps


def true_map(rule: str, x: dict[str, Tensor], b: int, tokens: slice) -> tuple[Tensor, Tensor]:
    k, v = (x[name][b, tokens].double().transpose(0, 1) for name in ("k", "v"))
    k = k.repeat_interleave(len(v) // len(k), 0)
    g = x["g"][b, tokens].double().transpose(0, 1) if "g" in x else torch.zeros(1, 1, 1, dtype=torch.float64).expand(k.shape)
    g = g.unsqueeze(-1) if g.dim() == 2 else g
    beta = x["beta"][b, tokens].double().transpose(0, 1) if "beta" in x else None
    return segment_affine(k, v, g, beta, delta=RULES[rule].delta)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("rule", ["kda", "gdn", "gla"])
def test_maps_and_states(rule: str, pack: bool) -> None:
    """Of every segment that there is, the last one included where it is asked for; rows of others stay as they were."""
    lengths = [330, 1, 0, 128, 193] if pack else [330, 330]
    size = 64 if RULES[rule].delta else 128
    x = inputs(rule, sum(lengths) if pack else 330, B=1 if pack else 2, HV=2, K=size, V=size, N=len(lengths))
    cu_seqlens = torch.tensor(offsets(lengths), dtype=torch.int32) if pack else None
    chunks, cuts = 2, 3
    some, every = (mapped(rule, x, cu_seqlens, chunks, cuts, every) for every in (False, True))
    segments = Segments.empty(len(lengths), cuts, chunks, 2, size, size, torch.device("cpu"))
    segments.states.fill_(torch.nan)
    merge = kernel(IntracardMergeSpec(size, size, delta=RULES[rule].delta))
    launch_intracard_merge(merge, some, x["k"].shape[1], cu_seqlens, x["initial_state"], segments)
    for n, (b, tokens) in enumerate(sequences(x, offsets(lengths) if pack else None)):
        state = x["initial_state"][n].double()
        count = -(-lengths[n] // (chunks * 64))
        for s in range(cuts):
            if s >= max(count, 1):
                assert every.biases[n, s].isnan().all() and segments.states[n, s].isnan().all()
                continue
            assert relative_error(segments.states[n, s], state) < LIMIT
            if s >= count:
                continue
            first = tokens.start + s * chunks * 64
            M, B = true_map(rule, x, b, slice(first, min(first + chunks * 64, tokens.stop)))
            found = every.transitions[n, s]
            found = found.transpose(-1, -2) if RULES[rule].delta else torch.diag_embed(found.squeeze(-2))
            assert relative_error(found, M) < LIMIT and relative_error(every.biases[n, s], B) < LIMIT
            if s < count - 1:
                assert torch.equal(some.transitions[n, s], every.transitions[n, s])
                assert torch.equal(some.biases[n, s], every.biases[n, s])
            else:
                assert some.biases[n, s].isnan().all()
            state = M @ state + B


def test_a_merge_reads_the_states_that_a_scan_would() -> None:
    """Slots of a pool, sequences that start from zero, and padding, as chunk_scan has them."""
    N, cuts = 5, 2
    maps = Maps.empty(N, cuts, 1, 64, 64, True, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    maps.transitions.copy_(torch.randn(maps.transitions.shape, generator=generator) / 8)
    maps.biases.copy_(torch.randn(maps.biases.shape, generator=generator))
    pool = torch.randn((7, 1, 64, 64), generator=generator).transpose(-1, -2)
    indices = torch.tensor([3, 6, 0, 9, 5], dtype=torch.int32)
    has_initial_state = torch.tensor([1, 0, 1, 1, 1], dtype=torch.uint8)
    segments = Segments.empty(N, cuts + 1, 1, 1, 64, 64, torch.device("cpu"))
    segments.states.fill_(torch.nan)
    merge = kernel(IntracardMergeSpec(64, 64))
    launch_intracard_merge(merge, maps, 192, None, pool, segments, pool=Pool(indices, 0, has_initial_state))
    for n, slot in enumerate(indices.tolist()):
        if slot in (0, 9):
            assert segments.states[n].isnan().all()
            continue
        state = pool[slot].double() * int(has_initial_state[n])
        for s in range(cuts + 1):
            assert relative_error(segments.states[n, s], state) < 1e-6
            if s < cuts:
                state = maps.transitions[n, s].double().transpose(-1, -2) @ state + maps.biases[n, s].double()


def test_nan_stays_in_its_sequence_and_head() -> None:
    lengths = [200, 130, 200]
    x = inputs("kda", sum(lengths), H=2, HV=4, N=3)
    cu_seqlens = torch.tensor(offsets(lengths))
    o, state = call("kda", x, cu_seqlens=cu_seqlens, output_final_state=True, intracard_segments=3)
    spoilt = {name: tensor.clone() for name, tensor in x.items()}
    spoilt["v"][0, 210, 2] = torch.inf
    spoilt["initial_state"][2, 0] = torch.nan
    o_bad, state_bad = call("kda", spoilt, cu_seqlens=cu_seqlens, output_final_state=True, intracard_segments=3)
    clean = torch.ones(o.shape[1:3], dtype=torch.bool)
    clean[200:330, 2] = clean[330:, 0] = False
    assert torch.equal(o_bad[0, clean], o[0, clean]) and not o_bad[0, ~clean].isfinite().all()
    kept = torch.ones(state.shape[:2], dtype=torch.bool)
    kept[1, 2] = kept[2, 0] = False
    assert torch.equal(state_bad[kept], state[kept])


def test_the_inputs_may_be_strided() -> None:
    x = inputs("kda", 200, H=2, HV=2)
    strided = {name: poisoned(x[name], strided=True) for name in x.keys() - {"initial_state"}}
    o, _ = call("kda", x, intracard_segments=2)
    assert torch.equal(call("kda", {**strided, "initial_state": x["initial_state"]}, intracard_segments=2)[0], o)


def test_segments_of_a_split() -> None:
    split = kda_tl.explain("chunk_kda", **inputs("kda", 64 * 5 + 3), intracard_segments=3).split
    assert split.of_sequence(64 * 5 + 3) == [(0, 128), (128, 256), (256, 323)]
    assert split.of_sequence(0) == [] and split.of_sequence(5) == [(0, 5)]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(split.of_sequence(900)))


@pytest.mark.parametrize("segments", [None, 3])
@pytest.mark.parametrize("pack", [False, True])
def test_maps_for_other_processes(pack: bool, segments: int | None) -> None:
    """What a context hands over, of whole sequences with their last, partial chunk, from raw gates and logits."""
    lengths = [200, 0, 1, 300]
    x = inputs("kda", sum(lengths) if pack else 150, B=1 if pack else 2, H=1, HV=2, N=len(lengths) if pack else 2)
    offsets_ = offsets(lengths)
    options: dict[str, Any] = {
        "cu_seqlens": torch.tensor(offsets_) if pack else None, "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "A_log": torch.tensor([-1.0, 0.5]),
        "intracard_segments": segments,
    }  # fmt: skip
    a = kda_tl.chunk_kda.arguments(**x, **options)
    maps = maps_by_kernels(check_call(kda_tl.chunk_kda.op, a), a)
    assert maps is not None
    spans = [(0, *bounds) for bounds in itertools.pairwise(offsets_)][::-1] if pack else [(1, 0, 150), (0, 0, 150)]
    transition, bias = maps(a.k, a.v, a.g, a.beta, spans)
    k, g = l2norm(x["k"].double()), kda_gate(x["g"].double(), a.A_log, None, None)
    M, B = segment_maps(k, x["v"], g, x["beta"].double().sigmoid(), spans)
    for row in range(len(spans)):
        assert relative_error(transition[row], M[row].double()) < LIMIT
        assert relative_error(bias[row], B[row].double()) < LIMIT
