"""The whole matrix of strategies, ranks, accumulation, recompute and formats against one process, and its table."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.parallel.strategies import ALL, EXPERTS, layout_of
from tests.parallel.test_strategies import alone
from tests.parallel.training import Case, error, many, mixture, tiny
from tests.ranks import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "parallel_agreement.md"
STEPS = 20
WORLDS = (2, 4, 8)
VARIANTS = {
    "fp32": ((1, "none", 1), (2, "full", 1), (2, "selective", 1), (1, "full", 2)),
    "fp64": ((1, "none", 1), (2, "full", 1), (2, "selective", 2)),
}
"""micro-batches, recompute, one layer in …"""


@dataclass(frozen=True)
class Row:
    """A strategy on some ranks: the worst over all variants, by format and figure."""

    strategy: str
    world: int
    variants: int
    errors: dict[str, dict[str, float]]


def cases_of(strategy: str, world: int) -> Iterator[Case]:
    for dtype, variants in VARIANTS.items():
        for accumulate, kind, every in variants:
            layout = layout_of(strategy, world, recompute=kind, recompute_every=every)
            split = layout is not None and layout.pp > 1 and layout.schedule == "zero_bubble"
            if layout is not None and not (split and kind == "selective"):  # refused, see refuse_split
                config = mixture() if strategy in EXPERTS else tiny()
                parts, chunk = max(accumulate, layout.pp * 2 if layout.pp > 1 else 1), 20 * (accumulate - 1)
                yield Case(layout=layout, config=config, dtype=dtype, steps=STEPS, accumulate=parts, chunk=chunk)


def measure(ranks: Ranks, strategy: str, world: int) -> Row | None:
    """Run every variant; None where the strategy has no use for so many ranks."""
    cases = list(cases_of(strategy, world))
    if not cases:
        return None
    worst: dict[str, dict[str, float]] = {}
    for outcome, case in zip(ranks.run(world, many, cases, timeout_s=1200)[0], cases, strict=True):
        kept = worst.setdefault(case.dtype, {})
        for name, value in error(outcome, alone(case.alone())).items():
            kept[name] = max(value, kept.get(name, 0.0))
    return Row(strategy, world, len(cases), worst)


def table(rows: list[Row]) -> str:
    """Markdown; every row says that it ran on gloo, because nothing here runs elsewhere."""
    figures = [(dtype, name) for dtype in ("fp32", "fp64") for name in ("loss", "norm", "weights")]
    heads = " | ".join(f"{name} {dtype}" for dtype, name in figures)
    lines = [f"| strategy | ranks | runs | {heads} | ran on |", "|---|--:|--:|" + "--:|" * len(figures) + "---|"]
    for row in rows:
        values = [f"{row.errors[dtype][name]:.1e}" for dtype, name in figures]
        lines.append(f"| {row.strategy} | {row.world} | {row.variants} | {' | '.join(values)} | gloo, CPU |")
    return "\n".join(lines) + "\n"


def page(lines: list[str]) -> str:
    """Of these rows of the table."""
    named = ", ".join(ALL)
    heads = table([]).rstrip("\n")
    old = any(int(line.split("|")[3]) > sum(map(len, VARIANTS.values())) for line in lines)
    older = "Rows of 8 runs are older: a rate of 1e-2. " if old else ""
    return (
        "# Agreement of every strategy with one process\n\n"
        f"Written by `pytest -m slow tests/parallel/test_matrix.py`, a row a test, last on {datetime.date.today()}, "
        f"torch {torch.__version__}. Largest relative difference from one process over {STEPS} AdamW steps of a tiny "
        "model (vocabulary 37, which no number of ranks divides; with experts: 8, two a token and a shared one, "
        "balance loss, z-loss and selection bias), learning rate 3e-3, gradients clipped to a norm of 1, over the "
        "variants without and with accumulation, full, selective and every-second-layer recompute. Bars: fp32 loss "
        f"1e-6, norm and weights 1e-5; fp64 1e-10. {older}Strategies: {named}.\n\n"
        + "\n".join([heads, *lines]) + "\n"
    )


def with_row(text: str, row: Row) -> str:
    """The page with this row in its place, in that of an earlier run or new; rows of strategies that are gone go."""
    (line,) = table([row]).splitlines()[2:]
    found = {_key(old): old for old in text.splitlines() if old.startswith("| ") and "gloo" in old}
    found[_key(line)] = line
    order = [(name, str(world)) for world in WORLDS for name in ALL]
    return page([found[key] for key in order if key in found])


def _key(line: str) -> tuple[str, str]:
    """(strategy, ranks) of a row."""
    cells = [cell.strip() for cell in line.split("|")]
    return cells[1], cells[2]
