from __future__ import annotations

import json

import pytest
import torch

import kda_tl
from kda_tl.ops.explain import PLANNERS
from kda_tl.registry import Registry


@pytest.fixture(autouse=True)
def no_device(roots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def tensors(B: int, T: int, H: int, HV: int) -> list[torch.Tensor]:
    shapes = [(B, T, H, 128), (B, T, H, 128), (B, T, HV, 128), (B, T, HV, 128), (B, T, HV)]
    return [torch.zeros(()).expand(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("words", "inputs", "lengths"),
    [
        ("--tokens 8192 --heads 96", (1, 8192, 96, 96), None),
        ("--tokens 65 --heads 2 --value-heads 8 --batch 3", (3, 65, 2, 8), None),
        ("--tokens 0 --heads 1", (1, 0, 1, 1), None),
        ("--lengths 100,0,200 --heads 4", (1, 300, 4, 4), (100, 0, 200)),
        ("--lengths 100 --tokens 128 --heads 4 --arch cpu", (1, 128, 4, 4), (100,)),
    ],
)
def test_it_says_what_the_python_call_says(run, words: str, inputs: tuple[int, ...], lengths: tuple[int, ...] | None) -> None:
    result = run("explain", "chunk_kda", *words.split())
    offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    assert result.exit_code == 0
    assert result.output.strip() == str(kda_tl.explain("chunk_kda", *tensors(*inputs), cu_seqlens=offsets))


def test_another_machines_plan(run) -> None:
    result = run("explain", "chunk_kda", "--tokens", 8192, "--heads", 96, "--arch", "sm_90")
    assert result.exit_code == 0
    assert "chunk_kda on sm_90" in result.output and "dtype=bfloat16" in result.output
    assert "MISSING" in result.output and "kda-tl build --arch sm_90" in result.output


def test_artifacts_that_serve_are_named(run, roots) -> None:
    registry, plan = Registry(roots[1]), kda_tl.explain("chunk_kda", *tensors(1, 64, 1, 1))
    for number, launch in enumerate(plan.launches):
        registry.put("artifacts", f"id-{number}", {"lib.so": b""}, {})
        registry.publish("cpu", {launch.spec.key: {"id": f"id-{number}"}})
    result = run("explain", "chunk_kda", "--tokens", 64, "--heads", 1)
    assert "id-0" in result.output and "id-1" in result.output and str(roots[1]) in result.output
    assert "MISSING" not in result.output


def test_damaged_manifest(run, roots) -> None:
    (roots[0] / "manifest").mkdir(parents=True)
    (roots[0] / "manifest" / "cpu.json").write_text("{")
    result = run("explain", "chunk_kda", "--tokens", 64, "--heads", 1)
    assert result.exit_code == 1 and "is damaged" in result.output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("chunk_kda --heads 2", "--tokens"),
        ("chunk_kda --tokens 10", "--heads"),
        ("chunk_kda --tokens 10 --heads 2 --value-heads 3", "--value-heads"),
        ("chunk_kda --tokens 10 --heads 0", "--heads"),
        ("chunk_kda --heads 2 --batch 2 --lengths 5,5", "--batch"),
        ("chunk_kda --heads 2 --lengths 5,x", "--lengths"),
        ("chunk_kda --heads 2 --lengths 5,-1", "--lengths"),
        ("chunk_kda --heads 2 --lengths 50,50 --tokens 99", "--tokens"),
        ("chunk_glaa --heads 2 --tokens 5", "chunk_kda"),
        ("chunk_kda --heads 2 --tokens 5 --head-dim-k 0", "--head-dim-k"),
        ("chunk_kda --heads 2 --tokens 5 --dtype int8", "--dtype"),
        ("chunk_kda --heads 2 --tokens 5 --arch sm_70", "--arch"),
    ],
)
def test_wrong_use_names_the_argument(run, words: str, named: str) -> None:
    result = run("explain", *words.split())
    assert result.exit_code == 2 and named in result.output.split("Error:")[1]


@pytest.mark.parametrize("op", list(PLANNERS))
def test_every_op_by_name(run, op: str) -> None:
    result = run(
        "explain", op, "--tokens", 16 if op.startswith("deltalog") else 70, "--heads", 2, "--value-heads", 4, "--arch", "sm_90"
    )
    assert result.exit_code == 0 and " on sm_90\n" in result.output


