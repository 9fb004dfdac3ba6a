"""What all our pages are made of: nothing that is handed in can break out, and drawings fit two widths."""

from __future__ import annotations

from html import unescape

from hypothesis import given
from hypothesis import strategies as st

from armillary.report.page import Below, Frame, Hover, document, drawing, items, section, side_by_side, table
from tests.profiling.report.test_profile_page import Tags

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30)


@given(title=TEXT, cells=st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=4))
def test_any_text_is_shown_and_none_is_markup(title: str, cells: list[tuple[str, str, str]]) -> None:
    rows = [[a, Hover(b, c), Below(c, a)] for a, b, c in cells]
    text = document(title, [section(title, table([title, "x", "y"], rows)), items([title])])
    assert Tags(text).open == []
    assert all(cell in unescape(text) for row in cells for cell in row)


def test_numbers_stand_to_the_right_and_texts_to_the_left() -> None:
    made = table(["name", "time", "error"], [["a", "3 ms", "−5 %"], ["b", "–", "exact"]])
    assert made.count("class='number'") == 2 * 3 and "<td>a</td>" in made


def test_what_is_empty_leaves_no_trace() -> None:
    assert section("nothing", "") == "" and items([]) == ""
    assert side_by_side("", "one", "") == "one" and "class='two'" in side_by_side("one", "two")
    assert "<th" not in table(("", ""), [["a", "b"]])


def test_a_drawing_is_made_for_both_widths() -> None:
    frames = (Frame(width=900, height=100, left=50), Frame(width=400, height=80, left=40))
    made = drawing(lambda frame: f"<text>{frame.across}</text>", "a <plot>", frames)
    assert "viewBox='0 0 900 100'" in made and ">834</text>" in made and ">344</text>" in made
    assert "a &lt;plot&gt;" in made and made.index("on-wide") < made.index("on-narrow")
