"""chunk_wy alone on the cpu target, slot by slot against what the definitions say in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_inputs import PACK, PROBLEMS, RULE_PROBLEMS, C, K, Problem, true_workspace
from torch import Tensor

from kda_tl.ops.prefill_kernels import GateOptions, Workspace, launch_chunk_wy
from kda_tl.reference import beta_sigmoid, kda_gate, l2norm
from kda_tl.specs.gates import BetaForm, GateForm
from kda_tl.specs.rules import RULES
from kda_tl.specs.schedules import ChunkWySchedule

LIMIT = 2e-6
LIMIT_OF_GATES = 6e-6  # raw gates: an exponent of a few units adds its own rounding


@pytest.fixture(scope="module")
def run(kernel_of: Callable[..., Any]) -> Callable[..., Workspace]:
    """run(problem, inputs): the workspace, which was full of NaN."""

    def launch(
        problem: Problem, x: dict[str, Tensor], options: GateOptions | None = None, parts: int | None = None
    ) -> Workspace:
        kernel = kernel_of(problem.wy_spec, None if parts is None else ChunkWySchedule(parts=parts))
        workspace = problem.workspace()
        options = options or GateOptions(bonus=x["bonus"].flatten() if "bonus" in x else None)
        launch_chunk_wy(kernel, x["q"], x["k"], x.get("g"), x.get("beta"), options, problem.cu_seqlens, workspace)
        return workspace

    return launch


def tensors(workspace: Workspace) -> dict[str, Tensor]:
    return workspace._asdict()


def check(problem: Problem, x: dict[str, Tensor], workspace: Workspace, limit: float = LIMIT) -> None:
    truth, chunks = true_workspace(problem, x)
    used = [chunk.slot for chunk in chunks]
    assert len(set(used)) == len(used)
    for name, found in tensors(workspace).items():
        if name not in truth:
            assert found.numel() == 0
            continue
        for index, slot in enumerate(used):
            for head in range(problem.HV):
                wanted = truth[name][index, head]
                difference = (found[slot, head].double() - wanted).norm()
                # Products of two unit rows may cancel: theirs is an absolute limit too.
                norm = wanted.norm().clamp(min=1.0 if name == "P" else 1e-30)
                # A small decay is e to a large exponent, whose rounding it inherits.
                allowed = limit * (1 + 0.03 * norm.log().abs()) * norm
                assert difference <= allowed, (name, slot, head, float(difference / norm))
        untouched = sorted(set(range(problem.slots)) - set(used))
        assert found[untouched].isnan().all(), name
    for chunk in chunks:
        # Exact zeros: above the diagonal no later row may leak in, and past the end chunk_scan multiplies whatever is there.
        length = chunk.tokens[1].stop - chunk.tokens[1].start
        for name, found in tensors(workspace).items():
            if name in ("A_inv", "P") and name in truth:
                assert not found[chunk.slot].triu(1).any(), name
            if name != "chunk_decay" and name in truth:
                assert not found[chunk.slot, :, length:].any(), name


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_workspace_against_the_definitions(run, problem: Problem) -> None:
    x = problem.inputs()
    check(problem, x, run(problem, x))


@pytest.mark.parametrize("problem", RULE_PROBLEMS, ids=lambda problem: problem.name)
def test_every_rule(run, problem: Problem) -> None:
    x = problem.inputs()
    check(problem, x, run(problem, x))


@pytest.mark.parametrize("rule", ["kda", "rwkv6"])
@pytest.mark.parametrize("parts", [2, 8])
def test_the_rows_in_any_number_of_parts(run, parts: int, rule: str) -> None:
    for problem in (Problem(T=100, gate="strong", rule=RULES[rule]), Problem(T=64, gate="masked", rule=RULES[rule])):
        x = problem.inputs()
        check(problem, x, run(problem, x, parts=parts))


# -- what is fused into it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["per_key", "scalar"])
@pytest.mark.parametrize("form", [GateForm.SOFTPLUS, GateForm.BOUNDED, GateForm.BOUNDED_UNSCALED])
def test_gate_forms(run, form: GateForm, decay: str) -> None:
    problem = Problem(lengths=(70, 3), tail=4, H=1, HV=3, rule=RULES["kda" if decay == "per_key" else "gdn"])
    x = problem.inputs()
    random = torch.Generator().manual_seed(1)
    raw = 2.0 * torch.randn(x["g"].shape, generator=random)
    size = K if decay == "per_key" else 1
    A_log, dt_bias = torch.randn(3, generator=random), torch.randn(3, size, generator=random)
    lower_bound = None if form == GateForm.SOFTPLUS else -3.0
    # Only what the form reads holds numbers.
    given = A_log if form != GateForm.BOUNDED_UNSCALED else torch.full_like(A_log, torch.nan)
    options = GateOptions(form, given, dt_bias.flatten(), torch.nan if lower_bound is None else lower_bound)
    workspace = run(problem, {**x, "g": raw}, options)
    x["g"] = kda_gate(
        raw.double().reshape(1, -1, 3, size), None if form == GateForm.BOUNDED_UNSCALED else A_log, dt_bias, lower_bound
    ).reshape(raw.shape)
    check(problem, x, workspace, LIMIT_OF_GATES)


@pytest.mark.parametrize("form", [BetaForm.SIGMOID, BetaForm.TWICE_SIGMOID])
def test_beta_forms(run, form: BetaForm) -> None:
    problem = Problem(B=2, T=70, HV=2)
    x = problem.inputs()
    logits = 3.0 * torch.randn(x["beta"].shape)
    workspace = run(problem, {**x, "beta": logits}, GateOptions(beta_form=form))
    check(problem, {**x, "beta": beta_sigmoid(logits.double(), form == BetaForm.TWICE_SIGMOID)}, workspace)


@pytest.mark.parametrize("rule", ["kda", "rwkv6"])
def test_l2_norms(run, rule: str) -> None:
    problem = Problem(lengths=(70, 1), tail=4, H=2, HV=4, rule=RULES[rule])
    x = problem.inputs()
    raw = {name: x[name] * torch.rand(x[name].shape[:-1]).mul(5.0).exp().unsqueeze(-1) for name in ("q", "k")}
    raw["k"][:, 5] = 0.0
    raw["q"][:, 6] *= 1e-6
    workspace = run(problem, {**x, **raw}, GateOptions(normalize=True, bonus=x["bonus"].flatten() if "bonus" in x else None))
    check(problem, {**x, **{name: l2norm(tensor.double()) for name, tensor in raw.items()}}, workspace)


# -- how it reads and what it must not see -------------------------------------------------------------------------------


def test_strides_are_honoured(run) -> None:
    problem = Problem(B=2, T=70, H=2, HV=4, gate="strong")
    x = problem.inputs()
    strided = {}
    for name, tensor in x.items():
        buffer = torch.full((*(size + 3 for size in tensor.shape[:3]), *tensor.shape[3:]), torch.nan)
        strided[name] = buffer[tuple(slice(1, 1 + size) for size in tensor.shape[:3])]
        strided[name].copy_(tensor)
    strided["beta"] = x["beta"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    found, plain = tensors(run(problem, strided)), tensors(run(problem, x))
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("row", [0, 15, 16, 32, 47, 63])
def test_a_mask_at_a_block_boundary(run, row: int) -> None:
    problem = Problem(T=64)
    x = problem.inputs()
    x["g"][:, row] = -1000.0
    workspace = run(problem, x)
    check(problem, x, workspace)
    P = workspace.P
    assert row == 0 or not P[0, 0, row:, :row].any()
    assert P[0, 0, row, row] != 0


def test_a_decay_that_clears(run) -> None:
    """-inf is a mask as -1000 is, and leaves no NaN."""
    problem = Problem(T=100, HV=2)
    x = problem.inputs()
    x["g"][:, 20, 0] = -torch.inf
    x["g"][:, 64, 1, ::2] = -torch.inf
    masked = {**x, "g": x["g"].clamp(min=-1000.0)}
    workspace = run(problem, x)
    check(problem, masked, workspace)


def test_rows_do_not_depend_on_the_future(run) -> None:
    problem = Problem(T=64, gate="strong")
    x = problem.inputs()
    x["g"] *= 0.05  # else nothing is left of the last rows
    before = run(problem, x)
    for t in (1, 16, 22, 33, 63):
        changed = {name: tensor.clone() for name, tensor in x.items()}
        for name in ("q", "k", "g", "beta"):
            changed[name][:, t:] *= 1.5
        after = run(problem, changed)
        for name in ("q_decayed", "k_decayed", "A_inv", "P"):
            a, b = getattr(before, name)[0, 0], getattr(after, name)[0, 0]
            assert torch.equal(a[:t], b[:t]), (t, name)
            assert not torch.equal(a[t:], b[t:]), (t, name)


def test_nan_stays_in_its_chunk_and_head(run) -> None:
    problem = Problem(lengths=PACK, H=2, HV=4)
    x = problem.inputs()
    before = tensors(run(problem, x))
    token, head = sum(PACK[:5]) + 7, 1  # in the 65 token sequence
    x["g"][0, token, head] = torch.nan
    x["beta"][0, token, head] = torch.inf
    after = tensors(run(problem, x))
    spoilt = torch.zeros(problem.slots, problem.HV, dtype=torch.bool)
    spoilt[problem.slot(5, 0), head] = True
    for name, a in before.items():
        b = after[name]
        assert torch.equal(a[~spoilt].nan_to_num(7.0), b[~spoilt].nan_to_num(7.0)), name
        assert not b[spoilt].isfinite().all(), name


def test_a_short_chunk_fills_its_slot(run) -> None:
    problem = Problem(T=C + 1, gate="minus 60")
    workspace = run(problem, problem.inputs())
    assert all(tensor[1].isfinite().all() for tensor in tensors(workspace).values())
