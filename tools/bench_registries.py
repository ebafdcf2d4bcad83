"""Two registries beside each other on one device: is a rebuilt one anywhere slower?

    python tools/bench_registries.py BEFORE AFTER [--within 1.02] [--only prefill] [--out FILE]

BEFORE and AFTER are registries as `kda-tl build --registry` or `kda-tl autotune --apply` leave them; a kernel that one of them
lacks ends the run, since it would come from elsewhere on the search path. Each has a process of its own, and for every case the
two take turns: both check the call against the float64 recurrence, as its own benchmark does, and capture it in a CUDA graph;
then rounds of replays alternate, so that drift hits both alike. Prints medians over rounds and their ratio. A case that is over
--within is timed once more, by two new processes, since equal programs differ by 2 % now and then, where their tensors lie
differently; what is over it twice is named at the end.

Exits 1 where a case is slower, 2 where not all of them could be timed; --out has the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu"), str(ROOT / "tools")]

KINDS = ("prefill", "decode", "deltalog")
ROUNDS, REPLAYS = 7, 12
PATIENCE = 300  # seconds: an answer takes a few, of which the float64 recurrence is the most


def cases(only: list[str]) -> Iterator[tuple[str, ...]]:
    """Kind first, then what `prepared` needs, all as texts: they travel to processes and into the table."""
    from bench_prefill import CASES

    if "prefill" in only:
        yield from (("prefill", str(n)) for n, case in enumerate(CASES) if case[4] != "strong")
    if "decode" in only:
        yield from (("decode", rule, state, batch) for rule in ("kda", "gdn") for state in ("fp32", "bf16")
                    for batch in ("1", "8", "64", "256", "512"))  # fmt: skip
    if "deltalog" in only:
        yield from (("deltalog", rule, base, batch) for rule in ("kda", "gdn", "rwkv6") for base in ("fp32", "bf16", "fp16")
                    for batch in ("64", "512"))  # fmt: skip


def title(case: tuple[str, ...]) -> str:
    if case[0] != "prefill":
        return " ".join(case)
    from bench_prefill import CASES

    rule, lengths, H, HV, gate = CASES[int(case[1])]
    shape = f"{lengths[0]} x {len(lengths)}" if len(set(lengths)) == 1 else f"{len(lengths)} of {min(lengths)}-{max(lengths)}"
    return f"prefill {rule} {shape} H {H} HV {HV} {gate}"


def prepared(case: tuple[str, ...]) -> tuple[Callable[[], None], int]:
    """Checks the case, and replays its graph; and how many calls one replay holds."""
    from dataclasses import replace

    import bench_decode
    import bench_deltalog
    import bench_prefill
    import torch
    from timing import captured

    torch.manual_seed(0)
    if case[0] == "prefill":
        rule, lengths, H, HV, gate = bench_prefill.CASES[int(case[1])]
        x, flags = bench_prefill.make_inputs(rule, lengths, H, HV, gate)
        error = bench_prefill.error_of_two_heads(rule, x, flags, *bench_prefill.OPS[rule](**x, **flags))
        if not error < bench_prefill.TOLERANCE:
            raise SystemExit(f"{title(case)}: error {error:.1e} is over {bench_prefill.TOLERANCE}: not timed")
        return captured(lambda: bench_prefill.OPS[rule](**x, **flags)), 1
    if case[0] == "decode":
        made = replace(bench_decode.RULES[case[1]], state_dtype=bench_decode.STATES[case[2]])
        bench_decode.check(made)
        return bench_decode.captured_steps(replace(made, N=int(case[3])))
    base = bench_deltalog.BASES[case[2]]
    bench_deltalog.check(case[1], base, 8, None, 1)
    replay, every = bench_deltalog.captured_cycle(case[1], base, int(case[3]), None, 1)
    return replay, every * bench_deltalog.LAYERS


def serve(pipe: Connection, registry: str) -> None:
    """A process of one registry: prepares the case that is sent, and times rounds of it for every None until the next."""
    os.environ["KDA_TL_REGISTRY"] = registry
    import torch
    from timing import time_ms

    from kda_tl.runtime.loader import loaded_from
    from kda_tl.tuning.measure_child import die_with_parent

    die_with_parent()

    replay: Callable[[], None] = lambda: None  # noqa: E731
    calls = 1
    with torch.no_grad():
        while True:
            try:
                message = pipe.recv()
            except (EOFError, ConnectionError):
                return
            if message is None:
                pipe.send(time_ms(replay, REPLAYS) / calls)
                continue
            del replay
            torch.cuda.empty_cache()
            replay, calls = prepared(message)
            torch.cuda.synchronize()
            if foreign := [path for path in loaded_from() if not path.is_relative_to(registry)]:
                raise SystemExit(f"{title(message)}: {registry} lacks a kernel, {foreign[0]} ran: not timed")
            pipe.send("ready")


class Side:
    """A registry and its process, which ends with this one."""

    def __init__(self, registry: Path) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would not survive CUDA
        self.registry = registry
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(registry.resolve())), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, message: tuple[str, ...] | None) -> None:
        with suppress(ConnectionError):  # `receive` says how it ended
            self.pipe.send(message)

    def receive(self) -> Any:
        """The answer. Ends the run where none comes."""
        try:
            if self.pipe.poll(PATIENCE):
                return self.pipe.recv()
            how = f"gave no answer for {PATIENCE} seconds"
        except (EOFError, ConnectionError):
            self.process.join()
            how = f"ended with status {self.process.exitcode}"
        print(f"the process of {self.registry} {how}; what it printed, if anything, says why", file=sys.stderr)
        raise SystemExit(2)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def timed(sides: list[Side], case: tuple[str, ...]) -> list[float]:
    """Milliseconds of each: medians over rounds in which they take turns."""
    for side in sides:
        side.send(case)
    for side in sides:
        side.receive()
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(ROUNDS):
        for n in (0, 1) if turn % 2 == 0 else (1, 0):
            sides[n].send(None)
            times[n].append(sides[n].receive())
    return [median(one) for one in times]


def ratio(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--within", type=ratio, default=1.02, help="the largest ratio of after to before that passes")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    registries = [options.before, options.after]
    for registry in registries:
        if not (registry / "manifest").is_dir():
            parser.error(f"{registry} is no registry: kda-tl build --arch ARCH --registry {registry}")
        if os.pathsep in str(registry.resolve()):
            parser.error(f"{registry.resolve()} must have no {os.pathsep!r} in its path, which separates registries")
    if options.out is not None:
        try:
            with options.out.open("a"):  # what it holds stays until the first case is timed
                pass
        except OSError as error:
            parser.error(f"--out {options.out} cannot be written: {error.strerror}")
    from timing import need_gpu

    need_gpu(2)
    sides = [Side(registry) for registry in registries]
    print(f"{'milliseconds a call':46s}   before     after  after/before", flush=True)
    rows: list[dict[str, Any]] = []
    for case in cases(options.only):
        before, after = timed(sides, case)
        if after > options.within * before:
            for side in sides:
                side.end()
            sides = [Side(registry) for registry in registries]
            before, after = timed(sides, case)
        rows.append({"case": title(case), "before_ms": before, "after_ms": after})
        print(f"{title(case):46s} {before:8.4f}  {after:8.4f}  {after / before:12.3f}", flush=True)
        if options.out is not None:  # after every row: a run that is cut short leaves what it has
            options.out.write_text(json.dumps(rows, indent=1))
    slower = [row["case"] for row in rows if row["after_ms"] > options.within * row["before_ms"]]
    print(f"{len(rows)} cases, {len(slower)} slower by more than {options.within:g}" + "".join(f"\n  {one}" for one in slower))
    raise SystemExit(1 if slower else 0)


if __name__ == "__main__":
    main()
