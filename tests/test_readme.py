"""The README's claims that a machine can check: counts, error lines, links, commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from armillary.cli.verbs import by_name
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


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_verbs_exist() -> None:
    for verb in re.findall(r"^(?:\$ )?armillary (\w+)", TEXT, re.MULTILINE):
        assert verb in by_name()


@pytest.mark.parametrize("line", re.findall(r"^\$ armillary (.*)\nerror: ", TEXT, re.MULTILINE))
def test_error_lines_are_as_shown(line: str, cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ran = cli(*line.split())
    shown = TEXT[TEXT.index(f"$ armillary {line}\n") :].splitlines()[1]
    assert ran.code == 2 and ran.err.strip() == shown
