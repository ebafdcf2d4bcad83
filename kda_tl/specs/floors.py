"""What a problem costs at least: bytes, flops and exponentials of a kernel, of a plan of kernels, and of an op; and the time
that a device needs for them.

Bytes are what has to cross the memory once: tensors that a plan hands from kernel to kernel count with both kernels, and are
no part of an op's own floor. Indices, offsets and cursors are left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kda_tl.specs.archs import arch as arch_row
from kda_tl.specs.decode import RecurrentDecodeSpec
from kda_tl.specs.deltalog import DeltaLogDecodeSchedule, DeltaLogDecodeSpec
from kda_tl.specs.intracard import IntracardMergeSpec, IntracardPreScanSpec
from kda_tl.specs.kernels import ChunkScanSpec, ChunkWySpec, KernelSpec
from kda_tl.specs.rules import Rule
from kda_tl.specs.schedules import Schedule

__all__ = ["Cost", "Problem", "cost", "decode_cost", "floor_ms", "prefill_cost", "prefill_plan_cost"]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GATE_EXPONENTIALS = {False: 1, True: 4}
"""Per decay: e^g; with the gate in the kernel also two of its own and a logarithm."""


@dataclass(frozen=True)
class Problem:
    """The run-time sizes of a call. A dense batch: `sequences` of `tokens` each (decode: requests, of one token or a few).

    Attributes:
        segments: into how many every sequence is cut; 1 for none.
        V: columns of the values where the spec does not say (recurrent_decode).
    """

    sequences: int = 1
    tokens: int = 1
    H: int = 1
    HV: int = 1
    segments: int = 1
    V: int = 128

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def chunks(self, chunk_size: int) -> int:
        """Of all sequences."""
        return self.sequences * -(-self.tokens // chunk_size)


@dataclass(frozen=True)
class Cost:
    """Bytes read and written; flops on tensor cores; flops beside them, in float32; exponentials and logarithms."""

    bytes: float
    tensor_flops: float = 0.0
    float32_flops: float = 0.0
    exponentials: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.bytes + other.bytes,
            self.tensor_flops + other.tensor_flops,
            self.float32_flops + other.float32_flops,
            self.exponentials + other.exponentials,
        )


def floor_ms(cost: Cost, arch: str, bytes_per_s: float | None = None) -> float | None:
    """Milliseconds below which the usual device of `arch` cannot be: its busiest part, all the time. None where the arch table
    has no rates.

    bytes_per_s: in place of the table's, e.g. what a copy moved in the same run.
    """
    rates = arch_row(arch).rates
    if rates is None:
        return None
    return 1e3 * max(
        cost.bytes / (bytes_per_s or rates.bytes),
        cost.tensor_flops / rates.tensor_flops,
        cost.float32_flops / rates.float32_flops,
        cost.exponentials / rates.exponentials,
    )


def cost(spec: KernelSpec, problem: Problem, schedule: Schedule | None = None) -> Cost:
    """Of one launch of a kernel. schedule: for deltalog_decode, whose traffic depends on how often a log is folded.

    Raises:
        NotImplementedError: the kernel has no such count.
    """
    if isinstance(spec, ChunkWySpec):
        return _chunk_wy(spec, problem)
    if isinstance(spec, ChunkScanSpec):
        return _chunk_scan(spec, problem)
    if isinstance(spec, IntracardPreScanSpec):
        return _pre_scan(spec, problem)
    if isinstance(spec, IntracardMergeSpec):
        return _merge(spec, problem)
    if isinstance(spec, RecurrentDecodeSpec):
        return decode_cost(Rule(), spec, problem)
    if isinstance(spec, DeltaLogDecodeSpec) and not spec.prepared:
        return _deltalog(spec, problem, schedule)
    raise NotImplementedError(f"no floor for {spec.key}")


def _products(spec: KernelSpec, flops: float) -> dict[str, float]:
    """Products of narrow operands run on tensor cores, of float32 ones beside them."""
    return {"tensor_flops" if spec.operand_dtype == "float16" else "float32_flops": flops}


def _workspace(spec: ChunkScanSpec | ChunkWySpec | IntracardPreScanSpec, problem: Problem, rows: int, blocks: int) -> float:
    """Bytes of `rows` tiles [C, K] and `blocks` tiles [C, C] per chunk and value head, and its decay [K]."""
    C, K = spec.chunk_size, spec.head_dim_k
    width = BYTES[spec.operand_dtype]
    return problem.chunks(C) * problem.HV * (rows * C * K * width + blocks * C * C * width + 4 * K)


def _chunk_wy(spec: ChunkWySpec, problem: Problem) -> Cost:
    C, K = spec.chunk_size, spec.head_dim_k
    tokens, HV, gate = problem.sequences * problem.tokens, problem.HV, BYTES[spec.gate_dtype]
    decays = {"per_key": HV * K, "scalar": HV, "none": 0}[spec.decay]
    inputs = tokens * (2 * problem.H * K * BYTES[spec.dtype] + (decays + (HV if spec.delta else 0)) * gate)
    stored = _workspace(spec, problem, 3 if spec.delta else 2, 2 if spec.delta else 1)
    # Lower halves of q k^T and, with the delta correction, k k^T and the inverse.
    flops = problem.chunks(C) * HV * (C * C * K * (2 if spec.delta else 1) + (C**3 / 3 if spec.delta else 0))
    return Cost(inputs + stored, **_products(spec, flops), exponentials=tokens * decays * GATE_EXPONENTIALS[True])


def _states(problem: Problem, K: int, V: int, width: int) -> float:
    """Bytes of initial and final states."""
    return 2 * problem.sequences * problem.HV * K * V * width


def _chunk_scan(spec: ChunkScanSpec, problem: Problem) -> Cost:
    C, K, V = spec.chunk_size, spec.head_dim_k, spec.head_dim_v
    values = 2 * problem.sequences * problem.tokens * problem.HV * V * BYTES[spec.dtype]
    states = _states(problem, K, V, BYTES[spec.state_dtype])
    states += (problem.segments - 1) * problem.sequences * problem.HV * K * V * 4
    read = _workspace(spec, problem, 3 if spec.delta else 2, 2 if spec.delta else 1)
    flops = C * V * (2 * K * (3 if spec.delta else 2) + C * (2 if spec.delta else 1))
    return Cost(values + states + read, **_products(spec, problem.chunks(C) * problem.HV * flops))


def _pre_scan(spec: IntracardPreScanSpec, problem: Problem) -> Cost:
    """Of all segments but the last of every sequence."""
    C, K, V = spec.chunk_size, spec.head_dim_k, spec.head_dim_v
    part = (problem.segments - 1) / problem.segments
    values = problem.sequences * problem.tokens * problem.HV * V * BYTES[spec.dtype]
    read = _workspace(spec, problem, 2 if spec.delta else 1, 1 if spec.delta else 0)
    maps = (problem.segments - 1) * problem.sequences * problem.HV * 4 * (K * (K if spec.delta else 1) + K * V)
    flops = C * (K + V) * (4 * K + C) if spec.delta else 2 * C * K * V
    return Cost(part * (values + read) + maps, **_products(spec, part * problem.chunks(C) * problem.HV * flops))


def _merge(spec: IntracardMergeSpec, problem: Problem) -> Cost:
    K, V = spec.head_dim_k, spec.head_dim_v
    rows = K if spec.delta else 1
    scans = problem.sequences * problem.HV
    moved = (problem.segments - 1) * 4 * (K * rows + K * V) + problem.segments * 4 * K * V + K * V * BYTES[spec.dtype]
    return Cost(scans * moved, float32_flops=scans * (problem.segments - 1) * 2 * K * V * rows)


def decode_cost(rule: Rule, spec: RecurrentDecodeSpec, problem: Problem, gate_dtype: str | None = None) -> Cost:
    """One launch of recurrent_decode for a rule; gate_dtype: of g and beta, the activations' by default."""
    K, V, tokens = spec.head_dim_k, problem.V, problem.sequences * problem.tokens
    width, gate = BYTES[spec.dtype], BYTES[gate_dtype or spec.dtype]
    decays = {"per_key": problem.HV * K, "scalar": problem.HV, "none": 0}[rule.decay]
    inputs = (2 * problem.H * K + 2 * problem.HV * V) * width + (decays + (problem.HV if rule.delta else 0)) * gate
    return Cost(
        _states(problem, K, V, BYTES[spec.state_dtype]) + tokens * inputs,
        float32_flops=tokens * problem.HV * 8 * K * V,
        exponentials=tokens * decays * GATE_EXPONENTIALS[True],
    )


