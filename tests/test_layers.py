"""Imports point down, siblings never import each other, and what needs no torch never imports it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "armillary"

# Lowest first; what shares a row are siblings.
ROWS = (
    ("errors",),
    ("units", "report", "stats"),
    ("spec",),
    ("store",),
    ("machine",),
    ("kernels",),
    ("model", "profiling"),
    ("parallel",),
    ("training", "engine"),
    ("serving",),
    ("fleet", "cluster"),
    ("planning",),
    ("diagnosis",),
    ("documents",),
    ("web",),
    ("cli",),
)
LEVEL = {name: level for level, row in enumerate(ROWS) for name in row}

TORCH_FREE = (
    "armillary",
    "armillary.errors",
    "armillary.units",
    "armillary.report*",
    "armillary.stats",
    "armillary.spec*",
    "armillary.store*",
    "armillary.machine*",
    "armillary.cluster*",
    "armillary.planning*",
    "armillary.diagnosis*",
    "armillary.documents*",
    "armillary.web*",
    "armillary.engine",
    "armillary.engine.engine",
    "armillary.engine.engine_thread",
    "armillary.engine.request*",
    "armillary.engine.cache*",
    "armillary.engine.scheduler*",
    "armillary.engine.output*",
    "armillary.engine.telemetry*",
    "armillary.serving.http*",
    "armillary.serving.load*",
    "armillary.fleet*",
    *(
        f"armillary.serving.predict.{name}"
        for name in ("batcher", "hot_reload", "model", "request", "schema", "versions")
    ),
    "armillary.profiling.trace*",
    "armillary.profiling.analysis*",
    "armillary.model.supported_shapes",
    "armillary.cli*",
)


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


Import = ast.Import | ast.ImportFrom


@cache
def import_nodes(path: Path) -> list[tuple[Import, bool]]:
    """Every import of a file, also inside functions, and whether it is for type checkers alone."""
    found: list[tuple[Import, bool]] = []
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), False)]
    while waiting:
        node, types = waiting.pop()
        if isinstance(node, Import):
            found.append((node, types))
        elif not isinstance(node, ast.expr):  # nothing is imported inside an expression
            types = types or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
            waiting += [(inner, types) for inner in ast.iter_child_nodes(node)]
    return found


def imports(name: str, path: Path, types: bool = True) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, also inside functions; `types`: also those for type checkers."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node, for_types in import_nodes(path):
        if for_types and not types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        else:
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def part(name: str) -> str:
    """armillary.spec.model -> spec."""
    return [*name.split("."), ""][1]


def offences(name: str, path: Path) -> Iterator[str]:
    """Imports that point up or sideways; the package's own lazy front door stands outside the rows."""
    here = part(name)
    for line, target in imports(name, path):
        there = part(target)
        if target.split(".")[0] != "armillary" or there not in LEVEL or there == here or here not in LEVEL:
            continue
        if LEVEL[there] >= LEVEL[here]:
            yield f"{name}:{line} imports {target}"


def test_imports_point_down() -> None:
    assert [offence for name, path in modules().items() for offence in offences(name, path)] == []


def test_every_package_has_a_row() -> None:
    named = {part(name) for name in modules()} - {"", "__main__"}
    assert named <= set(LEVEL), f"give {named - set(LEVEL)} a row"


def folder_imports(package: str) -> dict[str, set[str]]:
    """Folder or file directly inside the package -> the others that it imports, but for names of types alone."""
    found: dict[str, set[str]] = {}
    for name, path in modules().items():
        here = name.split(".")
        if here[1:2] != [package] or len(here) < 3:
            continue
        for _, target in imports(name, path, types=False):
            there = target.split(".")
            if there[:2] == here[:2] and len(there) > 2 and there[2] != here[2]:
                found.setdefault(here[2], set()).add(there[2])
    return found


