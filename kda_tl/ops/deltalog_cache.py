"""DeltaLogCache: slot-indexed recurrent states, each a dense base and a log of the writes that it has not seen yet."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_tl.ops.checks import INT32_MAX, check_dense, check_dtype, check_null_index, check_shape, check_written, narrowed
from kda_tl.ops.deltalog_low import PER_WORD, join, split
from kda_tl.runtime import dispatcher
from kda_tl.specs.deltalog import (
    CAPACITY,
    CURSOR_ROWS,
    K_FIRST,
    RULES,
    TWO_LAUNCHES,
    DeltaLogDecodeSchedule,
    DeltaLogDecodeSpec,
    cpu_state_dtype,
)
from kda_tl.specs.sizes import problem_size

__all__ = ["DeltaLogCache", "DeltaLogSnapshot", "Storage", "storage_of"]

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STORED = ("base", "base_low", "log_k", "log_u", "log_decay", "cursor")
HASH = 2654435761  # Knuth's multiplier: neighbouring slots get unlike windows

Indices = Tensor | Sequence[int]


@dataclass(frozen=True)
class DeltaLogSnapshot:
    """Bases, logs and cursors of n slots, in tensors of their own, for `DeltaLogCache.restore`. indices [n] int64."""

    indices: Tensor
    base: Tensor
    base_low: Tensor
    log_k: Tensor
    log_u: Tensor
    log_decay: Tensor
    cursor: Tensor


class DeltaLogCache:
    """The states of `slots` requests for one layer, and what `deltalog_decode_*` appends to them.

    Attributes:
        base [slots, HV, V, K] state_dtype; base_low [slots, HV, V, K / 8] int32: 4 more bits per element of a bfloat16 base,
        which only folds use (else nothing, [slots, 0]); log_k [slots, HV, capacity, K]: raw keys in the activations' dtype;
        log_u [slots, HV, capacity, V] float32: writes, the keys' norms included; log_decay [slots, HV, capacity, K or 1]
        float32: each entry's own decay e^g; cursor [slots, HV, V / 16, 2] int32, copies of (entries in the log, entries at
        which it is folded). rule, slots, HV, K, V, capacity, merge_every, launches, spec: what the decode kernel is chosen by.

    A state is what the base and the log stand for together: read it with `read_state`, never from `base`. Before another op
    goes on with slots of the base in place, `flush` them: it knows neither log nor low bits. A log that is left is added to
    what it writes; low bits that are left move no element by more than half of its last bit, and none becomes NaN or infinite.

    All methods run on the device of the tensors and wait for nothing; indices given on the host, or on the cpu, are checked for
    range and duplicates. Not thread safe: calls on one cache belong to one stream.
    """

    def __init__(
        self,
        slots: int,
        HV: int,
        K: int = 128,
        V: int = 128,
        rule: str = "kda",
        *,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        base: Tensor | None = None,
        state_v_first: bool = True,
        merge_every: int | None = None,
        launches: int | None = None,
    ) -> None:
        """Zero states with empty logs, first windows staggered over the slots.

        Args:
            slots, HV: at least 1. K, V: 64 or 128.
            rule: "kda", "gdn" or "rwkv6".
            dtype: of the activations: bfloat16 on cuda; the cpu computes and stores keys in float32, whatever it is given.
            state_dtype: of the base: float32, bfloat16 or float16; a narrow base is rounded once per fold, bfloat16 with
                4 more bits beside it.
            base: a pool of one's own, [slots, HV, V, K], used in place as it is; its last stride must be 1, the others
                multiples of 8 elements, its address one of 16 bytes. Its dtype takes the place of state_dtype.
            state_v_first: False for a pool [slots, HV, K, V], any strides, float32, rules kda and gdn: slower, since it is read
                element by element. The attribute `base` is [slots, HV, V, K] all the same, a view.
            merge_every: tokens from one fold to the next, 1 (the dense recurrence) to 16; default: the schedule's.
            launches: 1, or 2 with ReplayPrep first; default: the schedule's.

        Raises:
            TypeError, ValueError: an argument is not as above; the message names it.
            UnsupportedDevice: no kernels for the device.
        """
        for name, value, most in (("slots", slots, INT32_MAX), ("HV", HV, 65535)):
            if not _is_integer(value) or not 1 <= value <= most:
                raise ValueError(f"{name} must be an integer from 1 to {most}, got {value!r}")
        for name, value in (("K", K), ("V", V)):
            if not _is_integer(value) or value not in (64, 128):
                raise ValueError(f"{name} must be 64 or 128, got {value!r}")
        if not isinstance(rule, str) or rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
        if base is not None:
            if not isinstance(base, Tensor):
                raise TypeError(f"base must be a torch.Tensor, got {type(base).__name__}")
            check_dense("base", base)
            base = _check_base(base, (slots, HV, V, K), bool(state_v_first))
            device, state_dtype = base.device, base.dtype
        for name, kind in (("dtype", dtype), ("state_dtype", state_dtype)):
            if kind not in FLOAT_DTYPES:
                raise TypeError(f"{name} must be bfloat16, float16 or float32, got {kind}")
        self.slots, self.HV, self.K, self.V, self.rule, self.capacity = slots, HV, K, V, rule, CAPACITY
        self.device = torch.empty(0, device=device).device
        self.arch = dispatcher.device_arch(self.device)
        on_cpu = self.arch == "cpu"
        if not on_cpu and dtype != torch.bfloat16:
            raise TypeError(f"dtype must be bfloat16 on {self.device} ({self.arch}), got {dtype}")
        self.dtype = torch.float32 if on_cpu else dtype
        stored = _name(state_dtype)
        self.state_v_first = bool(state_v_first)
        fields: dict[str, Any] = {
            "dtype": _name(self.dtype),
            "capacity": CAPACITY,
            "state_v_first": self.state_v_first,
            **RULES[rule],
        }
        if not state_v_first and (rule not in K_FIRST or (stored != "float32" and not on_cpu)):
            built = f"for {self.arch}, [K, V] is built for {', '.join(K_FIRST)} in float32"
            raise ValueError(f"state_v_first must be True for {rule} with a {stored} base; {built}")
        # Of the largest batch: when a log is folded is the cache's choice, and one for all batches.
        size = problem_size("deltalog_decode", slots, HV)
        step = DeltaLogDecodeSpec(K, V, state_dtype=stored, one_token=bool(state_v_first), **fields)
        schedule = dispatcher.size_class(step, self.arch, size).schedule
        assert isinstance(schedule, DeltaLogDecodeSchedule)
        self.launches = schedule.launches if launches is None else launches
        if not _is_integer(self.launches) or self.launches not in (1, 2):
            raise ValueError(f"launches must be 1 or 2, got {launches!r}")
        if self.launches == 2 and not state_v_first:
            raise ValueError("launches must be 1 where state_v_first is False")
        if self.launches == 2 and (rule, stored) not in TWO_LAUNCHES:
            pairs = ", ".join(f"{name} with a {kind} base" for name, kind in TWO_LAUNCHES)
            built = f"for {self.arch}, two launches are built for {pairs}"
            raise ValueError(f"launches must be 1 for {rule} with a {stored} base; {built}")
        self.merge_every = schedule.merge_every if merge_every is None else merge_every
        if not _is_integer(self.merge_every) or not 1 <= self.merge_every <= CAPACITY:
            raise ValueError(f"merge_every must be an integer from 1 to {CAPACITY}, got {merge_every!r}")
        self.spec = _spec(rule, K, V, _name(self.dtype), stored, self.state_v_first, self.launches, on_cpu)

        def zeros(*shape: int, of: torch.dtype) -> Tensor:
            return torch.zeros((slots, HV, *shape), dtype=of, device=self.device)

        if base is None:
            base = zeros(*((V, K) if state_v_first else (K, V)), of=state_dtype)
        self.base = base if state_v_first else base.transpose(-1, -2)
        low = (V, K // PER_WORD) if state_dtype == torch.bfloat16 else None
        self.base_low = torch.zeros((slots, *((HV, *low) if low else (0,))), dtype=torch.int32, device=self.device)
        self.log_k = zeros(CAPACITY, K, of=self.dtype)
        self.log_u = zeros(CAPACITY, V, of=torch.float32)
        self.log_decay = zeros(CAPACITY, self.spec.decay_size, of=torch.float32)
        self.cursor = zeros(V // CURSOR_ROWS, 2, of=torch.int32)
        hashed = (torch.arange(slots, device=self.device) * HASH % 2**32) >> 16
        self.first_window = (1 + hashed % self.merge_every).to(torch.int32)
        self.cursor[..., 1] = self.first_window[:, None, None]

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """base, base_low, log_k, log_u, log_decay, cursor: all that a decode step writes."""
        return self.base, self.base_low, self.log_k, self.log_u, self.log_decay, self.cursor

    def lengths(self, state_indices: Indices | None = None) -> Tensor:
        """Entries in the logs, [n] int32."""
        counts = self.cursor[:, 0, 0, 0]
        return counts.clone() if state_indices is None else counts[self._indices(state_indices)]

    def read_state(self, state_indices: Indices | None = None, state_v_first: bool = False) -> Tensor:
        """The logical states of these slots, of all without indices: [n, HV, K, V] (or [n, HV, V, K]) float32, a new tensor.

        The same at every cursor, and whenever logs were folded, up to rounding.
        """
        stored = [getattr(self, name) for name in STORED]
        if state_indices is not None:
            chosen = self._indices(state_indices)
            stored = [tensor[chosen] for tensor in stored]
        base, low, keys, writes, decays, cursor = stored
        counts = cursor[:, :, 0, 0, None]
        weight = torch.ones_like(decays[:, :, 0])
        total = torch.zeros_like(base, dtype=torch.float32)
        for j in range(self.capacity - 1, -1, -1):
            filled = counts > j  # what lies past the cursor is no number at all
            key = torch.where(filled, keys[:, :, j].float() * weight, 0.0)
            write = torch.where(filled, writes[:, :, j], 0.0)
            total += write.unsqueeze(-1) * key.unsqueeze(-2)
            weight = torch.where(filled, weight * decays[:, :, j], weight)
        state = (join(base, low) if low.numel() else base.float()) * weight.unsqueeze(-2) + total
        return state if state_v_first else state.transpose(-1, -2).contiguous()

    def write_state(self, state_indices: Indices, state: Tensor, state_v_first: bool = False) -> None:
        """Slots take these states [n, HV, K, V] (or [n, HV, V, K]), with empty logs; what they held is gone."""
        chosen = self._indices(state_indices, distinct=True)
        if not isinstance(state, Tensor):
            raise TypeError(f"state must be a torch.Tensor, got {type(state).__name__}")
        check_dense("state", state)
        check_dtype("state", state, (*FLOAT_DTYPES, torch.float64))
        layout, sizes = ("[n, HV, V, K]", (self.V, self.K)) if state_v_first else ("[n, HV, K, V]", (self.K, self.V))
        check_shape("state", state, layout, (chosen.numel(), self.HV, *sizes))
        if state.device != self.device:
            raise ValueError(f"state must be on {self.device} like the cache, got {state.device}")
        if torch.is_grad_enabled() and state.requires_grad:
            raise NotImplementedError("state requires a gradient and decode has none: detach it, or call under torch.no_grad()")
        self._store(chosen, (state if state_v_first else state.transpose(-1, -2)).detach())
        self._empty_logs(chosen, self.first_window[chosen])

    def reset(self, state_indices: Indices | None = None) -> None:
        """Zero states with empty logs; all slots without indices."""
        chosen = self._indices(state_indices, distinct=True)
        self.base[chosen] = 0.0
        self.base_low[chosen] = 0
        self._empty_logs(chosen, self.first_window[chosen])

    def flush(self, state_indices: Indices | None = None) -> None:
        """Folds the logs into the bases now, whatever their cursors; all slots without indices.

        Then a slot is all base, and ops that know nothing of logs may go on with it: a bfloat16 base gives up its `base_low`,
        rounded once to its own bits.
        """
        chosen = self._indices(state_indices, distinct=True)
        self.base[chosen] = self.read_state(chosen, state_v_first=True).to(self.base.dtype)
        self.base_low[chosen] = 0
        self._empty_logs(chosen, torch.full_like(self.first_window[chosen], self.merge_every))

    def fork(self, source: Indices, target: Indices) -> None:
        """Slots `target` become copies of slots `source`, base, log and cursor, bit for bit. Sources may repeat."""
        sources, targets = self._indices(source, name="source"), self._indices(target, name="target", distinct=True)
        if sources.numel() != targets.numel():
            raise ValueError(f"target must have as many entries as source, {sources.numel()}, got {targets.numel()}")
        for name in STORED:
            tensor = getattr(self, name)
            tensor[targets] = tensor[sources]

    def snapshot(self, state_indices: Indices | None = None) -> DeltaLogSnapshot:
        """What these slots hold, pending entries included; all slots without indices."""
        chosen = self._indices(state_indices)
        return DeltaLogSnapshot(chosen.clone(), *(getattr(self, name)[chosen] for name in STORED))

    def restore(self, snapshot: DeltaLogSnapshot, state_indices: Indices | None = None) -> None:
        """Puts a snapshot back, bit for bit: into the slots that it was taken of, or into these ones."""
        if not isinstance(snapshot, DeltaLogSnapshot):
            raise TypeError(f"snapshot must be a DeltaLogSnapshot, got {type(snapshot).__name__}")
        chosen = self._indices(snapshot.indices if state_indices is None else state_indices, distinct=True)
        if chosen.numel() != snapshot.indices.numel():
            raise ValueError(
                f"state_indices must have {snapshot.indices.numel()} entries like the snapshot, got {chosen.numel()}"
            )
        pairs = [(name, getattr(self, name), getattr(snapshot, name)) for name in STORED]
        for name, tensor, saved in pairs:
            if saved.shape[1:] != tensor.shape[1:] or saved.dtype != tensor.dtype or saved.device != tensor.device:
                raise ValueError(
                    f"snapshot is of another kind of cache: {name} {list(saved.shape[1:])} {saved.dtype} on {saved.device}"
                )
        for _, tensor, saved in pairs:
            tensor[chosen] = saved

    def truncate(self, drop: Tensor | Sequence[int], state_indices: Indices, null_index: int | None = None) -> None:
        """Takes back the newest drop[i] tokens of slot state_indices[i], drafts that were refused: the state before them.

        Only entries still in the log can go; `deltalog_decode_*` with verify=True keeps its tokens there. Made for every step,
        inside CUDA graphs too. Slots that are null_index or out of range are passed over, and so is a drop below 0 or above
        the cursor where it lies on a device; on the cpu it raises ValueError.
        """
        check_null_index(null_index)
        drops = _integers("drop", drop).to(self.device)
        indices = _integers("state_indices", state_indices).to(self.device)
        if drops.numel() != indices.numel():
            raise ValueError(f"drop must have as many entries as state_indices, {indices.numel()}, got {drops.numel()}")
        indices = indices.long()
        used = (indices >= 0) & (indices < self.slots)
        if null_index is not None:
            used &= indices != null_index
        if self.device.type == "cpu" and indices[used].unique().numel() != int(used.sum()):
            raise ValueError(f"state_indices must not name a slot twice, got {indices.tolist()}")
        # One cell per slot and one for the rest: no two requests meet, and nothing waits for the device.
        taken = torch.zeros(self.slots + 1, dtype=torch.int32, device=self.device)
        taken.scatter_(0, torch.where(used, indices, self.slots), narrowed(drops))
        taken = taken[: self.slots, None, None]
        counts = self.cursor[..., 0]
        legal = (taken >= 0) & (taken <= counts)
        if self.device.type == "cpu" and not bool(legal.all()):
            slot = int((~legal).flatten(1).any(1).nonzero()[0, 0])
            raise ValueError(
                f"drop must be from 0 to the cursor: slot {slot} has {int(counts[slot, 0, 0])} entries, got {int(taken[slot])}"
            )
        counts.sub_(torch.where(legal, taken, 0))

    def _store(self, chosen: Tensor, state: Tensor) -> None:
        """Bases of these slots, [n, HV, V, K]."""
        if self.base.dtype == torch.bfloat16:
            self.base[chosen], self.base_low[chosen] = split(state)
        else:
            self.base[chosen] = state.to(self.base.dtype)

    def _empty_logs(self, chosen: Tensor, window: Tensor) -> None:
        fresh = torch.stack([torch.zeros_like(window), window], -1)
        self.cursor[chosen] = fresh[:, None, None].expand(-1, self.HV, self.V // CURSOR_ROWS, 2)

    def _indices(self, indices: Indices | None, name: str = "state_indices", distinct: bool = False) -> Tensor:
        """[n] int64 on the cache's device; checked where the host can see them."""
        if indices is None:
            return torch.arange(self.slots, device=self.device)
        given = _integers(name, indices)
        if given.device.type == "cpu" and given.numel():
            low, high = int(given.min()), int(given.max())
            if low < 0 or high >= self.slots:
                raise ValueError(f"{name} must be from 0 to {self.slots - 1}, got {low if low < 0 else high}")
            if distinct and given.unique().numel() != given.numel():
                raise ValueError(f"{name} must not name a slot twice, got {given.tolist()}")
        return given.to(self.device, torch.int64)


