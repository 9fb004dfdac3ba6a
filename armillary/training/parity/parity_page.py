"""The page that shows the matrix: a row for each strategy and number of ranks, each from its last run.

A page is read back before a row is put in, so that a part of the matrix can be run again by itself.
"""

import datetime
from collections.abc import Sequence

import torch

from armillary.training.parity.matrix import BARS, FIGURES, FORMATS, STEPS, VARIANTS, Row
from armillary.training.parity.strategies import ALL

_NONE = "–"
_WHERE = "gloo, CPU"
_COLUMNS = [(dtype, name) for dtype in FORMATS for name in FIGURES]


def table(rows: Sequence[Row]) -> str:
    """Markdown; every row says that it ran on gloo, because nothing here runs elsewhere."""
    lines = [f"| {' | '.join([*columns(), 'ran on'])} |", "|---|--:|--:|" + "--:|" * len(_COLUMNS) + "---|---|"]
    return "\n".join([*lines, *map(_line, rows)]) + "\n"


def cells(row: Row, formats: Sequence[str] = FORMATS, figures: Sequence[str] = FIGURES) -> list[str]:
    """The row as people read it."""
    values = [
        f"{row.errors[dtype][name]:.1e}" if dtype in row.errors else _NONE
        for dtype, name in _COLUMNS
        if dtype in formats and name in figures
    ]
    return [row.strategy, str(row.world), str(row.variants), *values, "no" if row.over else "yes"]


def columns(formats: Sequence[str] = FORMATS, figures: Sequence[str] = FIGURES) -> list[str]:
    shown = [f"{name} {dtype}" for dtype, name in _COLUMNS if dtype in formats and name in figures]
    return ["strategy", "ranks", "runs", *shown, "holds"]


def _line(row: Row) -> str:
    return f"| {' | '.join([*cells(row), _WHERE])} |"


def rows_of(text: str) -> list[Row]:
    """The rows of a page; one without its columns is left out."""
    parsed = (_parsed(line) for line in text.splitlines() if line.startswith("| ") and _WHERE in line)
    return [row for row in parsed if row is not None]


def _parsed(line: str) -> Row | None:
    parts = [part.strip() for part in line.strip().strip("|").split("|")]
    values = dict(zip(_COLUMNS, parts[3:], strict=False))
    if len(values) < len(_COLUMNS):
        return None
    errors = {
        dtype: {name: float(values[dtype, name]) for name in FIGURES}
        for dtype in FORMATS
        if values[dtype, FIGURES[0]] != _NONE
    }
    return Row(parts[0], int(parts[1]), int(parts[2]), errors)


def with_rows(text: str, new: Sequence[Row]) -> str:
    """The page with these rows in their places, or in those of earlier runs; rows of strategies that are gone go."""
    rows = {(row.strategy, row.world): row for row in (*rows_of(text), *new)}
    names = [*ALL, *(row.strategy for row in new if row.strategy not in ALL)]
    worlds = sorted({world for _, world in rows})
    return page([rows[name, world] for world in worlds for name in dict.fromkeys(names) if (name, world) in rows])


def page(rows: Sequence[Row]) -> str:
    bars = "; ".join(
        f"{dtype} " + ", ".join(f"{name} {bar:g}" for name, bar in BARS[dtype].items()) for dtype in FORMATS
    )
    most = sum(map(len, VARIANTS.values()))
    older = "Rows of 8 runs are older: a rate of 1e-2. " if any(row.variants > most for row in rows) else ""
    return (
        "# Agreement of every strategy with one process\n\n"
        "Written by `armillary train --parity` and by `pytest -m slow tests/parallel/test_matrix.py`, last on "
        f"{datetime.date.today()}, torch {torch.__version__}. Largest relative difference from one process over "
        f"{STEPS} AdamW steps of a tiny model (vocabulary 37, which no number of ranks divides; with experts: 8, two a "
        "token and a shared one, balance loss, z-loss and selection bias), learning rate 3e-3, gradients "
        "clipped to a norm of 1, over the variants without and with accumulation, full, selective and "
        "every-second-layer recompute. Bars: "
        f"{bars}. {older}{len({row.strategy for row in rows})} of {len(ALL)} strategies are below.\n\n" + table(rows)
    )
