"""Calls that are recognised in native code: what they compute, and that nothing else is ever taken for one of them."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import every_op
import pytest
import torch
import tvm_ffi
from every_op import SUBJECTS, Subject
from torch import Tensor

import kda_tl
from kda_tl.ops import repeated
from kda_tl.ops.known import Known
from kda_tl.runtime import dispatcher, fused
from kda_tl.runtime.counters import counters, reset_counters

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
from extern_kernels import extern_kernel

pytestmark = [pytest.mark.tilelang, pytest.mark.usefixtures("cpu_kernels", "native_helper")]
OPS = [op for op in vars(kda_tl).values() if callable(op) and hasattr(op, "repeated")]

# Whose kernels read copies: of slots that are gathered, and of a bonus with a row for every value head.
OTHERS = {f"chunk {rule} 64" for rule in every_op.rule_inputs.OPS} | {"recurrent rwkv6 128", "deltalog rwkv6"}


class Lookups(list[str]):
    """The kernels that the dispatcher was asked for, which a call that is recognised does not."""

    def none_in(self, call: Callable[[], Any]) -> bool:
        self.clear()
        call()
        return not self


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lookups]:
    """The cpu's kernels behind TVM-FFI's interface, as a GPU's are, and nothing recognised yet."""
    seen, find, made = Lookups(), dispatcher.kernel, {}

    def kernel(spec: Any, *rest: Any) -> Any:
        seen.append(spec.kernel)
        if spec.key not in made:
            made[spec.key] = extern_kernel(find(spec, *rest))
        return made[spec.key]

    monkeypatch.setattr(dispatcher, "kernel", kernel)
    for op in OPS:
        tables: Known[Any] = Known(8)
        monkeypatch.setattr(op.repeated, "_tables", tables)
        monkeypatch.setattr(op.repeated, "_table", tables.get_hashable)
    yield seen


