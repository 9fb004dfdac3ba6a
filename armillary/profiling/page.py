"""A profile as one HTML file: budget bar, findings, roofline plot, tables, gaps, memory, Amdahl.

The file stands alone: no script, no font, no address is loaded. Every text from the trace is escaped, because kernel
names are full of angle brackets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from armillary.profiling.compare import Comparison
from armillary.profiling.plots import memory_plot, roofline_plot, work_colour
from armillary.profiling.profile import BUDGET, Profile, Row
from armillary.profiling.short_name import short_name
from armillary.profiling.words import (
    PART_WORDS,
    ROW_HEADS,
    amdahl_cells,
    change_cells,
    figures,
    row_cells,
    top_operators,
    top_rows,
)
from armillary.units import bytes_text, seconds_text

_TOP = 25


def write_page(profile: Profile, path: Path, comparison: Comparison | None = None) -> Path:
    path.write_text(page(profile, comparison), encoding="utf-8")
    return path


def page(profile: Profile, comparison: Comparison | None = None) -> str:
    """The whole document."""
    template = Template((files("armillary.profiling") / "page.html").read_text(encoding="utf-8"))
    parts = [_head(profile), _budget(profile), _findings(profile), _compared(comparison), _roofline(profile)]
    parts += [_table(profile), _two(_gaps(profile), _amdahl(profile)), _memory(profile), _notes(profile)]
    return template.substitute(title=escape(f"{profile.source}: profile"), body="\n".join(filter(None, parts)))


def _head(profile: Profile) -> str:
    steps = f"{profile.steps:,} step{'s' if profile.steps > 1 else ''} of {seconds_text(profile.step_s)}"
    roof = {"measured": "held against ceilings measured on it", "catalogue": "held against the catalogue's ceilings",
            "unknown": "its ceilings are not known"}[profile.roof.source]  # fmt: skip
    return f"<h1>{escape(profile.source)}</h1>\n<div class='sub'>{steps} on {escape(profile.device)} · {roof}</div>"


# --- budget and findings


def _budget(profile: Profile) -> str:
    parts = [(part, profile.fraction(part)) for part in BUDGET if profile.fraction(part) >= 5e-4]
    bar = "".join(
        f"<span style='width:{share:.3%};background:var(--{part})' title='{PART_WORDS[part]} {share:.1%}: "
        f"{BUDGET[part]}'></span>"
        for part, share in parts
    )
    legend = "".join(
        f"<span title='{BUDGET[part]}'><i style='background:var(--{part})'></i>{PART_WORDS[part]} "
        f"<b>{share:.1%}</b> <span class='note'>{seconds_text(share * profile.step_s)}</span></span>"
        for part, share in parts
    )
    title = f"Where a step of {seconds_text(profile.step_s)} goes"
    return _section(title, f"<div class='bar'>{bar}</div><div class='legend'>{legend}</div>")


def _findings(profile: Profile) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in profile.findings)
    return _section("What to look at first", f"<ol>{items}</ol>") if items else ""


def _notes(profile: Profile) -> str:
    items = "".join(f"<li class='note'>{escape(text)}</li>" for text in profile.notes)
    return _section("Notes", f"<ul>{items}</ul>") if items else ""


# --- plots


def _roofline(profile: Profile) -> str:
    drawing = roofline_plot(profile)
    if not drawing:
        return ""
    works = dict.fromkeys(row.work for row in top_rows(profile, _TOP) if row.intensity)
    legend = "".join(f"<span><i style='background:{work_colour(work)}'></i>{escape(work)}</span>" for work in works)
    note = "<div class='note'>each point is a kernel or operator, its area its time; hover for its figures</div>"
    return _section("Roofline", f"{drawing}<div class='legend'>{legend}</div>{note}")


def _memory(profile: Profile) -> str:
    memory = profile.memory
    if memory is None or not memory.times_s:
        return ""
    peak = f"peak {bytes_text(memory.peak_bytes)} at {seconds_text(memory.peak_s)}"
    tables = [
        _html_table([title, "bytes"], [[name, bytes_text(value)] for name, value in _largest(held)])
        for title, held in (("category", memory.by_category), ("module", memory.by_module))
        if held
    ]
    return _section(f"Memory: {peak}", memory_plot(memory) + _two(*tables))


def _largest(held: object, limit: int = 8) -> list[tuple[str, float]]:
    assert hasattr(held, "items")
    return sorted(held.items(), key=lambda item: -item[1])[:limit]


# --- tables


def _table(profile: Profile) -> str:
    """Kernels, where a device ran them, and operators with the kernels that did their work."""
    kernels = [_row(row, profile.steps) for row in top_rows(profile, _TOP)] if profile.kernels else []
    operators = [_row(row, profile.steps) for row in top_operators(profile, _TOP)]
    parts = [_section("Kernels, a step", _html_table(ROW_HEADS, kernels)) if kernels else ""]
    parts.append(_section("Operators, a step", _html_table(ROW_HEADS, operators)) if operators else "")
    return "\n".join(filter(None, parts))


def _row(row: Row, steps: int) -> list[str]:
    """The name is cut short; the whole of it, and what else is known, shows on hovering."""
    name, *others = row_cells(row, steps)
    return [_Hover(short_name(name), f"{name}\n{figures(row, steps)}"), *others]


class _Hover(str):
    """A cell's text with more to say."""

    more: str

    def __new__(cls, text: str, more: str) -> _Hover:
        made = super().__new__(cls, text)
        made.more = more
        return made


def _gaps(profile: Profile) -> str:
    rows = [[seconds_text(gap.seconds), gap.cause, gap.what, gap.where] for gap in profile.gaps[:12]]
    return _section("Longest gaps", _html_table(["", "cause", "host was at", "line"], rows)) if rows else ""


def _amdahl(profile: Profile) -> str:
    rows = amdahl_cells(profile)
    table = _html_table(["", "share", "2 × faster buys", "at most"], rows)
    return _section("What a speedup would buy (Amdahl)", table) if rows else ""


def _compared(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    title = f"Against {comparison.before}: {comparison.speedup:.2f} × as fast"
    parts = [[PART_WORDS[change.name], *change_cells(change)] for change in comparison.budget]
    changes = comparison.kernels[:_TOP]
    kernels = [[_Hover(short_name(change.name), change.name), *change_cells(change)] for change in changes]
    heads = ["before", "after", "saved", "times"]
    return _section(title, _html_table(["part", *heads], parts) + _html_table(["name", *heads], kernels))


# --- HTML


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"


def _two(*parts: str) -> str:
    there = [part for part in parts if part]
    return f"<div class='two'>{''.join(there)}</div>" if len(there) > 1 else "".join(there)


def _html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [list(row) for row in rows]
    kinds = [_kind(column, [row[column] for row in cells]) for column in range(len(heads))]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, heads, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, kinds, row))}</tr>" for row in cells)
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"


def _cell(kind: str, text: str) -> str:
    title = f' title="{escape(text.more, quote=True)}"' if isinstance(text, _Hover) else ""
    return f"<td{kind}{title}>{escape(text)}</td>"


def _kind(column: int, texts: Sequence[str]) -> str:
    """Numbers to the right; long names in the first column may break."""
    known = [text for text in texts if text != "–"]
    if known and all(text[:1].isdigit() for text in known):
        return " class='number'"
    return " class='name'" if column == 0 and any(len(text) > 24 for text in known) else ""
