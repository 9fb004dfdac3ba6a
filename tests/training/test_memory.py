"""What a plan says of memory is what a tracker sees, on the fullest rank of any layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.store.home import Home
from tests.ranks import Ranks
from tests.training.memory_table import BAR, MODELS, PAGE, Case, Row, every_case, page, rows, table

LOGITS, ACTIVATIONS, WEIGHTS = MODELS
QUICK = [
    Case(LOGITS, "ZeRO-3", "full"),
    Case(ACTIVATIONS, "tp + sp", "selective", "bf16"),
    Case(WEIGHTS, "ZeRO-3 × tp"),
]


def test_a_rank_needs_what_was_planned(ranks: Ranks, home: Home, corpus: Path) -> None:
    over = [row for row in rows(ranks, QUICK, home, corpus) if abs(row.error) > BAR]
    assert not over, table(over)


@pytest.mark.slow
def test_every_layout_needs_what_was_planned(ranks: Ranks, home: Home, corpus: Path) -> None:
    """About four minutes on two quiet cores."""
    found = rows(ranks, list(every_case()), home, corpus)
    PAGE.write_text(page(found))
    over = [row for row in found if abs(row.error) > BAR]
    assert not over, table(over)


def test_the_page_names_the_worst() -> None:
    made = page([Row(Case(LOGITS, "DDP"), 100e6, 103e6), Row(Case(WEIGHTS, "tp", "full", "bf16"), 50e6, 49e6)])
    assert "2 configurations, mean error 2.5%, worst 3.0%" in made
    assert "| 2 × 512, untied | tp | full | bf16 | 50.0 MB | 49.0 MB | -2.0% |" in made