def plain(call: Callable[[], Any]) -> Any:
    """The call with all that is native left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "native", lambda name: None)
        patch.setattr(repeated.Repeated, "call", lambda *given: None)
        return call()


def subject_inputs(subject: Subject) -> dict[str, Any]:
    x = subject.make()
    return x | {name: x[name].int() for name in ("cu_seqlens",) if name in x}


@pytest.mark.parametrize("subject", SUBJECTS, ids=[subject.name for subject in SUBJECTS])
def test_a_call_that_comes_again_gives_the_same_bits(subject: Subject, lookups: Lookups) -> None:
    x, y = subject_inputs(subject), subject_inputs(subject)
    for seed in range(5):
        values = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(seed))
        x, y = ({**z, "v": values.clone(), "k": z["k"].clone()} for z in (x, y))
        reset_counters()
        lookups.clear()
        found = subject.call(x)
        again, hits = not lookups, counters().hits
        expected = plain(lambda: subject.call(y))  # noqa: B023
        assert all(every_op.same(a, b) for a, b in zip(found, expected, strict=True))
        assert again == (seed > 1 and subject.name not in OTHERS)
        assert not again or hits == len(lookups)


CONVERTED: dict[str, dict[str, torch.dtype]] = {
    "chunk kda 128": {"cu_seqlens": torch.int64, "beta": torch.bfloat16, "A_log": torch.float16, "dt_bias": torch.bfloat16},
    "recurrent kda 128": {"cu_seqlens": torch.int64, "state_indices": torch.int64, "dt_bias": torch.float16},
    "deltalog kda": {"state_indices": torch.int64, "valid": torch.int64, "beta": torch.float16, "A_log": torch.float16},
}


@pytest.mark.parametrize("name", CONVERTED)
def test_what_is_converted_is_converted_each_time(name: str, lookups: Lookups) -> None:
    subject = next(each for each in SUBJECTS if each.name == name)
    x, y = subject_inputs(subject), subject_inputs(subject)
    for z in (x, y):
        z.update({key: z[key].to(dtype) for key, dtype in CONVERTED[name].items()})
    kept = {"cu_seqlens", "valid"} | ({"state_indices"} if "cache" in x else set())  # a log's slots count by value on the host
    for seed in range(4):
        for key in CONVERTED[name].keys() - kept:
            x[key] = y[key] = x[key].roll(seed, 0)
        lookups.clear()
        found = subject.call(x)
        assert (not lookups) == (seed > 1)
        assert all(every_op.same(a, b) for a, b in zip(found, plain(lambda: subject.call(y)), strict=True))


def inputs(seed: int = 0, T: int = 70, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(1, T, 2, 128), dim=-1) for _ in range(2))
    x = {"q": q, "k": k, "v": normal(1, T, 2, 128), "g": -normal(1, T, 2, 128).abs(), "beta": normal(1, T, 2).sigmoid()}
    x |= {"cu_seqlens": torch.tensor([0, 30, T], dtype=torch.int32), "cu_seqlens_cpu": torch.tensor([0, 30, T])}
    x |= {"initial_state": normal(2, 2, 128, 128), "output_final_state": True, "A_log": normal(2), "dt_bias": normal(2, 128)}
    return x | {"use_gate_in_kernel": True, "lower_bound": -5.0, "scale": 0.1} | changes


def learn(op: Any = kda_tl.chunk_kda, **changes: Any) -> None:
    for seed in range(2):
        op(**inputs(seed, **changes))


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "shape": lambda x: {"v": x["v"][..., :64].contiguous(), "initial_state": x["initial_state"][..., :64].contiguous()},
    "tokens": lambda x: {name: x[name][:, :69] for name in ("q", "k", "v", "g", "beta")} | offsets(30, 69),
    "strides": lambda x: {"v": x["v"].transpose(1, 2).contiguous().transpose(1, 2)},
    "rows apart": lambda x: {"q": torch.stack([x["q"], x["q"]], -1)[..., 0]},
    "an odd start": lambda x: {"k": torch.cat([torch.zeros(1), x["k"].flatten()])[1:].view(x["k"].shape)},
    "dtype": lambda x: {name: x[name].half() for name in ("q", "k", "v")},
    "a gate's dtype": lambda x: {"g": x["g"].bfloat16()},
    "negated": lambda x: {"g": torch._neg_view(-x["g"])},
    "a negated state": lambda x: {"initial_state": torch._neg_view(-x["initial_state"])},
    "offsets": lambda x: offsets(31, 70),
    "wide offsets": lambda x: {"cu_seqlens": x["cu_seqlens"].long()},
    "no offsets for the host": lambda x: {"cu_seqlens_cpu": None},
    "one sequence": lambda x: {"cu_seqlens": None, "cu_seqlens_cpu": None, "initial_state": x["initial_state"][:1]},
    "no state": lambda x: {"initial_state": None},
    "a mask": lambda x: {"has_initial_state": torch.tensor([False, True])},
    "a pool": lambda x: {"state_indices": torch.tensor([1, 0], dtype=torch.int32)},
    "the bias's layout": lambda x: {"dt_bias": x["dt_bias"].flatten()},
    "no bias": lambda x: {"dt_bias": None},
    "q is k": lambda x: {"q": x["k"]},
    "scale": lambda x: {"scale": 0.2},
    "no scale": lambda x: {"scale": None},
    "the gate's bound": lambda x: {"lower_bound": -4.0},
    "segments": lambda x: {"intracard_segments": 2},
    **{name: lambda x, name=name: {name: True} for name in (
        "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first", "return_intermediate_states")},
    "no final state": lambda x: {"output_final_state": False},
    "no gate": lambda x: {"use_gate_in_kernel": False},
    "a safe gate": lambda x: {"safe_gate": True},
}  # fmt: skip


def offsets(*ends: int) -> dict[str, Tensor]:
    return {"cu_seqlens": torch.tensor([0, *ends], dtype=torch.int32), "cu_seqlens_cpu": torch.tensor([0, *ends])}


@pytest.mark.parametrize("name", CHANGES)
def test_other_calls_are_told_apart(name: str, lookups: Lookups) -> None:
    learn()
    assert lookups.none_in(lambda: kda_tl.chunk_kda(**inputs(2)))
    x = inputs(3)
    x |= CHANGES[name](x)
    y = {key: value.clone() if key == "initial_state" and value is not None else value for key, value in x.items()}
    found, expected = [], plain(lambda: kda_tl.chunk_kda(**y))
    is_alias = name == "q is k"  # equal for all but the watch over a second call
    assert lookups.none_in(lambda: found.extend(kda_tl.chunk_kda(**x))) == is_alias
    assert same(tuple(found), expected) and (x["initial_state"] is None or torch.equal(x["initial_state"], y["initial_state"]))


def test_the_order_of_arguments_is_no_matter_and_their_names_are(lookups: Lookups) -> None:
    learn()
    x = inputs(3)
    expected = plain(lambda: kda_tl.chunk_kda(**x))
    for given in (dict(reversed(x.items())), {**x, "q": x["k"], "k": x["q"]}):
        assert same(kda_tl.chunk_kda(**given), plain(lambda given=given: kda_tl.chunk_kda(**given)))
    swapped = {name: value for name, value in x.items() if name not in ("q", "k")}
    for _ in range(3):
        assert same(kda_tl.chunk_kda(x["q"], x["k"], **swapped), expected)
        assert not same(kda_tl.chunk_kda(k=x["q"], q=x["k"], **swapped), expected)


def test_numbers_that_are_equal_but_of_another_type_are_told_apart(lookups: Lookups) -> None:
    learn(intracard_segments=1)
    assert lookups.none_in(lambda: kda_tl.chunk_kda(**inputs(2, intracard_segments=1)))
    for wrong in (True, 1.0):
        with pytest.raises(TypeError, match="intracard_segments must be"):
            kda_tl.chunk_kda(**inputs(2, intracard_segments=wrong))
    assert same(kda_tl.chunk_kda(**inputs(2, intracard_segments=1 << 70)), kda_tl.chunk_kda(**inputs(2, intracard_segments=2)))


@pytest.mark.parametrize("flag", ["use_qk_l2norm_in_kernel", "output_final_state", "state_v_first"])
def test_a_tensor_as_a_flag_counts_by_what_it_holds(flag: str, lookups: Lookups) -> None:
    x = inputs(2)
    plain_results = {value: kda_tl.chunk_kda(**x | {flag: value}) for value in (True, False)}
    held = torch.tensor(True)
    for _ in range(4):
        assert same(kda_tl.chunk_kda(**x | {flag: held}), plain_results[True])
    assert same(kda_tl.chunk_kda(**x | {flag: torch.tensor(False)}), plain_results[False])
    held.fill_(False)
    assert same(kda_tl.chunk_kda(**x | {flag: held}), plain_results[False])


def test_a_gradient_is_recorded(lookups: Lookups) -> None:
    learn()
    x = inputs(2)
    x["q"] = torch.nn.Parameter(x["q"])
    with torch.no_grad():
        assert lookups.none_in(lambda: kda_tl.chunk_kda(**x))
    o, _ = kda_tl.chunk_kda(**x)
    assert o.requires_grad
    with torch.inference_mode():
        assert lookups.none_in(lambda: kda_tl.chunk_kda(**x))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        kda_tl.chunk_kda(**x | {"q": torch.autograd.forward_ad.make_dual(x["q"].detach(), torch.ones_like(x["q"]))})


def test_a_call_that_records_a_gradient_is_not_learnt_from(lookups: Lookups) -> None:
    for _ in range(3):
        x = inputs(2)
        x["v"].requires_grad_()
        assert kda_tl.chunk_kda(**x)[0].requires_grad
    learn()
    assert lookups.none_in(lambda: kda_tl.chunk_kda(**inputs(3)))


def test_modes_subclasses_and_compilers_see_the_op(lookups: Lookups) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    learn()
    x = inputs(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(kda_tl.chunk_kda(**x)[0]).__name__ == "FakeTensor"

    class Seen(TorchDispatchMode):
        ops: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        kda_tl.chunk_kda(**x)
    assert any("kda_tl.chunk_kda" in name for name in Seen.ops)
    many = torch.stack([x["v"], 2 * x["v"]])
    mapped = torch.vmap(lambda v: kda_tl.chunk_kda(**x | {"v": v})[0])(many)
    assert torch.equal(mapped, torch.stack([kda_tl.chunk_kda(**x | {"v": v})[0] for v in many]))
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda v: kda_tl.chunk_kda(**x | {"v": v})[0] * 1.0, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x["v"]), kda_tl.chunk_kda(**x)[0])
    assert any("kda_tl.chunk_kda" in str(node.target) for node in graphs[0].graph.nodes)


def test_what_a_call_depends_on_besides_its_arguments(
    lookups: Lookups, monkeypatch: pytest.MonkeyPatch, cpu_registry: Any
) -> None:
    learn()
    for name, value in (("KDA_TL_REGISTRY", f"{cpu_registry.root}:/nowhere"), ("KDA_TL_ARCH", "sm_90"), ("KDA_TL_CHECK", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not lookups.none_in(lambda: kda_tl.chunk_kda(**inputs(2)))
    assert lookups.none_in(lambda: kda_tl.chunk_kda(**inputs(2)))
    with dispatcher.assume_arch("cpu"):
        assert not lookups.none_in(lambda: kda_tl.chunk_kda(**inputs(2)))
    monkeypatch.setenv("KDA_TL_CHECK", "1")
    with pytest.raises(ValueError, match="g must be a natural-log decay"):
        kda_tl.chunk_kda(**inputs(2, use_gate_in_kernel=False) | {"g": torch.ones(1, 70, 2, 128)})


@pytest.mark.parametrize("wrong", [torch.zeros(1, 70, 2, 128).to_sparse(), 3, [1.0], torch.zeros(1, 70, 2, 128, device="meta")])
def test_what_is_no_tensor_in_memory_is_refused_as_ever(wrong: Any, lookups: Lookups) -> None:
    learn()
    with pytest.raises((TypeError, ValueError), match=r"v must be|all tensors must be"):
        kda_tl.chunk_kda(**inputs(2) | {"v": wrong})


def test_a_call_in_between_is_not_taken_for_this_one(lookups: Lookups, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer may run wherever something is allocated: between a find and the launches, too."""
    learn()
    x, other = inputs(2), inputs(3)
    expected, within = plain(lambda: kda_tl.chunk_kda(**x)), []
    allocate = repeated.empty_like

    def interrupted(*given: Any, **options: Any) -> Tensor:
        if len(within) < 1:
            within.append(None)
            within[0] = kda_tl.chunk_kda(**other)
        return allocate(*given, **options)

    monkeypatch.setattr(repeated, "empty_like", interrupted)
    assert same(kda_tl.chunk_kda(**x), expected)
    assert same(within[0], plain(lambda: kda_tl.chunk_kda(**other)))


