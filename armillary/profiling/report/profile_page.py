"""A profile as one HTML file: budget bar, findings, roofline plot, tables, gaps, memory, Amdahl.

The file stands alone: no script, no font, no address is loaded. Every text from the trace is escaped, because kernel
names are full of angle brackets.
"""

from collections.abc import Iterable, Sequence
from heapq import nlargest
from pathlib import Path

from armillary.profiling.analysis.compare import Comparison
from armillary.profiling.profile import BUDGET, Profile, Row
from armillary.profiling.report.profile_text import (
    PART_WORDS,
    ROW_HEADS,
    amdahl_cells,
    change_cells,
    figures,
    row_cells,
    top_operators,
    top_rows,
)
from armillary.profiling.trace.event_classes import short_name
from armillary.report.bars import shares
from armillary.report.charts import Point, area, legend, scatter
from armillary.report.page import Hover, document, heading, items, section, side_by_side, table
from armillary.units import bandwidth_text, bytes_text, flops_per_s_text, scaled, seconds_text

_TOP = 25
_SEEN = 5e-4
"""share of a step from which a part is shown"""
_OTHERS = tuple(f"var(--{name})" for name in ("one", "three", "four", "two"))
_MAX_ROOFLINE_POINTS = 400
_COLOURS = {
    "gemm": "#2f6fd0",
    "attention": "#7a4fc0",
    "conv": "#1f9d8a",
    "norm": "#d08a1f",
    "elementwise": "#d9572b",
    "softmax": "#c23b6b",
    "embedding": "#5b8c2a",
    "optimizer": "#8a6d3b",
    "copy": "#3a8fb7",
    "collective": "#a0439c",
}
_NO_COLOUR = "#8892a4"


def write_page(profile: Profile, path: Path, comparison: Comparison | None = None) -> Path:
    path.write_text(page(profile, comparison), encoding="utf-8")
    return path


def page(profile: Profile, comparison: Comparison | None = None) -> str:
    bar = budget_bar(((part, profile.fraction(part)) for part in BUDGET), profile.step_s)
    parts = [
        _head(profile),
        section(f"Where a step of {seconds_text(profile.step_s)} goes", bar),
        section("What to look at first", items(profile.findings, numbered=True)),
        _compared(comparison),
        _roofline(profile),
        _table(profile),
        side_by_side(_gaps(profile), _amdahl(profile)),
        _memory(profile),
        section("Notes", items(profile.notes, kind="note")),
    ]
    return document(f"{profile.source}: profile", parts)


def _head(profile: Profile) -> str:
    steps = f"{profile.steps:,} step{'s' if profile.steps > 1 else ''} of {seconds_text(profile.step_s)}"
    roofline = {
        "measured": "compared with ceilings measured on it",
        "catalogue": "compared with the catalogue's ceilings",
        "unknown": "its ceilings are not known",
    }[profile.roofline.source]
    return heading(profile.source, f"{steps} on {profile.device} · {roofline}")


def budget_bar(fractions: Iterable[tuple[str, float]], step_s: float) -> str:
    """One stacked bar of a step's parts: (name, share of the step). A part that BUDGET does not list keeps its name."""
    parts = [(part, share) for part, share in fractions if share >= _SEEN]
    other_parts = [part for part, _ in parts if part not in BUDGET]
    return shares(
        [
            (
                PART_WORDS.get(part, part.replace("_", " ")),
                share,
                f"var(--{part})" if part in BUDGET else _OTHERS[other_parts.index(part) % len(_OTHERS)],
                seconds_text(share * step_s),
                BUDGET.get(part, ""),
            )
            for part, share in parts
        ]
    )


# --- plots


def _roofline(profile: Profile) -> str:
    chart = roofline_chart(profile, top_rows(profile, _TOP))
    note = "<div class='note'>each point is a kernel or operator, its area its time; hover for its figures</div>"
    return section("Roofline", chart + note) if chart else ""