def test_json(run, roots) -> None:
    registry, plan = Registry(roots[1]), kda_tl.explain("chunk_kda", *tensors(1, 64, 2, 2))
    spec = plan.launches[0].spec
    registry.put("artifacts", "id-0", {"lib.so": b""}, {})
    registry.publish("cpu", {spec.key: {"id": "id-0"}})
    shown = json.loads(run("explain", "chunk_kda", "--tokens", 64, "--heads", 2, "--json").stdout)
    assert (shown["op"], shown["arch"], shown["workspace_bytes"]) == ("chunk_kda", "cpu", plan.workspace_bytes)
    assert shown["problem"]["T"] == 64 and shown["build"] == ["kda-tl build --arch cpu"]
    assert [launch["artifact"] for launch in shown["launches"]] == ["id-0", None]
    assert shown["launches"][0]["registry"] == str(roots[1]) and shown["launches"][0]["spec"] == spec.key


def test_other_arguments(run) -> None:
    words = ["--tokens", 64, "--heads", 2, "--shape", "initial_state=1,2,128,128"]
    assert run("explain", "chunk_kda", *words, "--set", "output_final_state=true", "--set", "scale=0.5").exit_code == 0
    result = run("explain", "chunk_kda", "--tokens", 64, "--heads", 2, "--shape", "initial_state=1,3,128,128")
    assert result.exit_code == 1 and "initial_state must have shape" in result.output
    result = run("explain", "chunk_kda", "--tokens", 64, "--heads", 2, "--set", "chunk_size=32")
    assert result.exit_code == 1 and "chunk_size must be" in result.output
    result = run("explain", "chunk_kda", "--tokens", 64, "--heads", 2, "--shape", "pool=1")
    assert result.exit_code == 1 and "has no argument 'pool'" in result.output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"--heads 2 --tokens {10**15}", "'--tokens'"),
        (f"--heads {10**30} --tokens 5", "'--heads'"),
        (f"--heads 1 --value-heads {2**31} --tokens 5", "'--value-heads'"),
        (f"--heads 1 --batch {10**10} --tokens 5", "'--batch'"),
        (f"--heads 1 --tokens 5 --head-dim-v {10**10}", "'--head-dim-v'"),
        (f"--heads 1 --lengths {2**31}", "'--lengths'"),
        (f"--heads 1 --lengths {2**31 - 1},1", "--lengths"),
        (f"--heads 1 --lengths 5 --shape q=1,{10**10}", "'--shape'"),
        (f"--heads 1 --lengths 5 --shape q={10**9},{10**9},{10**9}", "'--shape'"),
        (f"--heads {10**9} --tokens {10**9}", "--tokens, --batch, --heads"),
    ],
)
@pytest.mark.parametrize("op", ["chunk_kda", "recurrent_kda", "deltalog_decode_kda"])
def test_absurd_sizes_are_refused_with_the_limit(run, op: str, words: str, named: str) -> None:
    result = run("explain", op, *words.split())
    message = result.output.split("Error: ")[1]
    assert result.exit_code == 2 and named in message and len(message.splitlines()) == 1
    assert "2147483647" in message or f"at most {2**60}" in message


def test_no_plan_needs_the_memory_of_its_call(run) -> None:
    """Terabytes of them: the normalizer is a column of v, and a DeltaLogCache has memory of its own."""
    for words in (f"chunk_linear_attention --tokens {10**9} --heads 64", "deltalog_decode_kda --tokens 1 --heads 65535"):
        result = run("explain", *words.split(), "--arch", "sm_90")
        assert result.exit_code == 0 and "MISSING" in result.output


def test_flags_take_no_other_words(run) -> None:
    result = run("explain", "chunk_kda", "--tokens", 64, "--heads", 2, "--set", "output_final_state=no")
    assert result.exit_code == 2 and "output_final_state must be true or false, got 'no'" in result.output


@pytest.mark.parametrize(
    "words",
    [
        "--shape q",
        "--shape q=1,x",
        "--set 3=1",
        "--set x",
        "--shape q=1,-2",
        "--set scale=1 --set scale=2",
        "--shape q=1 --set q=2",
    ],
)
def test_malformed_assignments(run, words: str) -> None:
    assert run("explain", "chunk_kda", "--tokens", 64, "--heads", 2, *words.split()).exit_code == 2


@pytest.mark.parametrize("op", ["chunk_kda", "recurrent_kda", "deltalog_decode_kda"])
def test_arguments_that_an_op_has_not(run, op: str) -> None:
    result = run("explain", op, "--tokens", 1, "--heads", 2, "--set", "scael=2")
    assert result.exit_code in (1, 2) and f"{op} has no argument 'scael'" in result.output.replace("\n", " ")


def test_a_value_of_any_depth_is_a_word(run) -> None:
    result = run("explain", "chunk_kda", "--tokens", 64, "--heads", 2, "--set", "scale=" + "-" * 100_000 + "1")
    assert result.exit_code == 1 and "scale must be a number" in result.output
