"""The track record: what was predicted of levers and what came of them, kept in the store, so that honesty shows.

One JSON line a comparison; the same two runs compared again replace the line before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from armillary.errors import BadData
from armillary.spec.fields import build, to_plain
from armillary.store import strict_json
from armillary.store.atomic import plain_errors, write_text
from armillary.store.home import Home


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One lever that was predicted, and what it brought once it was pulled."""

    run: str
    """the run that was diagnosed"""
    title: str
    """the lever"""
    change: Mapping[str, Any] = field(default_factory=dict)
    """key of the recipe -> value"""
    of: str = "step_s"
    """the gauge that the speed-ups are about"""
    predicted: float
    """speed-up, before"""
    predicted_at: float
    """unix seconds of the prediction"""
    obtained: float | None = None
    """speed-up, measured; none: not pulled yet"""
    by: str = ""
    """the run with the lever pulled"""
    recipe: str = ""
    """the file that the changed recipe was written to"""

    @property
    def error(self) -> float | None:
        """|obtained / predicted − 1|."""
        return abs(self.obtained / self.predicted - 1) if self.obtained is not None else None


def path_of(home: Home) -> Path:
    return home.work / "track-record.jsonl"


def read_record(home: Home) -> list[Kept]:
    """Every line, oldest first."""
    path = path_of(home)
    if not path.is_file():
        return []
    return [_parsed(line, path) for line in path.read_text().splitlines() if line.strip()]


def _parsed(line: str, path: Path) -> Kept:
    try:
        values = strict_json.loads(line)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise BadData(f"{path} has a broken line: {line[:40]!r}; delete that line to read the rest")
    return build(Kept, values, str(path))


def remember(home: Home, kept: Kept) -> None:
    """Add a line; one about the same run, change and outcome gives way."""
    same = (kept.run, dict(kept.change), kept.title, kept.by)
    others = [one for one in read_record(home) if (one.run, dict(one.change), one.title, one.by) != same]
    if kept.by:  # what was only predicted has come true
        others = [one for one in others if one.by or (one.run, dict(one.change)) != (kept.run, dict(kept.change))]
    path = path_of(home)
    with plain_errors(path):
        os.makedirs(path.parent, exist_ok=True)
    write_text(path, "".join(strict_json.dumps(to_plain(one)) + "\n" for one in [*others, kept]))


def summary(record: list[Kept]) -> str:
    """'15 levers, median error 8 %'."""
    errors = [one.error for one in record if one.error is not None]
    if not errors:
        return "no lever was measured yet"
    count = f"{len(errors)} lever" + ("s" if len(errors) > 1 else "")
    return f"{count}, median error {median(errors):.0%}"
