"""A profile on the terminal: the budget in a line, findings, then tables of what is behind them."""

from collections.abc import Sequence

from armillary.cli.output import Output
from armillary.profiling.analysis.compare import Comparison, compare
from armillary.profiling.profile import Profile, Row
from armillary.profiling.report.profile_text import (
    PART_WORDS,
    ROW_HEADS,
    amdahl_cells,
    budget_line,
    change_cells,
    memory_line,
    row_cells,
    top_operators,
    top_rows,
)
from armillary.profiling.trace.event_classes import short_name
from armillary.units import seconds_text

_ROWS, _GAPS = 10, 5
_NAME = 38
_CHANGED = ("before", "after", "saved", "times")


def say_profile(out: Output, profile: Profile) -> None:
    out.say(budget_line(profile))
    for number, finding in enumerate(profile.findings, start=1):
        out.say(f"{number}. {finding}")
    _say_rows(out, profile)
    _say_gaps(out, profile)
    _say_amdahl(out, profile)
    if profile.memory:
        out.say(f"\n{memory_line(profile)}")
    for note in profile.notes:
        out.say(f"note: {note}")


def _say_rows(out: Output, profile: Profile) -> None:
    rows = top_rows(profile, _ROWS)
    if not rows:
        return
    if profile.kernels:
        _say_table(out, "kernels, per step", rows, profile.steps)
    _say_table(out, "operators, per step", top_operators(profile, _ROWS), profile.steps)


def _say_table(out: Output, title: str, rows: Sequence[Row], steps: int) -> None:
    of = [index for index, head in enumerate(ROW_HEADS) if head not in ("work", "module")]
    cells = [[_short(row_cells(row, steps)[index]) for index in of] for row in rows]
    if cells:
        out.say()
        out.table(title, [ROW_HEADS[index] for index in of], cells)


def _say_gaps(out: Output, profile: Profile) -> None:
    if profile.gaps:
        cells = [[seconds_text(gap.seconds), gap.cause, _short(gap.what), gap.where] for gap in profile.gaps[:_GAPS]]
        out.say()
        out.table("longest gaps", ["", "cause", "host was at", "line"], cells)


def _say_amdahl(out: Output, profile: Profile) -> None:
    cells = amdahl_cells(profile)[:6]
    if cells:
        out.say()
        out.table("what a speedup would gain (Amdahl)", ["", "share", "2 × faster", "at most"], cells)


def _short(text: str) -> str:
    """A kernel's name may be a thousand characters of template arguments."""
    return short_name(text, _NAME)


def say_comparison(out: Output, before: Profile, after: Profile) -> Comparison:
    """Budget by budget, then the kernels that changed most."""
    comparison = compare(before, after)
    out.say(
        f"\nstep {seconds_text(comparison.before_step_s)} → {seconds_text(comparison.after_step_s)}, "
        f"{comparison.speedup:.2f} ×"
    )
    parts = [change for change in comparison.budget if change.before_s or change.after_s]
    out.table("", ["", *_CHANGED], [[PART_WORDS[change.name], *change_cells(change)] for change in parts])
    out.say()
    out.table(
        "", ["", *_CHANGED], [[_short(change.name), *change_cells(change)] for change in comparison.kernels[:_ROWS]]
    )
    return comparison
