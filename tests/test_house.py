"""Who may import whom, and a few promises that hold for the project as a whole."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kda_tl"

RUNTIME = frozenset({"torch", "numpy", "click", "tvm_ffi"})  # what a serving machine has
COMPILER = frozenset({"tilelang", "tvm"})


@dataclass(frozen=True)
class Room:
    """rooms, external: what may be imported besides the room itself and the standard library; None is any room.

    TileLang and TVM are never part of anything: a room has to name them.
    """

    rooms: frozenset[str] | None = frozenset()
    external: frozenset[str] = RUNTIME


# Where tuning has two halves, the longest matching name counts. What both halves share knows what can be built, no more.
ROOMS = {
    "": Room(frozenset({"ops", "runtime", "registry", "specs", "reference", "distributed"})),  # kda_tl/__init__.py
    "reference": Room(),
    "specs": Room(),
    "registry": Room(external=frozenset()),
    "kernels": Room(frozenset({"specs"}), RUNTIME | COMPILER),
    "compiler": Room(frozenset({"kernels", "specs", "registry"}), RUNTIME | COMPILER),
    "runtime": Room(frozenset({"registry", "specs"})),
    "ops": Room(frozenset({"runtime", "specs", "reference"})),
    "distributed": Room(frozenset({"ops"})),
    "tuning": Room(frozenset({"specs"})),
    "tuning.problems": Room(frozenset({"tuning", "specs", "reference"})),  # what both halves make tensors of
    "tuning.prepare": Room(frozenset({"tuning", "tuning.problems", "specs", "compiler", "kernels", "registry"})),
    "tuning.measure": Room(frozenset({"tuning", "tuning.problems", "runtime", "specs", "reference"})),
    "cli": Room(None),
}
PUBLIC_MODULE_NAMES = {"__version__"}  # `from kda_tl import __version__` is open to every room


def module_name(path: Path) -> str:
    """The dotted name below kda_tl; '' for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """'tuning.prepare_candidates.x' -> 'tuning.prepare'; 'ops.kda' -> 'ops'; what `python -m kda_tl` runs is the cli's."""
    if module == "__main__":
        return "cli"
    room, _, rest = module.partition(".")
    half = f"{room}.{re.split('[._]', rest)[0]}"
    return half if half in ROOMS else room


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, wherever it stands."""
    here = ["kda_tl", *filter(None, module.split("."))]
    if not is_package:
        here.pop()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            # A plain `import kda_tl` counts by what is taken from it.
            yield from ((node.lineno, a.name) for a in node.names if a.name != "kda_tl" or a.asname)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kda_tl":
            yield node.lineno, f"kda_tl.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    room = room_of(module)
    if room not in ROOMS:
        return [f"kda_tl.{module} is in no room of the table"]
    rule, found = ROOMS[room], []
    for line, name in imports(source, module, is_package):
        first, _, rest = name.partition(".")
        if first == "kda_tl":
            if rest in PUBLIC_MODULE_NAMES:
                continue
            # What is no room is a public name, or the package itself: kda_tl/__init__.py gathers those for outsiders.
            target = room_of(rest) if room_of(rest) in ROOMS else ""
            allowed = target == room or rule.rooms is None or target in rule.rooms
        else:
            allowed = first in sys.stdlib_module_names or first in rule.external
        if not allowed:
            where = f"kda_tl/{(module or '__init__').replace('.', '/')} line {line}"
            found.append(f"{where}: {room or 'the package itself'} must not import {name}")
    return found


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_rooms_import_only_whom_they_may() -> None:
    paths = modules()
    assert paths
    found = [v for path in paths for v in violations(path.read_text(), module_name(path), path.name == "__init__.py")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops.kda", "import tilelang"),
        ("ops.kda", "from tilelang import language as T"),
        ("ops.kda", "def f():\n    import tvm.runtime"),
        ("ops.kda", "import importlib\nimportlib.import_module('tilelang')"),
        ("ops.kda", "from ..compiler import build"),
        ("ops.kda", "from .. import compiler"),
        ("ops.kda", "import kda_tl.registry.store"),
        ("ops.kda", "from kda_tl import chunk_kda"),
        ("ops.kda", "from kda_tl import *"),
        ("ops.kda", "import kda_tl as root"),
        ("ops.kda", "import kda_tl\nkda_tl.compiler.build()"),
        ("ops.kda", "import kda_tl\nkda_tl.chunk_kda"),
        ("runtime.loader", "from ..compiler.build import build"),
        ("runtime.loader", "from kda_tl import kernels"),
        ("runtime.loader", "import scipy"),
        ("registry.store", "import numpy"),
        ("registry.store", "from ..specs import x"),
        ("specs.archs", "from kda_tl.registry import Registry"),
        ("reference.gates", "from ..specs import x"),
        ("kernels.chunk_wy", "from ..registry import x"),
        ("kernels.tiles.inverse", "from ...compiler import x"),
        ("distributed.context", "from ..runtime import x"),
        ("cli.build", "import tilelang"),
        ("cli.build", "import fla"),
        ("__main__", "import tilelang"),
        ("tuning.prepare", "from ..runtime import x"),
        ("tuning.measure", "from ..compiler import x"),
        ("tuning.measure", "from .prepare import x"),
        ("tuning.measure.timing", "from ...kernels import x"),
        ("tuning.prepare_candidates", "from .measure_times import x"),
        ("tuning.cases", "from .prepare import x"),
        ("tuning.problems_decode", "from .prepare import x"),
        ("tuning.problems", "from ..runtime import x"),
        ("tuning.cases", "from ..runtime import x"),
        ("tuning.cases", "from ..compiler import x"),
        ("attic.old", "import torch"),
    ],
)
def test_the_check_sees(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "ops.kda",
            "import math\nimport torch\nfrom ..runtime import load\nfrom ..reference.chunk import x\nfrom . import y",
        ),
        ("ops.kda", "from kda_tl import __version__\nfrom .. import __version__, specs"),
        ("ops.kda", "import kda_tl\nprint(kda_tl.__version__, kda_tl.specs.x)"),
        ("kernels.tiles.inverse", "import tilelang.language as T\nfrom ...specs import x\nfrom .. import chunk_wy"),
        ("compiler.lower", "import tvm_ffi\nfrom tilelang import tvm\nfrom kda_tl import kernels, registry, specs"),
        ("runtime.loader", "import importlib.util\nimportlib.util.find_spec('tilelang')"),
        ("cli.build", "import click\nfrom ..compiler import build\nimport kda_tl\nkda_tl.warmup()"),
        ("cli.demo", "import kda_tl\nfrom kda_tl import chunk_kda"),
        ("tuning.measure", "from .cases import x\nfrom ..runtime import load"),
        ("tuning.prepare.worker", "from ..cases import x\nfrom ...compiler import build\nfrom .other import y"),
    ],
)
def test_the_check_lets_pass(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_every_room_of_the_table_is_there() -> None:
    assert set(ROOMS) <= {room_of(module_name(path)) for path in modules()}


def test_the_readme_has_the_same_table() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| room | may import |") :].split("\n\n")[0].splitlines()[2:]
    told = {}
    for line in table:
        rooms, may = (set(re.findall(r"`([a-z.]+)`", cell)) for cell in line.strip("|").split("|"))
        told |= {room: may & set(ROOMS) for room in rooms}
    assert set(told) == set(ROOMS) - {""}
    for room, rule in ROOMS.items():
        if room and rule.rooms is not None:  # a half belongs to its whole
            assert told[room] == {name for name in rule.rooms if name.split(".")[0] != room.split(".")[0]}, room


def test_relative_imports_of_a_package() -> None:
    assert violations("from .chunk import x\nfrom ..runtime import y", "ops", is_package=True) == []
    assert violations("from .ops import chunk_kda\nfrom .runtime import explain", "", is_package=True) == []
    assert len(violations("from .compiler import build", "", is_package=True)) == 1


def test_the_package_holds_public_names_and_nothing_else() -> None:
    path = PACKAGE / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_dunder = (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and all(
                isinstance(target, ast.Name) and target.id.startswith("__")
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            )
        ) or (isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__"))
        assert is_docstring or is_dunder or isinstance(node, ast.ImportFrom), f"{path} line {node.lineno}"


def python(code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def test_importing_the_package_leaves_the_compiler_out() -> None:
    ran = python("import sys, kda_tl; print(sorted({'tilelang', 'tvm'} & {name.split('.')[0] for name in sys.modules}))")
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


def test_a_serving_machine_can_import_what_it_needs() -> None:
    """Every module outside the compiling rooms, and the command line, with TileLang and TVM not to be had."""
    names = [
        f"kda_tl.{name}".rstrip(".")
        for name in map(module_name, modules())
        if room_of(name) not in ("kernels", "compiler", "tuning.prepare", "cli") or name == "cli.main"
    ]
    code = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {set(COMPILER)!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed here", name=name)

sys.meta_path.insert(0, Absent())
for name in {names!r}:
    importlib.import_module(name)
"""
    ran = python(code)
    assert ran.returncode == 0, ran.stderr