def test_a_pool_counts_as_written(lookups: Lookups) -> None:
    pool = {"initial_state": torch.zeros(3, 2, 128, 128), "state_indices": torch.tensor([2, 0], dtype=torch.int32)}
    learn(**pool)
    version = pool["initial_state"]._version
    assert lookups.none_in(lambda: kda_tl.chunk_kda(**inputs(2, **pool)))
    assert pool["initial_state"]._version > version
    assert kda_tl.chunk_kda(**inputs(2, **pool))[1] is pool["initial_state"]


def test_nothing_of_a_call_is_kept(lookups: Lookups) -> None:
    x = inputs(0)
    references = [weakref.ref(x[name]) for name in ("q", "v", "initial_state", "cu_seqlens")]
    for _ in range(3):
        results = kda_tl.chunk_kda(**x)
    references.append(weakref.ref(results[0]))
    del x, results
    gc.collect()
    assert all(reference() is None for reference in references)


def test_a_batch_of_which_two_tensors_are_one_may_come_first(lookups: Lookups) -> None:
    for seed in range(3):
        x = inputs(seed)
        kda_tl.chunk_kda(**x | {"q": x["k"]})
    learn()
    x = inputs(3)
    found: list[Any] = []
    assert lookups.none_in(lambda: found.extend(kda_tl.chunk_kda(**x)))
    assert same(tuple(found), plain(lambda: kda_tl.chunk_kda(**x)))


