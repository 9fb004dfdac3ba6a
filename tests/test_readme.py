"""The README's claims that a machine can check: counts, error lines, commands; and the links of every page."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from armillary.cli.verb_table import VERBS
from armillary.model.weights.hf_layout import FAMILIES
from armillary.spec import catalogue
from tests.conftest import Ran

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_counts_are_true() -> None:
    counted = {"models;": catalogue.models(), "chips,": catalogue.chips(), "nodes,": catalogue.nodes()}
    for word, found in counted.items():
        assert re.search(rf"\b{len(found)} {word}", TEXT), (word, len(found))


def test_families_are_those_with_weights() -> None:
    named = TEXT[TEXT.index("Weights are exchanged") : TEXT.index("logits equal")].replace("\n", " ")
    plain = re.sub(r"[^a-z0-9]", "", named.lower())
    assert all(re.sub(r"[^a-z0-9]", "", family) in plain for family in FAMILIES)


FILES = [
    str(path.relative_to(ROOT))
    for top in ("armillary", "tests", "benchmarks", "examples")
    for path in (ROOT / top).rglob("*.py")
]
PAGES = sorted(
    path
    for place in (".", "docs", "docs/exercises", "docs/launch", "benchmarks")
    for path in (ROOT / place).glob("*.md")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#([^)]+))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            assert anchor in {slug(title) for title in re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)}, (
                anchor
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_imports_exist(page: Path) -> None:
    """Python files in backticks, by the end of their path, and what the Python examples import."""
    if page.name == "CHANGELOG.md" or page.parent.name == "benchmarks":
        return  # of their time
    text = page.read_text()
    for name in re.findall(r"`([\w/]+\.py)`", text):
        placeholder = "NAME" in name or name.startswith("_")
        assert placeholder or any(f"/{file}".endswith(f"/{name}") for file in FILES), name
    for module, names in re.findall(r"^from (armillary[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        assert all(hasattr(import_module(module), name.strip()) for name in names.split(",")), module


def slug(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_verbs_exist() -> None:
    for verb in re.findall(r"^(?:\$ )?armillary (\w+)", TEXT, re.MULTILINE):
        assert verb in VERBS


@pytest.mark.parametrize("line", re.findall(r"^\$ armillary (.*)\nerror: ", TEXT, re.MULTILINE))
def test_error_lines_are_as_shown(line: str, cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ran = cli(*line.split())
    shown = TEXT[TEXT.index(f"$ armillary {line}\n") :].splitlines()[1]
    assert ran.code == 2 and ran.err.strip() == shown
