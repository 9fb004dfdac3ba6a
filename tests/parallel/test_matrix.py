"""The whole matrix, and the page that shows it."""

from __future__ import annotations

import pytest

from tests.parallel.matrix import PAGE, WORLDS, Row, measure, page, table
from tests.parallel.strategies import STRATEGIES
from tests.parallel.test_strategies import BARS
from tests.ranks import Ranks


@pytest.mark.slow
def test_every_strategy_on_every_number_of_ranks(ranks: Ranks) -> None:
    """About ten minutes on two quiet cores."""
    measured = [measure(ranks, strategy, world) for world in WORLDS for strategy in STRATEGIES]
    rows = [row for row in measured if row is not None]
    PAGE.write_text(page(rows))
    over = [
        (row.strategy, row.world, dtype, name, value)
        for row in rows
        for dtype, errors in row.errors.items()
        for name, value in errors.items()
        if value > BARS[dtype][name]
    ]
    assert not over


def test_the_page_shows_the_worst_of_each() -> None:
    small = {"loss": 1e-8, "norm": 2e-8, "weights": 3e-7}
    made = table([Row("DDP", 2, 8, {"fp32": small, "fp64": dict.fromkeys(small, 1e-15)})])
    assert "| DDP | 2 | 8 | 1.0e-08 | 2.0e-08 | 3.0e-07 | 1.0e-15 | 1.0e-15 | 1.0e-15 | gloo, CPU |" in made
