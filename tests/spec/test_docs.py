"""The reference pages are what the dataclasses and the gauges say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES: dict[str, str] = generator().pages()


@pytest.mark.parametrize("name", PAGES)
def test_committed_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name], "run make docs"


def test_every_table_and_gauge_has_a_row() -> None:
    assert "## [layout]" in PAGES["recipes.md"] and "| `tp` | integer | 1 |" in PAGES["recipes.md"]
    assert "| `num_layers` |" in PAGES["recipes.md"] and "### [model.moe]" in PAGES["recipes.md"]
    assert "| `ttft_s` | s | histogram |" in PAGES["gauges.md"]
