"""What the readers of other people's logs share: plain lines, clock times, numbers, and steps put in order."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median

from armillary.store.gauges import Record

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
WARM_UP = 0.1
"""share of the steps at the beginning that may be slow: compiling, filling caches"""


def plain_lines(text: str) -> list[str]:
    """Without colours; what a progress bar wrote over itself comes line by line."""
    return _COLOURS.sub("", text).replace("\r", "\n").split("\n")


def clock(line: str) -> float | None:
    """Unix seconds of the first date and time in a line; time zones do not matter for differences."""
    match = _CLOCK.search(line)
    if match is None:
        return None
    try:
        seconds = datetime.fromisoformat(f"{match[1]}T{match[2]}+00:00").timestamp()
    except ValueError:
        return None
    return seconds + (float(f"0.{match[3]}") if match[3] else 0.0)


def number(text: str | None) -> float | None:
    """'3,113', '1.2E-04' and '12' as numbers."""
    try:
        return float(text.replace(",", "")) if text is not None else None
    except ValueError:
        return None


def read_fields(text: str, fields: Mapping[str, tuple[re.Pattern[str], float]]) -> Record:
    """Gauge -> number times scale, of the fields (pattern, scale) that the text has."""
    matches = [(name, match, scale) for name, (pattern, scale) in fields.items() if (match := pattern.search(text))]
    return {name: value * scale for name, match, scale in matches if (value := number(match[1])) is not None}


def in_order(records: Iterable[Record]) -> list[Record]:
    """One record per step, the first where several ranks wrote it; a run that was restarted goes on from its last
    beginning."""
    by_step: dict[int, Record] = {}
    last = -1
    for record in records:
        step = int(record["step"])
        if step < last:
            by_step = {before: earlier for before, earlier in by_step.items() if before < step}
        by_step.setdefault(step, record)
        last = step
    return [by_step[step] for step in sorted(by_step)]


def with_step_times(records: Sequence[Record]) -> list[Record]:
    """step_s from the clock between two lines, where a line has none of its own."""
    timed = list(records)
    for index, (before, record) in enumerate(pairwise(records), 1):
        if "step_s" not in record and "time" in record and "time" in before:
            count, seconds = record["step"] - before["step"], record["time"] - before["time"]
            if count > 0 and seconds > 0:
                timed[index] = record | {"step_s": seconds / count}
    return timed


def without_warm_up(records: Sequence[Record], unit: str = "lines") -> tuple[list[Record], list[str]]:
    """(records, a note): without those at the beginning that took half as long again as is usual."""
    times = [record["step_s"] for record in records if "step_s" in record]
    if len(times) < 6:
        return list(records), []
    usual, most = median(times), max(1, int(WARM_UP * len(records)))
    first = 0
    while first < most and records[first].get("step_s", 10 * usual) > 1.5 * usual:
        first += 1
    return list(records[first:]), [f"{first} {unit} of warm-up were left out"] if first else []
