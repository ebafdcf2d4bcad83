"""Every argument of every op, spoilt: the right result, or an error that names it and leaves all states as they were."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_op import SUBJECTS, Subject, same
from torch import Tensor

import kda_tl

pytestmark = pytest.mark.usefixtures("cpu_kernels")

every_op = pytest.mark.parametrize("op", SUBJECTS, ids=lambda op: op.name)
IN_PLACE = "to be updated in place"


def tensors(x: dict[str, Any]) -> list[str]:
    return [name for name, value in x.items() if isinstance(value, Tensor)]


def refused(op: Subject, x: dict[str, Any], message: str, error: type[Exception] | tuple[type[Exception], ...]) -> None:
    before = op.stored(x)
    with pytest.raises(error, match=message):
        op.call(x)
    assert all(same(a, b) for a, b in zip(op.stored(x), before)), "a refused call has written"


# -- layouts -------------------------------------------------------------------------------------------------------------


def _nan(shape: list[int], like: Tensor) -> Tensor:
    return torch.full(shape, torch.nan if like.is_floating_point() else 1).to(like.dtype)


def _axes_reversed(x: Tensor) -> Tensor:
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def _every_second(x: Tensor) -> Tensor:
    return _nan([*x.shape[:-1], 2 * x.shape[-1]], x)[..., ::2].copy_(x)


def _misaligned(x: Tensor) -> Tensor:
    return _nan([x.numel() + 2], x)[1:-1].view(x.shape).copy_(x)


def _amid_nan(x: Tensor) -> Tensor:
    return _nan([size + 6 for size in x.shape], x)[tuple(slice(3, 3 + size) for size in x.shape)].copy_(x)


def _lazily_negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x) if x.is_floating_point() else x


LAYOUTS = (_axes_reversed, _every_second, _misaligned, _amid_nan, _lazily_negated)


@every_op
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__.strip("_"))
def test_a_layout_changes_no_bit(op: Subject, layout: Callable[[Tensor], Tensor]) -> None:
    """A lazily negated tensor counts as a layout: its sign is not in its memory."""
    x = op.make()
    expected = op.call(op.make())
    for name in tensors(x):
        changed = op.make()
        changed[name] = layout(changed[name])
        try:
            found = op.call(changed)
        except ValueError as refusal:
            assert name == "initial_state" and IN_PLACE in str(refusal), (name, refusal)
            continue
        assert all(same(a, b) for a, b in zip(found, expected)), name


@pytest.mark.parametrize("op", [op for op in SUBJECTS if "deltalog" not in op.name], ids=lambda op: op.name)
def test_one_memory_for_all_slots_cannot_be_written(op: Subject) -> None:
    x = op.make()
    x["initial_state"] = x["initial_state"][:1].expand(4, -1, -1, -1)
    refused(op, x, f"initial_state must not be expanded {IN_PLACE}", ValueError)


# -- types, devices, shapes ----------------------------------------------------------------------------------------------

SPOILT: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: x.tolist(),
    "a numpy array": lambda x: x.numpy(),
    "a number": lambda x: 3,
    "float64": lambda x: x.double(),
    "int8": lambda x: x.to(torch.int8),
    "complex": lambda x: x.to(torch.complex64),
    "another device": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 1.0, 0, torch.qint8),
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
    "one dimension more": lambda x: x[None],
    "no dimension": lambda x: x.flatten()[0],
    "one entry less": lambda x: x[..., :-1],
    "a row twice": lambda x: torch.cat([x, x[:1]]),
}
ANY_NUMBER_OF_SLOTS = ("initial_state", "a row twice")


@every_op
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", SPOILT)
def test_what_is_no_such_tensor_is_refused_by_name(op: Subject, how: str) -> None:
    for name in tensors(op.make()):
        if (name, how) == ANY_NUMBER_OF_SLOTS:
            continue
        x = op.make()
        before = op.stored(x)
        pool = x.get("initial_state")
        try:
            x[name] = SPOILT[how](x[name])
        except NotImplementedError:  # nothing that torch makes of this dtype
            continue
        # q and k are held to each other's shape, and so are v and the gates to both.
        first = "k|v|q|r" if name in ("q", "r") else "cu_seqlens_cpu|cu_seqlens" if name == "cu_seqlens" else name
        if name in ("k", "v", "cu_seqlens", "state_indices") or how in ("one dimension more", "a row twice"):
            first += "|initial_state|has_initial_state|state_indices|q|g|w|gk|beta|cu_seqlens"
        with pytest.raises((TypeError, ValueError), match=f"^({first}) must|on one device, got .*{name} on meta|^HV, |^[KV], "):
            op.call(x)
        after = op.stored(x if pool is None else {**x, "initial_state": pool})
        assert all(same(a, b) for a, b in zip(after, before)), "a refused call has written"


@every_op
def test_numbers_that_are_no_numbers(op: Subject) -> None:
    x = op.make()
    for value in ("1", True, torch.ones(()), [1.0], 1j):
        refused(op, {**x, "scale": value}, "^scale must be a number, or None for K", TypeError)
    for null_index, error in (
        ("0", TypeError),
        (True, TypeError),
        (0.0, TypeError),
        (2**31, ValueError),
        (-(2**40), ValueError),
    ):
        refused(op, {**x, "null_index": null_index}, "^null_index must be an int", error)
    if "kda" in op.name:
        for bound in ("-5", False, torch.ones(())):
            refused(op, {**x, "lower_bound": bound}, "^lower_bound must be a number < 0", TypeError)


# -- slots and counts beyond 32 bits -----------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("wide", [2**32 + 1, -(2**32) + 1, 2**63 - 1, -(2**63), 2**31])
def test_an_index_does_not_come_round_to_another_slot(op: Subject, wide: int) -> None:
    """2**32 + 1 cut to 32 bits is 1, which is somebody's."""
    x, y = op.make(), op.make()
    x["state_indices"], y["state_indices"] = torch.tensor([3, wide, 0, 2]), torch.tensor([3, -1, 0, 2])
    assert all(same(a, b) for a, b in zip(op.call(x), op.call(y)))