class Storage(NamedTuple):
    """A cache as a decode step sees it, from its tensors alone. The names are those of `DeltaLogCache`."""

    base: Tensor
    base_low: Tensor
    log_k: Tensor
    log_u: Tensor
    log_decay: Tensor
    cursor: Tensor
    spec: DeltaLogDecodeSpec
    arch: str
    merge_every: int
    launches: int
    device: torch.device
    dtype: torch.dtype
    slots: int
    HV: int
    K: int
    V: int
    capacity: int = CAPACITY


def storage_of(rule: str, values: Sequence[Any], fake: bool = False) -> Storage:
    """values: the six tensors, state_v_first, merge_every and launches of a cache. fake: the tensors are on no device that is
    there, and nothing will be launched."""
    base, low, log_k, log_u, log_decay, cursor, state_v_first, merge_every, launches = values
    slots, HV, V, K = base.shape
    arch, spec = "cpu", DeltaLogDecodeSpec()
    if not fake:
        arch = dispatcher.device_arch(base.device)
        dtypes = _name(log_k.dtype), _name(base.dtype)
        spec = _spec(rule, K, V, *dtypes, state_v_first, launches, arch == "cpu")
    return Storage(
        base, low, log_k, log_u, log_decay, cursor, spec, arch, merge_every, launches, base.device, log_k.dtype, slots, HV, K, V
    )


