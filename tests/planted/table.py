"""The table of verdicts, for a terminal and as a page."""

from __future__ import annotations

import time
from collections.abc import Sequence

from armillary.machine.machine import here
from tests.planted.judge import ALL_RULES, NEEDED, Verdict, counts
from tests.planted.problem import Wish
from tests.planted.quiet import LOUD

COLUMNS = ("problem", "run", "expected", "diagnosed", "first lever", "right")
_WHAT = {"loop": "right loop", "cause": "right cause", "lever": "first lever right", "healthy": "healthy left alone"}


def row(verdict: Verdict) -> list[str]:
    """One line, by COLUMNS."""
    problem, found, lever = verdict.problem, verdict.found, verdict.lever
    expected = "healthy" if problem.healthy else f"{problem.loop}: {' or '.join(problem.causes)}"
    said = "healthy" if found.is_healthy else f"{found.loop}: {found.cause}"
    pulled = (
        f"{lever.sets or lever.action or lever.title}, {lever.speedup:.2f} ×" if lever else f"{found.gain:.0%} left"
    )
    wrong = [name for name, right in verdict.right.items() if not right]
    made = "recorded" if problem.recorded else "simulated" if problem.simulated else f"live, {verdict.seconds:.0f} s"
    made += f", {verdict.others:.1f} cores taken" if verdict.others > LOUD else ""
    return [problem.name, made, expected, said, pulled, "yes" if not wrong else f"no: {', '.join(wrong)}"]


def summary(verdicts: Sequence[Verdict]) -> list[str]:
    """right loop 18 of 18 (needed 17) …"""
    lines = []
    for name, (right, of) in counts(verdicts).items():
        least = -int(-NEEDED.get(name, 1.0) * of // 1)
        lines.append(f"{_WHAT[name]} {right} of {of} (needed {least})")
    return lines


def summary_of_sets(verdicts: Sequence[Verdict]) -> list[str]:
    """The same apart for the runs that thresholds were set on and for those they were not."""
    lines = []
    for name in ("tuning", "judging"):
        inside = [verdict for verdict in verdicts if verdict.of_set == name]
        texts = [f"{_WHAT[what]} {right} of {of}" for what, (right, of) in counts(inside).items()]
        lines.append(f"{name} set ({len(inside)} runs): {', '.join(texts) or 'none'}")
    return lines


def unproven(verdicts: Sequence[Verdict]) -> list[str]:
    """Rules by whether they found the right cause in a run of the judging set; one that did not is unproven, and so is
    one whose problem is not planted."""
    right = [one for one in verdicts if one.of_set == "judging" and one.right.get("cause")]
    proven = {name for one in right for name in one.fired}
    missing = sorted(set(ALL_RULES) - proven)
    return [
        f"rules that were right on the judging set: {len(proven)} of {len(ALL_RULES)}",
        f"unproven: {', '.join(missing) or 'none'}",
    ]


def as_page(verdicts: Sequence[Verdict], wish: Wish, drawn: int | None = None) -> str:
    """As Markdown, dated, with the machine's name."""
    day, machine = time.strftime("%Y-%m-%d", time.gmtime()), here().text()
    plain = f"size {wish.size:g}, severity {wish.severity:g}, seed {wish.seed}"
    how = "" if drawn is None else f" --draw {drawn}"
    drew = plain if drawn is None else "a severity from 0.7 to 2 and a seed drawn for each"
    lines = [
        "# Planted problems",
        "",
        f"`python -m benchmarks.planted{how} --write`, {day}, {machine}; {drew}. "
        "Live runs were made by the trainer and the engine on this machine; recorded ones on an H200 "
        "(`tests/planted/recorded`); simulated ones are logs and pages of other programs (`tests/planted/others.py`).",
        "",
        f"{'; '.join(summary(verdicts))}.",
        "",
        f"{'; '.join(summary_of_sets(verdicts))} (`tests/planted/sets.py`).",
        "",
        *unproven(verdicts),
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    return "\n".join([*lines, *("| " + " | ".join(row(one)) + " |" for one in verdicts)]) + "\n"


def as_text(verdict: Verdict) -> str:
    """One line for a terminal."""
    widths = (19, 10, 34, 34, 46, 0)
    return " ".join(text.ljust(width) for text, width in zip(row(verdict), widths, strict=True)).rstrip()
