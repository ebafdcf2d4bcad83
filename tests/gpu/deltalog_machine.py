"""Random sequences of everything that can happen to a cache, on any device, held to the float64 recurrence after each step."""

from __future__ import annotations

import hypothesis
import torch
from deltalog_cases import GATES, Walk, hold
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

SLOTS = 4
slots = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)
padded_slots = st.lists(st.integers(-1, SLOTS), min_size=1, max_size=SLOTS, unique=True)


def run_machine(name: str, state_dtype: torch.dtype, device: str, examples: int, seed: int, launches: int = 1) -> None:
    """Raises AssertionError with the shortest sequence that leaves the recurrence. The same seed runs the same sequences."""
    run(make_machine(name, state_dtype, device, launches), examples, seed)


def make_machine(
    name: str, state_dtype: torch.dtype, device: str, launches: int = 1, walk: type[Walk] = Walk
) -> type[RuleBasedStateMachine]:
    """walk: what holds the cache and its truth, and makes a subclass of the machine know more operations."""

    class Machine(RuleBasedStateMachine):
        @initialize(merge_every=st.integers(1, 16), gate=st.sampled_from(sorted(GATES)), data_seed=st.integers(0, 10**6))
        def begin(self, merge_every: int, gate: str, data_seed: int) -> None:
            self.walk = walk(
                name,
                device,
                state_dtype,
                slots=SLOTS,
                HV=2,
                gate=gate,
                merge_every=merge_every,
                launches=launches,
                seed=data_seed,
            )
            self.walk.write(list(range(SLOTS)))
            self.snapshots: list[tuple] = []

        @rule(chosen=padded_slots)
        def decode(self, chosen: list[int]) -> None:
            self.walk.decode(chosen)

        @rule(chosen=padded_slots, T=st.integers(1, 16), data=st.data())
        def verify(self, chosen: list[int], T: int, data: st.DataObject) -> None:
            valid = data.draw(
                st.none() | st.lists(st.integers(0, T), min_size=len(chosen), max_size=len(chosen)), label="valid"
            )
            self.walk.decode(chosen, T=T, verify=True, valid=valid)

        @rule(chosen=padded_slots, data=st.data())
        def truncate(self, chosen: list[int], data: st.DataObject) -> None:
            bound = [self.walk.droppable(slot) if 0 <= slot < SLOTS else 99 for slot in chosen]
            self.walk.truncate(chosen, [data.draw(st.integers(0, most), label="drop") for most in bound])

        @rule(source=st.lists(st.integers(0, SLOTS - 1), min_size=SLOTS, max_size=SLOTS), into=slots)
        def fork(self, source: list[int], into: list[int]) -> None:
            self.walk.fork(source[: len(into)], into)

        @rule(chosen=slots)
        def flush(self, chosen: list[int]) -> None:
            self.walk.flush(chosen)

        @rule(chosen=slots)
        def reset(self, chosen: list[int]) -> None:
            self.walk.reset(chosen)

        @rule(chosen=slots)
        def write(self, chosen: list[int]) -> None:
            self.walk.write(chosen)

        @rule(chosen=slots)
        def snapshot(self, chosen: list[int]) -> None:
            self.snapshots.append((self.walk.cache.snapshot(chosen), chosen, self.walk.truth[chosen].clone()))

        @rule()
        def restore(self) -> None:
            if self.snapshots:
                saved, chosen, truth = self.snapshots.pop()
                self.walk.cache.restore(saved)
                self.walk.truth[chosen] = truth
                for slot in chosen:
                    self.walk.history[slot] = []

        @invariant()
        def held(self) -> None:
            if hasattr(self, "walk"):
                hold(self.walk)

    return Machine


def run(machine: type[RuleBasedStateMachine], examples: int, seed: int, steps: int = 15) -> None:
    print(f"seed {seed}")
    hypothesis.seed(seed)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