def roofline_chart(profile: Profile, shown: Sequence[Row]) -> str:
    """FLOP/s over arithmetic intensity under the device's limits, with a legend of the work classes in `shown`; empty
    where no row has both FLOPs and bytes."""
    rows = sorted(profile.kernels or profile.operators, key=lambda row: -row.seconds)
    points = [
        Point(
            x=row.intensity,
            y=row.flops_per_s,
            weight=row.seconds,
            colour=_COLOURS.get(row.work, _NO_COLOUR),
            hover=f"{row.name}\n{figures(row, profile.steps)}",
        )
        for row in rows
        if row.intensity and row.flops_per_s
    ]
    if not points:
        return ""
    roofline = profile.roofline
    chart = scatter(
        points[:_MAX_ROOFLINE_POINTS],
        label="Roofline: FLOP/s over FLOPs per byte",
        x_name="FLOP per byte",
        y_text=lambda value: scaled(value, "FLOP/s", digits=1) if value >= 1 else f"{value:g}",
        slope=(roofline.bytes_per_s, f"memory {bandwidth_text(roofline.bytes_per_s)}")
        if roofline.bytes_per_s
        else None,
        levels=[(peak, f"{dtype} {flops_per_s_text(peak)}", dtype) for dtype, peak in roofline.flops.items()],
    )
    works = dict.fromkeys(row.work for row in shown if row.intensity)
    return chart + legend((_COLOURS.get(work, _NO_COLOUR), work) for work in works)


def _memory(profile: Profile) -> str:
    memory = profile.memory
    if memory is None or not memory.times_s:
        return ""
    peak = f"peak {bytes_text(memory.peak_bytes)} at {seconds_text(memory.peak_s)}"
    tables = [
        table([title, "bytes"], [[name, bytes_text(sizes[name])] for name in nlargest(8, sizes, key=sizes.__getitem__)])
        for title, sizes in (("category", memory.by_category), ("module", memory.by_module))
        if sizes
    ]
    chart = area(
        list(zip(memory.times_s, memory.bytes, strict=True)),
        label="Memory in use over time",
        x_name="time",
        x_text=seconds_text,
        y_text=bytes_text,
        peak=(memory.peak_s, memory.peak_bytes),
    )
    return section(f"Memory: {peak}", chart + side_by_side(*tables))


# --- tables


def _table(profile: Profile) -> str:
    """Kernels, where a device ran them, and operators with the kernels that did their work."""
    kernels = [_row(row, profile.steps) for row in top_rows(profile, _TOP)] if profile.kernels else []
    operators = [_row(row, profile.steps) for row in top_operators(profile, _TOP)]
    parts = [section("Kernels, per step", table(ROW_HEADS, kernels)) if kernels else ""]
    parts.append(section("Operators, per step", table(ROW_HEADS, operators)) if operators else "")
    return "\n".join(filter(None, parts))


def _row(row: Row, steps: int) -> list[str]:
    """The name is shortened; the full name and the details show on hovering."""
    name, *cells = row_cells(row, steps)
    return [Hover(short_name(name), f"{name}\n{figures(row, steps)}"), *cells]


def _gaps(profile: Profile) -> str:
    rows = [[seconds_text(gap.seconds), gap.cause, gap.what, gap.where] for gap in profile.gaps[:12]]
    return section("Longest gaps", table(["", "cause", "host was at", "line"], rows)) if rows else ""


def _amdahl(profile: Profile) -> str:
    rows = amdahl_cells(profile)
    inside = table(["", "share", "2 × faster buys", "at most"], rows) if rows else ""
    return section("What a speedup would buy (Amdahl)", inside)


def _compared(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    title = f"Against {comparison.before}: {comparison.speedup:.2f} × as fast"
    parts = [[PART_WORDS[change.name], *change_cells(change)] for change in comparison.budget]
    changes = comparison.kernels[:_TOP]
    kernels = [[Hover(short_name(change.name), change.name), *change_cells(change)] for change in changes]
    heads = ["before", "after", "saved", "times"]
    return section(title, table(["part", *heads], parts) + table(["name", *heads], kernels))