@pytest.mark.parametrize("op", [op for op in SUBJECTS if "deltalog" in op.name], ids=lambda op: op.name)
def test_a_count_does_not_come_round_to_a_smaller_one(op: Subject) -> None:
    x, y = op.make(), op.make()
    T = x["v"].shape[1]
    x["valid"] = torch.tensor([2**32, -(2**32) + 1, -(2**63), 2**63 - 1])
    y["valid"] = torch.tensor([T, 0, 0, T])
    assert all(same(a, b) for a, b in zip(op.call(x), op.call(y)))


# -- artifacts ---------------------------------------------------------------------------------------------------------------


@every_op
def test_without_an_artifact_nothing_is_written(op: Subject, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_TL_REGISTRY", str(tmp_path))
    monkeypatch.setattr("kda_tl.runtime.dispatcher.search_path", lambda: [tmp_path])
    refused(op, op.make(), r"^no artifact of \w+\[.*\] for cpu .*`kda-tl build --arch cpu", kda_tl.ArtifactMissing)


@every_op
def test_a_damaged_artifact_is_named_before_anything_is_written(
    op: Subject, cpu_kernels: Any, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel of the op in turn is the one that is damaged."""
    import shutil

    from kda_tl.registry import Registry
    from kda_tl.runtime import dispatcher

    used: list[str] = []
    original = dispatcher.kernel
    monkeypatch.setattr(dispatcher, "kernel", lambda spec, *rest: used.append(spec.key) or original(spec, *rest))
    op.call(op.make())
    monkeypatch.undo()
    assert used
    for number, key in enumerate(dict.fromkeys(used)):
        root = tmp_path / str(number)
        shutil.copytree(cpu_kernels.root, root)
        path = Registry(root).find("cpu", key)
        assert path is not None
        library = path / "lib.so"
        library.chmod(0o644)
        library.write_bytes(library.read_bytes()[:-1] + b"\0\0")
        monkeypatch.setenv("KDA_TL_REGISTRY", str(root))
        refused(op, op.make(), re.escape(path.name), kda_tl.DamagedArtifact)
        assert not path.exists() and any((root / "quarantine").iterdir())


# -- KDA_TL_CHECK=1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [op for op in SUBJECTS if op.name.startswith(("recurrent", "deltalog"))], ids=lambda op: op.name)
def test_a_linear_decay_is_refused_on_request(op: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer#2490: exp(g) in place of g. What belongs to no request may hold anything."""
    name = next((name for name in ("g", "w", "gk") if name in op.make()), None)
    x = {key: value for key, value in op.make().items() if key not in ("A_log", "dt_bias")}
    if name is None:
        return
    x["use_gate_in_kernel"] = False
    if "rwkv6" in op.name or "gla" in op.name:
        del x["use_gate_in_kernel"]
    x[name] = -x[name].abs()
    linear = x[name].exp()
    packed = "cu_seqlens" in x
    of_nobody = (0, slice(6, None)) if packed else (torch.tensor([1, 3]),)
    x[name][of_nobody] = 7.0
    op.call(x)
    monkeypatch.setenv("KDA_TL_CHECK", "1")
    op.call(x)
    refused(op, {**x, name: linear}, f"^{name} must be a natural-log decay <= 0, got", ValueError)
    twice = torch.tensor([2, -1, 2, 1])
    refused(op, {**x, "state_indices": twice}, "^state_indices must not name a slot twice", ValueError)


# -- what single ops take beside the common arguments ------------------------------------------------------------------------

Z = torch.zeros(2, 1, 2, 64)
STATE = torch.zeros(2, 2, 64, 64)


@pytest.mark.parametrize(
    ("initial_state", "error", "message"),
    [
        ((STATE,), ValueError, r"initial_state must be a pair \(state, z\) with normalize, got 1 entries"),
        ([STATE, Z], TypeError, "initial_state must be a torch.Tensor, got list"),
        ((STATE[0, 0, 0, 0], None), ValueError, r"initial_state must have shape \[N, HV, K, V\]"),
        ((STATE.to("meta"), Z), ValueError, "initial_state must be on cpu like q, got meta"),
        ((STATE, Z.to("meta")), ValueError, "z, the second of initial_state, must be on cpu like q, got meta"),
        ((STATE.int(), None), TypeError, "initial_state must have dtype bfloat16, float16, float32, got int32"),
        ((None, Z[:, 0]), ValueError, r"z, the second of initial_state, must have shape \[N, 1, HV, K\]"),
        ((None, 3), TypeError, "z, the second of initial_state, must be a torch.Tensor, got int"),
    ],
)
def test_states_of_normalised_linear_attention(initial_state: Any, error: type[Exception], message: str) -> None:
    q, v = torch.rand(2, 5, 1, 64), torch.rand(2, 5, 2, 64)
    with pytest.raises(error, match=f"^{message}"):
        kda_tl.chunk_linear_attention(q, q, v, initial_state=initial_state)
    for wrong in (None, q[0]):
        with pytest.raises((TypeError, ValueError), match=r"^q must "):
            kda_tl.chunk_linear_attention(wrong, q, v, initial_state=(STATE, Z))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("g_gamma", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"g_gamma must have shape \[HV\] = \[2\], got \[3\]"),
        (torch.zeros(2).double(), TypeError, "g_gamma must have dtype bfloat16, float16, float32, got float64"),
        (torch.zeros(2, device="meta"), ValueError, "all tensors must be on one device, got v on cpu, g_gamma on meta"),
        ([0.0, 0.0], TypeError, "g_gamma must be a torch.Tensor, got list"),
    ],
)
def test_a_decay_per_head(g_gamma: Any, error: type[Exception], message: str) -> None:
    q, v = torch.rand(2, 5, 1, 64), torch.rand(2, 5, 2, 64)
    with pytest.raises(error, match=f"^{message}"):
        kda_tl.chunk_simple_gla(q, q, v, g_gamma=g_gamma)
    with pytest.raises(ValueError, match=r"^v must have shape \[B, T, HV, V\]"):
        kda_tl.chunk_simple_gla(q, q, v[0])


