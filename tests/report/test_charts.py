"""Charts: what is drawn stays inside its frame and is as long as its value says."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from armillary.report.bars import Bar, BarGroup, bars, bars_file, series_bars, shares
from armillary.report.charts import Frame, Point, drawing, lines, scatter, text_width, thinned
from armillary.report.standalone import standalone_svg
from tests.profiling.report.test_profile_page import Tags

VALUE = st.none() | st.floats(0, 1e9)


@given(st.lists(st.tuples(st.text("abc x→", min_size=1, max_size=60), st.tuples(VALUE, VALUE)), max_size=5))
def test_bars_stay_inside(rows: list[tuple[str, tuple[float | None, float | None]]]) -> None:
    made = series_bars(rows, ["before", "after"], label="bars", text=lambda value: f"{value:.3g}")
    if not any(value for _, values in rows for value in values):
        assert made == ""
        return
    for svg in re.findall(r"<svg.*?</svg>", made):
        ((width, height),) = re.findall(r"viewBox='0 0 (\d+) (\d+)'", svg)
        bars = re.findall(r"<rect x='([\d.]+)' y='([\d.]+)' width='([\d.]+)' height='([\d.]+)'", svg)
        assert len(bars) == sum(value is not None for _, values in rows for value in values)
        assert all(float(x) + float(w) < int(width) and float(y) + float(h) <= int(height) for x, y, w, h in bars)


def test_a_bar_is_as_long_as_its_value_says() -> None:
    made = series_bars([("p50", [1.0, 2.0])], ["before", "after"], label="bars", text=str)
    first, second, *_ = (float(width) for width in re.findall(r"<rect[^>]* width='([\d.]+)'", made))
    assert second == 2 * first and "before" in made and "var(--two)" in made


def test_a_long_name_ends_inside_the_drawing() -> None:
    made = bars([BarGroup(name="x" * 400, bars=[Bar(value=1.0, text="1")])], label="names")
    for width, name in re.findall(r"viewBox='0 0 (\d+) .*?<text [^>]*>(x+…)</text>", made):
        assert 20 < len(name) < int(width) / 7
    assert made.count("…</text>") == 2


def test_a_text_stands_behind_the_line_of_a_limit() -> None:
    groups = [BarGroup(name=name, bars=[Bar(value=value, text="9 GB")]) for name, value in (("a", 0.2), ("b", 0.97))]
    made = bars(groups, label="memory", full=1.0, limit=1.0).partition("</svg>")[0]
    line = float(re.findall(r"class='mark' x1='([\d.]+)'", made)[0])
    near, far = (float(x) for x in re.findall(r"<text x='([\d.]+)' y='[\d.]+'>9 GB", made))
    assert near < line / 2 and line < far < line + 10


def test_a_drawing_is_made_for_both_widths() -> None:
    frames = (Frame(width=900, height=100, left=50), Frame(width=400, height=80, left=40))
    made = drawing(lambda frame: f"<text>{frame.across}</text>", "a <plot>", frames)
    assert "viewBox='0 0 900 100'" in made and ">834</text>" in made and ">344</text>" in made
    assert "a &lt;plot&gt;" in made and made.index("on-wide") < made.index("on-narrow")


def test_thinning_keeps_the_peak() -> None:
    points = thinned([(float(i), float(i == 7777)) for i in range(10_000)], most=100)
    assert 50 <= len(points) <= 100 and (7777.0, 1.0) in points and points[0] == (0.0, 0.0)
    falling = thinned([(float(i), -float(i == 7777)) for i in range(10_000)], most=100)
    assert (7777.0, -1.0) in falling


def test_lines_share_their_axes() -> None:
    chart = lines([("a", [(0.0, 1.0), (10.0, 3.0)]), ("none", [])], label="l", x_name="step", marks=[(2.0, "<here>")])
    assert chart.count("<polyline") == 2 and "&lt;here&gt;" in chart and ">none<" not in chart
    assert Tags(chart).open == []
    assert lines([("none", [])], label="l", x_name="step") == ""


def test_a_scatter_point_lies_under_its_limits() -> None:
    point = Point(x=2.0, y=5e11, weight=1.0, colour="red", hover="a <b>")
    chart = scatter(
        [point], label="s", x_name="x", y_text=str, slope=(1e12, "memory"), levels=[(4e12, "bf16 4 TFLOP/s", "bf16")]
    )
    assert chart.count("class='limit'") == 4 and "a &lt;b&gt;" in chart and Tags(chart).open == []
    level = float(re.findall(r"d='M[\d.]+,([\d.]+)H", chart)[0])
    assert float(re.findall(r"cy='([\d.]+)'", chart)[0]) > level


def test_shares_and_files_escape_their_texts() -> None:
    chart = shares([("<a>", 0.25, "var(--one)", "1 s", "b's")])
    assert "width:25.000%" in chart and "&lt;a&gt; <b>25.0%</b>" in chart and Tags(chart).open == []
    assert shares([]) == ""
    assert bars_file([], label="l", caption="<c>").count("&lt;c&gt;") == 1


def test_a_chart_as_a_file_has_its_legend_below() -> None:
    chart = lines([("a < b", [(1.0, 0.5), (2.0, 0.2)]), ("two", [(1.0, 0.4), (2.0, 0.1)])], label="Shares", x_name="n")
    plain, keyed = standalone_svg(chart), standalone_svg(chart, legend=True)
    assert "<rect" not in plain and ">a &lt; b</text>" in keyed and ">two</text>" in keyed
    heights = [int(re.search(r" height='(\d+)'", each).group(1)) for each in (plain, keyed)]  # type: ignore[union-attr]
    assert heights[1] > heights[0] and f"0 0 960 {heights[1]}" in keyed
    assert "var(" not in keyed and ElementTree.fromstring(keyed).tag.endswith("svg")


def test_a_long_legend_has_several_rows() -> None:
    chart = lines([(f"a name of some length, {i}", [(1.0, 0.5), (2.0, i)]) for i in range(6)], label="l", x_name="n")
    keyed = standalone_svg(chart, legend=True)
    boxes = re.findall(r"<rect x='(\d+)' y='(\d+)' width='11'", keyed)
    assert len(boxes) == 6 and len({y for _, y in boxes}) > 1 and max(int(x) for x, _ in boxes) < 800
    height = int(re.search(r" height='(\d+)'", keyed).group(1))  # type: ignore[union-attr]
    assert max(int(y) for _, y in boxes) + 11 < height


def test_names_in_the_margin_have_the_width_of_their_letters() -> None:
    """`Comm exposed` was cut off where the font is wide."""
    assert text_width("Comm exposed") > 110 and text_width("illicit") < 50 and text_width("漢字") == 28

    def margin(name: str) -> float:
        drawn = bars([BarGroup(name=name, bars=[Bar(value=1.0, text="1")])], label="x")
        return float(re.findall(r"<rect x='([\d.]+)'", drawn)[0])

    assert margin("Comm exposed") >= text_width("Comm exposed") + 9 > margin("illicit")


def test_labels_of_the_y_axis_fit_its_margin() -> None:
    """`300 tokens/s` lost its first letters."""
    chart = lines([("a", [(0.0, 100.0), (9.0, 300.0)])], label="l", x_name="s", y_text=lambda y: f"{y:.0f} tokens/s")
    ends = [float(x) for x in re.findall(r"<text x='([\d.]+)' y='[\d.]+' text-anchor='end'", chart)]
    assert min(ends) >= text_width("300 tokens/s") and Tags(chart).open == []


def test_a_line_at_zero_has_different_labels() -> None:
    chart = lines([("waiting", [(0.0, 0.0), (5.0, 0.0)])], label="l", x_name="s", y_text=lambda y: f"{y:.1%}")
    assert "100.0%" in chart and chart.count(">0.0%<") == 2, "once for each width"
