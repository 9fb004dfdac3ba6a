"""docs/architecture.md: its files exist, its lists are short, and its quotes are the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.spec.test_docs import generator

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()
PATHS = sorted(set(re.findall(r"`((?:armillary|tests)/[\w/.]+)`", TEXT)))
LISTS = re.findall(r"^## Path of (.*?)$(.*?)(?=^## )", TEXT, re.MULTILINE | re.DOTALL)
QUOTES = re.findall(r"^<!-- quote: (\S+) (\S+) -->\n```python\n(.*?)\n```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", PATHS)
def test_files_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("title", "body"), LISTS)
def test_paths_have_at_most_twelve_files(title: str, body: str) -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. `", body, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and 1 < len(numbers) <= 12, title


def test_quotes_are_the_code_and_fit_in_fifteen_lines() -> None:
    assert {name for _, name, _ in QUOTES} == {"Trainer.step", "Engine.step", "step_time", "diagnose"}
    for path, name, quoted in QUOTES:
        assert quoted == generator().source_of(path, name), f"{name}: run make docs"
        assert len(quoted.splitlines()) <= 15, name


def test_every_package_has_a_paragraph() -> None:
    packages = {path.parent.name for path in (ROOT / "armillary").glob("*/__init__.py")} - {"report"}
    assert packages <= set(re.findall(r"^\*\*`(\w+)/`\*\*", TEXT, re.MULTILINE))
