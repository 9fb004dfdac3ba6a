"""A report as a sequence of sections made of paragraphs, lists, tables, charts and one diagram; no format yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from armillary.documents.figures import Amount, Figures
from armillary.documents.values import clean, is_rtl
from armillary.report.diagram import Diagram

Cell = str | Amount


def _cleaned(value: Any) -> Any:
    """Texts without characters that break a file or a line, in whatever they are nested."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list | tuple):
        return tuple(_cleaned(item) for item in value)
    return value


class Cleaned:
    """A record whose texts are clean, whoever wrote them."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, _cleaned(value))


@dataclass(frozen=True, kw_only=True)
class Paragraph(Cleaned):
    text: str


@dataclass(frozen=True, kw_only=True)
class Bullets(Cleaned):
    texts: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Table(Cleaned):
    """Rows under headings, with a caption; `total` sets the last row apart."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    total: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart(Cleaned):
    """Values of one or more series by category; `limit` is a line across (name, value). A span has two series: where
    each bar begins, and how long it is."""

    caption: str
    kind: Literal["bar", "line", "span"]
    categories: Sequence[str]
    series: Sequence[tuple[str, Sequence[Amount]]]
    limit: tuple[str, Amount] | None = None
    x_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Picture(Cleaned):
    """A diagram with a caption."""

    caption: str
    diagram: Diagram


Block = Paragraph | Bullets | Table | Chart | Picture


@dataclass(frozen=True, kw_only=True)
class Section(Cleaned):
    """A chapter; `points` are its few sentences on a slide (none: it has no slide)."""

    key: str
    title: str
    blocks: Sequence[Block]
    points: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that a format writes."""

    title: str
    subtitle: str
    company: str
    created: date
    figures: Figures
    sections: Sequence[Section]
    logo: str = ""
    templates: Sequence[str] = field(default=())

    @property
    def date_text(self) -> str:
        return self.created.strftime(self.figures.notation.date_format)

    def byline(self, *between: str, most: int | None = None) -> str:
        """Company (of `most` letters) and date, and what stands between them. In a line from right to left, marks keep
        the date's order."""
        date = f"\u200e{self.date_text}\u200e" if is_rtl(self.company) else self.date_text
        return " · ".join(filter(None, (clean(self.company, most), *between, date)))

    def cell_text(self, cell: Cell) -> str:
        return cell if isinstance(cell, str) else self.figures.notation.text(cell.value, cell.unit)

    def texts(self, table: Table) -> list[list[str]]:
        """Rows of a table as they are read."""
        return [[self.cell_text(cell) for cell in row] for row in table.rows]

    def template(self, suffix: str) -> str | None:
        """The user's template for files of this suffix."""
        return next((path for path in self.templates if path.lower().endswith(suffix)), None)