def test_threads_do_not_meet(lookups: Lookups) -> None:
    learn()
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = inputs(seed)
        expected = plain_results[seed]
        wrong.extend(seed for _ in range(20) if not same(kda_tl.chunk_kda(**x), expected))

    plain_results = [plain(lambda seed=seed: kda_tl.chunk_kda(**inputs(seed))) for seed in range(3)]
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_slots_of_a_log_are_told_apart_where_the_host_has_them(lookups: Lookups) -> None:
    cache = kda_tl.DeltaLogCache(4, 2)

    def step(slots: list[int]) -> Tensor:
        x = every_op.deltalog_cases.tokens(2, 1, 1, 2, "kda", "weak", "cpu", 0)
        return kda_tl.deltalog_decode_kda(**x, cache=cache, state_indices=torch.tensor(slots, dtype=torch.int32))

    for _ in range(2):
        step([3, 1])
    assert lookups.none_in(lambda: step([3, 1])) and not lookups.none_in(lambda: step([1, 3]))
    with pytest.raises(ValueError, match="not name a slot twice"):
        step([3, 3])


# -- the native part -----------------------------------------------------------------------------------------------------


def make(most: int = 8, valued: tuple[int, ...] = ()) -> tuple[Any, Any]:
    return tuple(tvm_ffi.get_global_func("kda_tl.calls")(most, list(valued)))