def test_folders_of_a_package_import_each_other_in_one_direction() -> None:
    for package in sorted({part(name) for name in modules()} - {""}):
        try:
            TopologicalSorter(folder_imports(package)).prepare()
        except CycleError as error:
            pytest.fail(f"armillary.{package}: {' imports '.join(reversed(error.args[1]))}")


def test_modules_import_each_other_in_one_direction() -> None:
    """At import: a late import inside a function may point back."""
    names = modules()
    graph = {name: {target for target in top_level(name, path) if target in names} for name, path in names.items()}
    TopologicalSorter(graph).prepare()


def top_level(name: str, path: Path) -> set[str]:
    """Modules that are imported when this one is."""
    targets = set()
    for node, _ in import_nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.col_offset == 0:
            targets |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return targets - {name, *(name.rpartition(".")[:1])}


def test_folders_stay_small_and_basenames_tell_files_apart() -> None:
    files = [path for top in ("armillary", "tests") for path in (PACKAGE.parent / top).rglob("*.py")]
    files = [path for path in files if path.name != "__init__.py"]
    folders = Counter(path.parent.relative_to(PACKAGE.parent) for path in files)
    assert {folder: number for folder, number in folders.items() if number > 30} == {}
    names = Counter(path.name for path in files if path.name != "conftest.py")
    assert {name: number for name, number in names.items() if number > 3} == {}


@pytest.mark.parametrize(
    ("name", "code", "wrong"),
    [
        ("armillary.spec.x", "from armillary.store.home import Home", True),
        ("armillary.spec.x", "def f():\n    import armillary.model.layers.rope", True),
        ("armillary.spec.x", "from ..store import home", True),
        ("armillary.spec.x", "from armillary import store", True),
        ("armillary.training.x", "from armillary.engine import llm", True),
        ("armillary.training.x", "from armillary.model import rope", False),
        ("armillary.spec.x", "from . import model", False),
        ("armillary.store.x", "from armillary.spec.model import ModelConfig", False),
    ],
)
def test_the_check_sees(tmp_path: Path, name: str, code: str, wrong: bool) -> None:
    path = tmp_path / "x.py"
    path.write_text(code)
    assert bool(list(offences(name, path))) is wrong


def test_spec_needs_the_standard_library_only() -> None:
    foreign = [
        f"{name}:{line} imports {target}"
        for name, path in modules().items()
        if part(name) in ("spec", "errors", "units", "report", "stats")
        for line, target in imports(name, path)
        if target.split(".")[0] not in (*sys.stdlib_module_names, "armillary")
    ]
    assert [text for text in foreign if not text.startswith("armillary.stats:") or " imports scipy" not in text] == []
    assert bringing_in(("scipy",), ["armillary.stats"]) == [], "scipy is slow to import: inside the function"


def bringing_in(heavy: tuple[str, ...], names: list[str]) -> list[str]:
    """Import `names` one after another in a fresh interpreter: which of them brings in what."""
    code = (
        "import importlib, sys\n"
        f"heavy, seen = {heavy!r}, set()\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    new = {top for top in heavy if top in sys.modules} - seen\n"
        "    seen |= new\n"
        "    if new: print(name, 'imports', *sorted(new))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_needs_no_torch_does_not_import_it() -> None:
    names = [name for name in modules() if any(fnmatchcase(name, pattern) for pattern in TORCH_FREE)]
    assert {"armillary.spec.model", "armillary.store.home", "armillary.cli.main"} <= set(names)
    engine = ("request.sequence", "cache.kv_cache", "scheduler.scheduler")
    assert {f"armillary.engine.{name}" for name in engine} <= set(names)
    assert bringing_in(("torch",), names) == []


def test_the_front_door_and_help_import_nothing_heavy() -> None:
    assert bringing_in(("torch", "numpy", "rich", "click"), ["armillary"]) == []
    assert bringing_in(("torch", "numpy", "rich"), ["armillary.cli.main", "armillary.cli.verb_decorator"]) == []


def test_the_check_for_heavy_imports_sees() -> None:
    assert bringing_in(("click",), ["armillary", "click"]) == ["click imports click"]
