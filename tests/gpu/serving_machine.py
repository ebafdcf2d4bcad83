"""What happens to the slots of a serving engine: prefill into them, dense decode, and all that a DeltaLogCache can do, mixed.

The bases of the cache are the pool. A slot that is flushed is all base, so ops that know nothing of logs may go on with it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from chunk_kda_cases import nan_filled_memory
from deltalog_cases import PER_TOKEN, V, Walk, least_output, recurrence, tokens
from deltalog_machine import make_machine, padded_slots
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch import Tensor

import kda_tl

PREFILL = {"kda": kda_tl.chunk_kda, "gdn": kda_tl.chunk_gdn, "rwkv6": kda_tl.chunk_rwkv6}
DENSE = {"kda": kda_tl.recurrent_kda, "gdn": kda_tl.recurrent_gdn, "rwkv6": kda_tl.recurrent_rwkv6}
WAYS = ("in the pool", "by write_state", "pack in the pool", "pack by write_state")


class ServingWalk(Walk):
    def limits(self) -> dict[str, float]:
        """Of a walk, but chunk ops with narrow activations are held to less than an append is."""
        found = super().limits()
        return found if self.device == "cpu" else {what: max(limit, 4e-3) for what, limit in found.items()}

    def prefill(self, slots: list[int], lengths: list[int], fresh: list[bool], way: str) -> None:
        """Chunk ops over whole prompts: in place, or through states of their own. Slots out of range are padding."""
        dense = "pack" not in way
        if dense:
            lengths = [lengths[0]] * len(slots)
        self.calls += 1
        x = tokens(1, sum(lengths), self.H, self.HV, self.rule, self.gate, self.device, self.calls)
        spans = list(itertools.pairwise([0, *itertools.accumulate(lengths)]))
        if dense:
            given = {n: y.reshape(len(slots), -1, *y.shape[2:]) if n in PER_TOKEN else y for n, y in x.items()}
        else:
            given = {**x, "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], device=self.device)}
        used = [slot for slot in slots if self.held(slot)]
        has = torch.tensor([not start for start in fresh], device=self.device)
        self.cache.flush(used)
        with nan_filled_memory(), torch.no_grad():
            if "in the pool" in way:
                o, _ = PREFILL[self.rule](
                    **given, initial_state=self.cache.base, state_indices=self.indices(slots), has_initial_state=has,
                    state_v_first=True,
                )  # fmt: skip
            else:
                # A slot that is out of range has no state to read; the sequence starts from anything and is not stored.
                states = torch.stack([self.cache.read_state([s if self.held(s) else 0])[0] for s in slots])
                o, final = PREFILL[self.rule](**given, initial_state=states, has_initial_state=has, output_final_state=True)
                stored = [row for row, slot in enumerate(slots) if self.held(slot)]
                self.cache.write_state(used, final[stored])
        flat = o.reshape(sum(lengths), self.HV, V)
        for slot, start, (first, last) in zip(slots, fresh, spans):
            row = {n: y[:, first:last] if n in PER_TOKEN else y for n, y in x.items()}
            self._follow(slot, row, flat[None, first:last], start, "in the pool" in way)

    def dense(self, slots: list[int], T: int, fresh: list[bool]) -> None:
        """Recurrent ops on the pool, in place."""
        self.calls += 1
        x = tokens(len(slots), T, self.H, self.HV, self.rule, self.gate, self.device, self.calls)
        given = {**x}
        if self.rule == "rwkv6":
            given["u"] = x["u"]
        self.cache.flush([slot for slot in slots if self.held(slot)])
        with nan_filled_memory(), torch.no_grad():
            o, _ = DENSE[self.rule](
                **given, initial_state=self.cache.base, state_indices=self.indices(slots), state_v_first=True, inplace=True,
                has_initial_state=torch.tensor([not start for start in fresh], device=self.device),
            )  # fmt: skip
        for i, (slot, start) in enumerate(zip(slots, fresh)):
            row = {n: y[i : i + 1] if n in PER_TOKEN else y for n, y in x.items()}
            self._follow(slot, row, o[i : i + 1], start, True)

    def held(self, slot: int) -> bool:
        return 0 <= slot < self.slots

    def _follow(self, slot: int, x: dict[str, Any], o: Tensor, start: bool, padding: bool) -> None:
        """The truth of one request, x [1, T, ...], in `slot`. padding: a slot that is out of range gives zeros."""
        if not self.held(slot):
            assert not padding or not o.any(), "padding must give zeros"
            return
        before = torch.zeros_like(self.truth[[slot]]) if start else self.truth[[slot]]
        o_true, states = recurrence(self.rule, x, before)
        self._note("o", o, o_true, least_output(self.rule, x, states))
        self.truth[slot] = states[-1][0]
        self._forget([slot])


def make_serving_machine(
    name: str, state_dtype: torch.dtype, launches: int = 1, device: str = "cpu"
) -> type[RuleBasedStateMachine]:
    deltalog: Any = make_machine(name, state_dtype, device, launches, ServingWalk)

    class Machine(deltalog):
        @rule(chosen=padded_slots, way=st.sampled_from(WAYS), data=st.data())
        def prefill(self, chosen: list[int], way: str, data: st.DataObject) -> None:
            one = st.sampled_from([0, 1, 5, 63, 64, 65, 130]) | st.integers(0, 70)
            lengths = data.draw(st.lists(one, min_size=len(chosen), max_size=len(chosen)), label="lengths")
            self.walk.prefill(chosen, lengths, self._fresh(chosen, data), way)

        @rule(chosen=padded_slots, T=st.integers(0, 3), data=st.data())
        def dense(self, chosen: list[int], T: int, data: st.DataObject) -> None:
            self.walk.dense(chosen, T, self._fresh(chosen, data))

        def _fresh(self, chosen: list[int], data: st.DataObject) -> list[bool]:
            """Which requests start from nothing, whatever their slot holds."""
            return data.draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)), label="fresh")

    return Machine
