"""Thresholds: every one has a meaning, a date and what it was set on, and is used."""

from __future__ import annotations

import copy
import re
from pathlib import Path

from armillary.diagnosis.evidence import thresholds
from armillary.diagnosis.evidence.thresholds import TABLE, Count, Threshold


def test_every_threshold_says_where_it_is_from() -> None:
    assert len(TABLE) >= 80
    for name, threshold in TABLE.items():
        assert threshold.meaning and threshold.set_on and re.fullmatch(r"2026-\d\d-\d\d", threshold.date), name


def test_every_threshold_is_used_by_a_rule_or_a_lever() -> None:
    folder = Path(thresholds.__file__).parent.parent
    text = "".join(path.read_text() for path in folder.rglob("*.py") if path.name != "thresholds.py")
    assert [name for name in TABLE if not re.search(rf"\b{name}\b", text)] == []


def test_a_threshold_is_a_number_that_can_be_copied() -> None:
    share, count = Threshold(0.5, "a share"), Count(3, "a count")
    assert share * 2 == 1.0 and list(range(count)) == [0, 1, 2]
    assert copy.deepcopy(share).meaning == "a share" and copy.deepcopy(count) == 3
