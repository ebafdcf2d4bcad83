"""DeltaLog decode against the float64 token recurrence, without pytest: the same walks run on the cpu and on a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from chunk_kda_cases import nan_filled_memory, relative_error
from torch import Tensor

from kda_tl.ops.deltalog import DeltaLogCache, deltalog_decode_gdn, deltalog_decode_kda, deltalog_decode_rwkv6
from kda_tl.reference import beta_sigmoid, kda_gate, l2norm

K = V = 128
PER_TOKEN = ("q", "k", "v", "g", "r", "w", "beta")
OPS = {"kda": deltalog_decode_kda, "gdn": deltalog_decode_gdn, "rwkv6": deltalog_decode_rwkv6}
GATES = {
    "zero": torch.zeros_like,
    "weak": lambda r: -1e-3 * r,
    "bounded": lambda r: -5.0 * r,
    "minus 60": lambda r: torch.full_like(r, -60.0),
    "masked": lambda r: torch.where(r[..., :1] < 0.2, -1000.0, -0.01 * r),
    "masked keys": lambda r: torch.where(r < 0.2, -1000.0, -0.01 * r),
}


def tokens(
    n: int, T: int, H: int, HV: int, rule: str, gate: str, device: str, seed: int, fused: bool = False
) -> dict[str, Any]:
    """Fresh random inputs of one call: activations in bfloat16 on a device, in float32 on the cpu."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(of)

    unit = (lambda x: x) if fused else (lambda x: torch.nn.functional.normalize(x.float(), dim=-1).to(dtype))
    uniform = torch.rand((n, T, HV, K), generator=generator, device=device)
    x: dict[str, Any] = {"q": unit(normal(n, T, H, K)), "k": unit(normal(n, T, H, K)), "v": normal(n, T, HV, V)}
    x["g"] = normal(n, T, HV, K) if fused else GATES[gate](uniform)
    if rule == "gdn":
        x["g"] = x["g"][..., 0].contiguous()
    if rule == "rwkv6":
        x["g"] = GATES[gate](uniform)
        return {"r": x["q"], "k": x["k"], "v": x["v"], "w": x["g"], "u": normal(H, K, of=torch.float32)}
    x["beta"] = normal(n, T, HV) if fused else torch.rand((n, T, HV), generator=generator, device=device)
    if fused:
        x |= {"A_log": normal(HV, of=torch.float32), "dt_bias": normal(HV, *([K] if rule == "kda" else []), of=torch.float32)}
        x |= dict.fromkeys(
            ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"), True
        )
    return x


