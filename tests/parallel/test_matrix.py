"""The whole matrix, and the page that shows it."""

from __future__ import annotations

import re

import pytest

from tests.parallel.matrix import PAGE, WORLDS, Row, measure, page, table, with_row
from tests.parallel.strategies import ALL, EXPERTS, layout_of
from tests.parallel.test_strategies import BARS
from tests.ranks import Ranks

ROWS = [(world, name) for world in WORLDS for name in ALL if layout_of(name, world) is not None]


def _id(world: int, name: str) -> str:
    """'on8-dense-HSDP-x-tp'"""
    plain = re.sub(r"[^0-9a-zA-Z]+", "-", name.replace("×", "x").replace("+", "and")).strip("-")
    return f"on{world}-{plain if name in EXPERTS else f'dense-{plain}'}"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategy"), ROWS, ids=[_id(*row) for row in ROWS])
def test_a_strategy_on_ranks(ranks: Ranks, world: int, strategy: str) -> None:
    """A row each, so that `-k "on8 and dense"` runs a part; dense ones take about ten minutes on two quiet cores, those
    with experts twice as long."""
    row = measure(ranks, strategy, world)
    assert row is not None
    PAGE.write_text(with_row(PAGE.read_text() if PAGE.exists() else "", row))
    over = [
        (dtype, name, value)
        for dtype, errors in row.errors.items()
        for name, value in errors.items()
        if value > BARS[dtype][name]
    ]
    assert not over


def test_the_page_shows_the_worst_of_each() -> None:
    small = {"loss": 1e-8, "norm": 2e-8, "weights": 3e-7}
    made = table([Row("DDP", 2, 8, {"fp32": small, "fp64": dict.fromkeys(small, 1e-15)})])
    assert "| DDP | 2 | 8 | 1.0e-08 | 2.0e-08 | 3.0e-07 | 1.0e-15 | 1.0e-15 | 1.0e-15 | gloo, CPU |" in made


def test_a_row_takes_the_place_of_an_earlier_one() -> None:
    def row(strategy: str, world: int, value: float) -> Row:
        return Row(strategy, world, 7, {kind: dict.fromkeys(("loss", "norm", "weights"), value) for kind in BARS})

    made = with_row(with_row(with_row(page([]), row("tp", 4, 1e-8)), row("DDP", 2, 2e-8)), row("tp", 4, 3e-8))
    rows = [line.split(" | ")[:4] for line in made.splitlines() if "gloo" in line]
    assert rows == [["| DDP", "2", "7", "2.0e-08"], ["| tp", "4", "7", "3.0e-08"]]
