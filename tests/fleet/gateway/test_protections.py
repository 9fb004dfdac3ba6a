"""Each protection of the gateway and the registry is taken out of a copy of the code, one by one: some test must fail.

A test that passes without the line that it is about protects nothing. protections.toml has the lines; the copy is in a
folder of the test's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Protection:
    """A line of the code, what is left of it where it protects no more, and the tests that are to notice."""

    name: str
    file: str
    line: str
    without: str
    tests: str


TABLE = tomllib.loads(Path(__file__).with_name("protections.toml").read_text())
PROTECTIONS = [Protection(**row) for row in TABLE["protection"]]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its tests, in a folder of their own."""
    target = tmp_path_factory.mktemp("copy")
    for name in ("armillary", "tests", "recipes"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, target / name)
    return target


def run_tests(copy: Path, tests: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", tests]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    return subprocess.run(line, cwd=copy, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("tests", sorted({each.tests for each in PROTECTIONS}))
def test_with_all_protections_the_tests_pass(copy: Path, tests: str) -> None:
    assert (done := run_tests(copy, tests)).returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("protection", PROTECTIONS, ids=lambda each: each.name.replace(" ", "-"))
def test_without_it_a_test_fails(copy: Path, protection: Protection) -> None:
    path = copy / protection.file
    text = path.read_text()
    assert text.count(protection.line) == 1, "the line has moved; follow it here"
    path.write_text(text.replace(protection.line, protection.without))
    try:
        done = run_tests(copy, protection.tests)
    finally:
        path.write_text(text)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # it may be of the same second
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-3000:]
