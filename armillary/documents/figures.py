"""The table of figures: every number of a report once, with unit, source and formula. All formats draw from it.

A figure without a formula is an input: a price, a count, a prediction of the planner. One with a formula follows from
others, in Python and in the workbook alike; where the planner computes it too, the two are held to agree here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isclose

from armillary.documents import formula as formulas
from armillary.documents.values import Notation, clean

AGREE = 1e-9
"""relative difference allowed between a formula and the planner"""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of the report."""

    key: str
    label: str
    value: float
    unit: str
    source: str
    formula: str = ""
    """of other figures; empty: an input"""
    group: str = ""
    """heading under which it is listed"""


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A number in a table or chart; its formula, of figures, is what the workbook calculates."""

    value: float
    unit: str
    formula: str = ""


@dataclass(kw_only=True)
class Figures:
    """The figures of one report, in the order in which they were added."""

    notation: Notation = field(default_factory=Notation)
    rows: dict[str, Figure] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Figure:
        return self.rows[key]

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def __iter__(self) -> Iterator[Figure]:
        return iter(self.rows.values())

    @property
    def values(self) -> dict[str, float]:
        return {figure.key: figure.value for figure in self}

    def put(self, group: str, key: str, label: str, value: float, unit: str, source: str) -> None:
        """An input; money is converted from dollars."""
        assert key not in self.rows, f"{key} has two sources"
        money = unit.startswith("money")
        value = float(value) * (self.notation.per_usd if money else 1.0)
        self.rows[key] = Figure(
            key=key, label=clean(label), value=value, unit=unit, source=clean(source), group=clean(group)
        )

    def derive(self, group: str, key: str, label: str, unit: str, formula: str, planner: float | None = None) -> None:
        """A figure that follows from others; `planner` is the same as the planner computed it, in dollars."""
        assert key not in self.rows, f"{key} has two formulas"
        value = self.evaluate(formula)
        if planner is not None:
            expected = planner * (self.notation.per_usd if unit.startswith("money") else 1.0)
            assert isclose(value, expected, rel_tol=AGREE, abs_tol=1e-12), f"{key}: {value} but planned {expected}"
        source = "formula" if planner is None else "formula, agrees with the planner"
        self.rows[key] = Figure(
            key=key, label=clean(label), value=value, unit=unit, source=source, formula=formula, group=group
        )

    def evaluate(self, formula: str, changes: Mapping[str, float] | None = None) -> float:
        """A formula of figures; with `changes` of inputs, everything that follows from them follows."""
        values = self.values
        if changes:
            values = self.recalculated(changes)
        return formulas.evaluate(formula, values)

    def recalculated(self, changes: Mapping[str, float]) -> dict[str, float]:
        """All values after changes of inputs, as the workbook recalculates them."""
        values: dict[str, float] = {}
        for figure in self:
            given = changes.get(figure.key, figure.value) if not figure.formula else None
            values[figure.key] = given if given is not None else formulas.evaluate(figure.formula, values)
        return values

    def amount(self, key: str) -> Amount:
        """A cell that shows a figure."""
        return Amount(value=self[key].value, unit=self[key].unit, formula=key)

    def calculated(self, formula: str, unit: str) -> Amount:
        """A cell that shows a formula of figures."""
        return Amount(value=self.evaluate(formula), unit=unit, formula=formula)

    def scaled(self, key: str, changed: str, factor: float) -> Amount:
        """A figure with one input multiplied by `factor`, as a formula of its own: what depends on the input is written
        out, the rest is referred to."""
        text = self._written_out(key, {changed: f"({changed} * {factor!r})"})
        return Amount(value=self.evaluate(text), unit=self[key].unit, formula=text)

    def _written_out(self, key: str, by: dict[str, str]) -> str:
        if key in by:
            return by[key]
        formula = self[key].formula
        if not formula or not self._depends(key, set(by)):
            return key
        inner = {name: self._written_out(name, by) for name in formulas.names(formula)}
        return f"({formulas.substitute(formula, inner)})"

    def _depends(self, key: str, on: set[str]) -> bool:
        formula = self[key].formula
        return key in on or (bool(formula) and any(self._depends(name, on) for name in formulas.names(formula)))

    def text(self, key: str, *, short: bool = True) -> str:
        figure = self[key]
        return self.notation.text(figure.value, figure.unit, short=short)

    def say(self, template: str, **words: object) -> str:
        """Prose with figures: {run_usd} is a figure's text, or a word that is passed in."""
        texts = {name: clean(str(word)) for name, word in words.items()}
        return template.format_map(_Texts(self, texts))


class _Texts(dict[str, str]):
    def __init__(self, figures: Figures, words: Mapping[str, str]) -> None:
        super().__init__(words)
        self.figures = figures

    def __missing__(self, key: str) -> str:
        return self.figures.text(key)