def _deltalog(spec: DeltaLogDecodeSpec, problem: Problem, schedule: Schedule | None) -> Cost:
    """One step of a steady state, in which one slot of `merge_every` folds."""
    K, V, D = spec.head_dim_k, spec.head_dim_v, spec.decay_size
    every = schedule.merge_every if isinstance(schedule, DeltaLogDecodeSchedule) else DeltaLogDecodeSchedule().merge_every
    width = BYTES[spec.dtype]
    entry = K * width + 4 * V + 4 * D
    base = K * V * BYTES[spec.state_dtype] * (1 + 1 / every)
    if spec.state_dtype == "bfloat16":
        base += K * V / every  # 4 more bits per element, which a fold reads and writes
    log = entry * (every - 1) / 2 + entry * (every - 1) / every
    inputs = width * (2 * K * problem.H / problem.HV + 2 * V + D)
    slots = problem.sequences * problem.HV
    return Cost(
        slots * (base + log + inputs), float32_flops=slots * 4 * K * V, exponentials=slots * D * GATE_EXPONENTIALS[True]
    )


def prefill_plan_cost(wy: ChunkWySpec, scan: ChunkScanSpec, problem: Problem) -> Cost:
    """All kernels of a prefill call: chunk_wy, where sequences are cut the maps and their merge, and the scan."""
    total = cost(wy, problem) + cost(scan, problem)
    if problem.segments > 1:
        sizes = (scan.head_dim_k, scan.head_dim_v, scan.chunk_size)
        total += cost(IntracardPreScanSpec(*sizes, scan.dtype, scan.delta), problem)
        total += cost(IntracardMergeSpec(*sizes, "float32", scan.delta), problem)
    return total


def prefill_cost(wy: ChunkWySpec, scan: ChunkScanSpec, problem: Problem) -> Cost:
    """A prefill op, whatever its plan: inputs read once, outputs and states written once; products and exponentials of the
    chunk form."""
    whole = prefill_plan_cost(wy, scan, Problem(problem.sequences, problem.tokens, problem.H, problem.HV))
    between = _workspace(wy, problem, 3 if wy.delta else 2, 2 if wy.delta else 1)
    return Cost(whole.bytes - 2 * between, whole.tensor_flops, whole.float32_flops, whole.exponentials)
