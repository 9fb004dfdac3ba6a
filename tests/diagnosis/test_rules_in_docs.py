"""Every rule is listed in docs/diagnosis.md."""

from __future__ import annotations

from pathlib import Path

from tests.planted.judge import ALL_RULES


def test_there_are_at_least_45_rules_and_each_is_documented() -> None:
    rows = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text(encoding="utf-8").split("\n")
    listed = {
        f"{cells[1].strip().strip('`')}.{name.strip().strip('`')}"
        for row in rows
        if row.startswith("| `") and len(cells := row.split("|")) == 4
        for name in cells[2].split(",")
    }
    assert len(ALL_RULES) >= 45
    assert set(ALL_RULES) <= listed, sorted(set(ALL_RULES) - listed)
