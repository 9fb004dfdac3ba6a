"""What a plan says of memory is what a tracker sees, on the fullest rank of any layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.store.home import Home
from tests.ranks import Ranks
from tests.training.memory_table import BAR, MODELS, PAGE, Case, Row, every_case, page, rows, table

LOGITS, _, WEIGHTS = MODELS
QUICK = [Case(LOGITS, "ZeRO-3", "full")]
"""the others are among those of the slow test"""


def test_a_rank_needs_what_was_planned(ranks: Ranks, home: Home, corpus: Path) -> None:
    over = [row for row in rows(ranks, QUICK, home, corpus) if abs(row.error) > BAR]
    assert not over, table(over)


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True], ids=["on the device", "elsewhere"])
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_needs_what_was_planned(
    ranks: Ranks, home: Home, corpus: Path, model: str, elsewhere: bool
) -> None:
    """About two minutes a model on two quiet cores, and half a minute where something waits elsewhere."""
    found = rows(ranks, list(every_case(model, elsewhere=elsewhere)), home, corpus)
    PAGE.write_text(page(PAGE.read_text() if PAGE.exists() else "", found))
    over = [row for row in found if abs(row.error) > BAR]
    assert not over, table(over)


def test_the_page_names_the_worst_and_keeps_other_cases() -> None:
    first = page("", [Row(Case(WEIGHTS, "tp", "full", "bf16"), 50e6, 49e6)])
    made = page(first, [Row(Case(LOGITS, "DDP"), 100e6, 103e6)])
    assert "2 configurations, mean error 2.5 %, worst 3.0 %" in made
    lines = [line for line in made.splitlines() if line.endswith("% |")]
    assert [line.split(" | ")[1] for line in lines] == ["DDP", "tp"]
    assert lines[1] == "| 2 × 512, untied | tp | full | bf16 | 50.0 MB | 49.0 MB | -2.0% |"
    again = page(made, [Row(Case(WEIGHTS, "tp", "full", "bf16"), 50e6, 50e6), Row(Case(WEIGHTS, "nvme"), 50e6, 50e6)])
    assert "3 configurations, mean error 1.0 %" in again and again.count("| tp | full | bf16 |") == 1