def recurrence(rule: str, x: dict[str, Any], state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """o [n, T, HV, V], and the states [n, HV, K, V] before the first and after every token, in float64."""
    n, T, HV, _ = x["v"].shape
    q, k = (x[name].double().repeat_interleave(HV // x["k"].shape[2], 2) for name in ("r" if rule == "rwkv6" else "q", "k"))
    v, g = x["v"].double(), x["w" if rule == "rwkv6" else "g"].double()
    if x.get("use_gate_in_kernel"):
        bias = x["dt_bias"].double().reshape(HV, -1)
        g = kda_gate(g if g.dim() == 4 else g.unsqueeze(-1), x["A_log"].double(), bias, x.get("lower_bound"))
    g = (g if g.dim() == 4 else g.unsqueeze(-1)).expand(n, T, HV, K).unsqueeze(-1)
    if x.get("use_qk_l2norm_in_kernel"):
        q, k = l2norm(q), l2norm(k)
    o, states = torch.zeros_like(v), [state]
    for t in range(T):
        if rule == "rwkv6":
            now = (q[:, t] * x["u"].double().repeat_interleave(HV // x["u"].shape[0], 0) * k[:, t]).sum(-1, keepdim=True) * v[
                :, t
            ]
            o[:, t] = K**-0.5 * ((q[:, t].unsqueeze(-2) @ state).squeeze(-2) + now)
            state = g[:, t].exp() * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        else:
            beta = x["beta"][:, t].double()
            beta = beta_sigmoid(beta, x["allow_neg_eigval"]) if x.get("use_beta_sigmoid_in_kernel") else beta
            state = g[:, t].exp() * state
            u = beta.unsqueeze(-1) * (v[:, t] - (k[:, t].unsqueeze(-2) @ state).squeeze(-2))
            state = state + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
            o[:, t] = K**-0.5 * (q[:, t].unsqueeze(-2) @ state).squeeze(-2)
        states.append(state)
    return o, states


def least_output(rule: str, x: dict[str, Any], states: list[Tensor]) -> float:
    """The smallest norm that errors of o are relative to; states as `recurrence` returns them.

    A narrow base rounds what o = scale S^T q adds up. Where nearly all of that cancels, or only q . k of the token at hand is
    left and close to 0, rounding is measured against half of what random signs would have left.
    """
    T, HV = x["v"].shape[1:3]
    q = x["r" if rule == "rwkv6" else "q"].double().repeat_interleave(HV // x["k"].shape[2], 2)
    q = l2norm(q) if x.get("use_qk_l2norm_in_kernel") else q
    read = states[:T] if rule == "rwkv6" else states[1 : T + 1]
    terms = [(q[:, t].square().unsqueeze(-2) @ state.square()).sum().item() for t, state in enumerate(read)]
    return K**-0.5 * max(0.05 * x["v"].double().norm().item(), 0.5 * sum(terms) ** 0.5)


def call(rule: str, x: dict[str, Any], cache: DeltaLogCache, state_indices: Tensor, **options: Any) -> Tensor:
    with nan_filled_memory(), torch.no_grad():
        return OPS[rule](**x, cache=cache, state_indices=state_indices, **options)


@dataclass
class Walk:
    """A cache and what it should hold, operated side by side. `errors` keeps the largest error of o and of the state."""

    rule: str
    device: str = "cpu"
    state_dtype: torch.dtype = torch.float32
    slots: int = 6
    H: int = 1
    HV: int = 2
    gate: str = "bounded"
    fused: bool = False
    seed: int = 0
    merge_every: int | None = None
    launches: int | None = None
    errors: dict[str, float] = field(default_factory=lambda: {"o": 0.0, "state": 0.0})

    def __post_init__(self) -> None:
        self.cache = DeltaLogCache(
            self.slots, self.HV, K, V, self.rule, state_dtype=self.state_dtype, device=self.device,
            merge_every=self.merge_every, launches=self.launches,
        )  # fmt: skip
        # What no one wrote is NaN, as in memory that was freed and taken again.
        for tensor in (self.cache.log_k, self.cache.log_u, self.cache.log_decay):
            tensor.fill_(torch.nan)
        self.truth = torch.zeros(self.slots, self.HV, K, V, dtype=torch.float64, device=self.device)
        self.history: dict[int, list[Tensor]] = {slot: [] for slot in range(self.slots)}  # states that truncation leads back to
        self.calls = self.seed * 1000

    def limits(self) -> dict[str, float]:
        return limits(self.device, self.state_dtype)

    def indices(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int32, device=self.device)

    def write(self, slots: list[int]) -> None:
        self.calls += 1
        generator = torch.Generator(self.device).manual_seed(self.calls)
        state = torch.randn((len(slots), self.HV, K, V), generator=generator, device=self.device).to(self.state_dtype)
        self.cache.write_state(slots, state)
        self.truth[slots] = state.double()
        self._forget(slots)

    def decode(
        self, slots: list[int], T: int = 1, verify: bool | None = None, valid: list[int] | None = None, **options: Any
    ) -> None:
        """One call; slots out of range, or equal to the null_index option, must give zeros."""
        self.calls += 1
        x = tokens(len(slots), T, self.H, self.HV, self.rule, self.gate, self.device, self.calls, self.fused)
        if valid is not None:
            options["valid"] = torch.tensor(valid, dtype=torch.int32, device=self.device)
        o = call(self.rule, x, self.cache, self.indices(slots), verify=verify, **options)
        live = [i for i, slot in enumerate(slots) if 0 <= slot < self.slots and slot != options.get("null_index")]
        rows = {name: y[live] if name in PER_TOKEN else y for name, y in x.items()}
        used = [slots[i] for i in live]
        o_true, states = recurrence(self.rule, rows, self.truth[used])
        for row, i in enumerate(live):
            kept = T if valid is None else max(0, min(T, valid[i]))
            one = {name: y[[row], :kept] if name in PER_TOKEN else y for name, y in rows.items()}
            least = least_output(self.rule, one, [state[[row]] for state in states])
            self._note("o", o[i, :kept], o_true[row, :kept], least)
            assert not o[i, kept:].any(), "tokens that are not valid must give zeros"
            self.truth[slots[i]] = states[kept][row]
            past = [s[row] for s in states[:kept]]
            # A decode step may fold its token, after which nothing leads back.
            self.history[slots[i]] = (self.history[slots[i]] + past) if verify or T > 1 else []
        for i in set(range(len(slots))) - set(live):
            assert not o[i].any(), "padding must give zeros"

    def truncate(self, slots: list[int], drop: list[int], **options: Any) -> None:
        self.cache.truncate(torch.tensor(drop, device=self.device), self.indices(slots), **options)
        for slot, count in zip(slots, drop):
            if count and 0 <= slot < self.slots:
                self.truth[slot] = self.history[slot][-count]
                del self.history[slot][-count:]

    def droppable(self, slot: int) -> int:
        """Tokens of a slot that are surely still in its log."""
        return min(len(self.history[slot]), int(self.cache.lengths()[slot]))

    def fork(self, source: list[int], target: list[int]) -> None:
        self.cache.fork(source, target)
        self.truth[target] = self.truth[source]
        for target_slot, history in zip(target, [list(self.history[s]) for s in source]):
            self.history[target_slot] = history

    def flush(self, slots: list[int]) -> None:
        self.cache.flush(slots)
        assert not self.cache.lengths(slots).any()
        self._forget(slots)

    def reset(self, slots: list[int]) -> None:
        self.cache.reset(slots)
        self.truth[slots] = 0.0
        self._forget(slots)

    def check(self) -> None:
        """Every slot by itself, so that a large state hides nothing."""
        states = self.cache.read_state()
        for slot in range(self.slots):
            self._note("state", states[slot], self.truth[slot])

    def _forget(self, slots: list[int]) -> None:
        for slot in slots:
            self.history[slot] = []

    def _note(self, what: str, out: Tensor, ref: Tensor, least: float = 0.0) -> None:
        """`least`: the smallest norm of ref that errors are relative to."""
        if out.numel():
            error = relative_error(out, ref) * min(1.0, ref.norm().item() / least if least else 1.0)
            self.errors[what] = max(self.errors[what], error)


def limits(device: str, state_dtype: torch.dtype) -> dict[str, float]:
    """Of ||out - ref|| / ||ref||. Narrow bases are rounded once per fold; bfloat16 outputs once."""
    if state_dtype == torch.float32:
        return {"o": 1e-5, "state": 1e-5} if device == "cpu" else {"o": 4e-3, "state": 1e-4}
    return {"o": 5e-3, "state": 5e-3}


def hold(walk: Walk) -> None:
    walk.check()
    for what, limit in walk.limits().items():
        assert walk.errors[what] < limit, f"error of {what} {walk.errors[what]:.1e} is over {limit:.0e}: {walk}"