ROW = torch.arange(32, dtype=torch.int32)
UNLIKE: list[Any] = [
    None, True, False, 1, 0, 1.0, 0.0, -0.0, float("inf"), 1 << 40, ROW, ROW[:16], ROW[::2], ROW[4:20], ROW[1:17], ROW[2:18],
    ROW.view(8, 4), ROW.view(4, 8), ROW.view(8, 4).T, ROW.float(), ROW.half(), ROW.bfloat16(), ROW.short(), ROW.long(),
    ROW.bool(), ROW[:0], ROW[0],
]  # fmt: skip


def test_find_tells_values_apart() -> None:
    find, _ = make(most=100)
    numbers = []
    for value in UNLIKE:
        numbers.append(find(value, 5) or find(value, 5))
        assert numbers[-1] < 0
    assert numbers[UNLIKE.index(None)] == -1
    alike = {13: 11}  # 16 elements that start on a multiple of 16 bytes
    assert len(set(numbers)) == len(UNLIKE) - len(alike)
    assert all(numbers[a] == numbers[b] for a, b in alike.items())


def test_find_reads_elements_where_it_is_told_to() -> None:
    find, _ = make(valued=(1,))
    for row in ([1, 2, 3], [1, 2, 4]):
        for kind in (torch.int32, torch.int64):
            x = torch.tensor(row, dtype=kind)
            assert find(x, x.clone()) == 0 and find(x, x.clone()) < 0
    x = torch.tensor([1, 2, 3, 4, 5])
    assert find(ROW, x[::2]) == 0 and find(ROW, torch.tensor([1, 9, 3, 9, 5])[::2]) < 0
    assert find(ROW, torch.tensor([1.0])) == 0 and find(ROW, torch.tensor([1.0])) == 0  # no list of integers


def test_find_forgets_the_oldest() -> None:
    find, settle = make(most=3)
    numbers = []
    for value in range(5):
        find(value)
        numbers.append(find(value))
    assert len(set(numbers)) == 5
    assert find(4) == numbers[4] and find(0) == 0 and find(0) not in numbers
    settle(-numbers[0], True)  # forgotten since: nothing happens
    settle(-numbers[4], False)
    assert find(4) == 0 and find(4) == 0


def test_a_ticket_is_good_once_and_for_the_last_find() -> None:
    find, settle = make()
    seen: list[float] = []
    kernel = extern_kernel(lambda x: seen.append(float(x[0])))
    given = torch.ones(2)
    find(given)
    number = -find(given)
    watch = fused.Watch()
    watch.of(kernel)(given)
    run = watch.recognised(number, (torch.zeros(1), None), (given,))
    assert run is not None
    settle(number, True)
    seen.clear()
    results = torch.zeros(1), None
    first, second = find(torch.full((2,), 3.0)), find(other := torch.full((2,), 4.0))
    assert first & repeated.NUMBER == second & repeated.NUMBER == number and first != second
    assert not run(first, *results) and run(second, *results) and not run(second, *results)
    find(None)
    assert not run(second, *results) and not run(0, *results) and seen == [4.0]
    del other