def test_every_environment_variable_is_in_the_readme() -> None:
    pattern = re.compile(r"\bKDA_TL_[A-Z0-9_]*[A-Z0-9]\b")
    used: dict[str, str] = {}
    for folder in (PACKAGE, ROOT / "tools"):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".sh", ".cc", ".c"):
                for name in pattern.findall(path.read_text()):
                    used.setdefault(name, str(path.relative_to(ROOT)))
    assert "KDA_TL_REGISTRY" in used
    listed = set(pattern.findall((ROOT / "README.md").read_text()))
    missing = [f"{name} ({path})" for name, path in sorted(used.items()) if name not in listed]
    assert not missing, f"not in README.md: {', '.join(missing)}"


def test_tests_mirror_the_package() -> None:
    def folders(root: Path) -> set[str]:
        """Folders that hold Python files, relative to `root`."""
        return {str(path.parent.relative_to(root)) for path in root.rglob("*.py") if path.parent != root}

    rooms = folders(PACKAGE)
    strays = {name for name in folders(ROOT / "tests") if name not in rooms and name.split(os.sep)[0] != "gpu"}
    assert not strays, f"tests/ has folders that kda_tl/ has not: {sorted(strays)}"
    untested = {name for name in rooms if os.sep not in name} - folders(ROOT / "tests")
    assert not untested, f"kda_tl/ has rooms without a folder in tests/: {sorted(untested)}"