@functools.lru_cache(maxsize=256)
def _spec(
    rule: str, K: int, V: int, dtype: str, stored: str, state_v_first: bool, launches: int, on_cpu: bool
) -> DeltaLogDecodeSpec:
    """Where the cpu's kernel reads another base, the op hands it a copy and takes that back."""
    state_dtype = cpu_state_dtype(rule, stored, launches if state_v_first else 2) if on_cpu else stored
    fields: dict[str, Any] = {"dtype": dtype, "capacity": CAPACITY, "state_v_first": state_v_first, **RULES[rule]}
    return DeltaLogDecodeSpec(K, V, state_dtype=state_dtype, **fields)


def _integers(name: str, given: Indices) -> Tensor:
    """[n] int32 or int64, where it is."""
    if not isinstance(given, Tensor):
        try:
            given = torch.as_tensor(given, dtype=None if len(given) else torch.int64, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(f"{name} must be a tensor or a sequence of integers, got {given!r}") from None
    if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64 [n], got {given.dtype} {list(given.shape)}")
    return given


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_base(base: Tensor, shape: tuple[int, int, int, int], v_first: bool) -> Tensor:
    """The pool, with strides that the launcher's checks accept where an axis of size 1 has any."""
    check_dtype("base", base, FLOAT_DTYPES)
    if v_first:
        check_shape("base", base, "[slots, HV, V, K]", shape)
    else:
        check_shape("base", base, "[slots, HV, K, V]", (*shape[:2], shape[3], shape[2]))
    if base.requires_grad:
        raise ValueError("base must not require a gradient: it is written in place")
    check_written("base", base)
    if not v_first:
        return base
    strides = [8 if size == 1 else stride for size, stride in zip(base.shape, base.stride(), strict=True)]
    if strides[-1] != 1 or any(stride % 8 for stride in strides[:-1]) or base.data_ptr() % 16:
        raise ValueError(
            "base must have a last stride of 1, other strides that are multiples of 8 elements, and an address that is one of "
            f"16 bytes: it is read and written in place; got strides {strides} at {base.data_ptr() % 16} past 16 bytes"
        )
    return base.as_strided(base.shape, strides)