def test_the_bonus_of_rwkv6_cannot_be_left_out() -> None:
    q, v = torch.rand(2, 1, 1, 64), torch.rand(2, 1, 2, 64)
    with pytest.raises(TypeError, match=r"^u must be a torch.Tensor, got NoneType"):
        kda_tl.recurrent_rwkv6(q, q, v, -torch.rand(2, 1, 2, 64), None)  # type: ignore[arg-type]


def test_derivatives_do_not_get_lost_in_a_cache() -> None:
    import deltalog_cases
    from torch.autograd import forward_ad

    cache = kda_tl.DeltaLogCache(2, 2)
    x = deltalog_cases.tokens(1, 1, 1, 2, "kda", "weak", "cpu", 0) | {"cache": cache, "state_indices": torch.tensor([1])}
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"^v requires a gradient"):
        kda_tl.deltalog_decode_kda(**{**x, "v": forward_ad.make_dual(x["v"], x["v"])})
    state = torch.ones(1, 2, 128, 128, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^state requires a gradient"):
        cache.write_state([0], state)
    assert not cache.base.any() and not cache.lengths().any()
    with torch.no_grad():
        cache.write_state([0], state)
    assert cache.base[0].all()


@pytest.mark.parametrize("op", [op for op in SUBJECTS if op.name.startswith(("chunk", "recurrent"))], ids=lambda op: op.name)
@pytest.mark.parametrize("packed", [False, True])
def test_a_request_without_tokens_that_starts_from_nothing_clears_its_slot(op: Subject, packed: bool) -> None:
    x = op.make()
    tokens = [name for name in tensors(x) if x[name].dim() > 2 and name != "initial_state"]
    for name in tokens:
        x[name] = x[name][:, :0] if packed else x[name][:, :0].expand(4, *[-1] * (x[name].dim() - 1))
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        x[name] = torch.zeros(5, dtype=torch.int64) if packed else None
    x |= {"state_indices": torch.tensor([3, -1, 0, 2]), "has_initial_state": torch.tensor([True, False, False, True])}
    expected = x["initial_state"].clone()
    expected[0] = 0.0
    o, state = op.call(x)
    assert o.numel() == 0 and same(state, expected)


UNPADDED = [op for op in SUBJECTS if not op.name.startswith("chunk") or "128" in op.name or "kda" in op.name]


@pytest.mark.parametrize("op", UNPADDED, ids=lambda op: op.name)
def test_a_tensor_without_memory_is_refused(op: Subject) -> None:
    """A kernel would read address 0, or an offset from it. Where an op copies first, the copy is torch's to refuse."""
    for name in ("q", "r", "k", "v"):
        x = op.make()
        if name in x:
            x[name] = torch.nn.functional.pad(x[name], (0, 0, 0, 0, 1, 1))[:, 1:-1]  # at an offset, and nobody else's
            x[name].untyped_storage().resize_(0)
            called = "q" if name == "r" else name  # the kernel's word for it
            refused(op, x, f"^{called} must have memory, got a Tensor whose storage is empty", ValueError)


@every_op
def test_a_graph_that_saved_a_state_refuses_to_go_backward(op: Subject) -> None:
    """Kernels write behind torch's back: autograd is told, as of any operation in place."""
    x = op.make()
    pool = x["cache"].base if "cache" in x else x["initial_state"]
    weight = torch.ones((), requires_grad=True)
    saved = (pool * weight).sum()
    op.call(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
    with torch.inference_mode():
        x = op.make()
        assert op.call(x)[0].is_inference()
