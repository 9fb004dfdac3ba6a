"""Bars stay inside their drawing, whatever their names and values."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from armillary.diagnosis.report.bars import bar_plot

VALUE = st.none() | st.floats(0, 1e9)


@given(st.lists(st.tuples(st.text("abc x→", min_size=1, max_size=60), st.tuples(VALUE, VALUE)), max_size=5))
def test_bars_stay_inside(rows: list[tuple[str, tuple[float | None, float | None]]]) -> None:
    made = bar_plot(rows, ["before", "after"], label="bars", text=lambda value: f"{value:.3g}")
    if not any(value for _, values in rows for value in values):
        assert made == ""
        return
    for svg in re.findall(r"<svg.*?</svg>", made):
        ((width, height),) = re.findall(r"viewBox='0 0 (\d+) (\d+)'", svg)
        bars = re.findall(r"<rect x='([\d.]+)' y='([\d.]+)' width='([\d.]+)' height='([\d.]+)'", svg)
        assert len(bars) == sum(value is not None for _, values in rows for value in values)
        assert all(float(x) + float(w) < int(width) and float(y) + float(h) <= int(height) for x, y, w, h in bars)


def test_a_bar_is_as_long_as_its_value_says() -> None:
    made = bar_plot([("p50", [1.0, 2.0])], ["before", "after"], label="bars", text=str)
    first, second, *_ = (float(width) for width in re.findall(r"<rect[^>]* width='([\d.]+)'", made))
    assert second == 2 * first and "before" in made and "var(--two)" in made
