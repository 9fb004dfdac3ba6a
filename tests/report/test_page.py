"""What all our pages are made of: nothing that is handed in can break out."""

from __future__ import annotations

from html import unescape

from hypothesis import given
from hypothesis import strategies as st

from armillary.report.page import Below, Hover, document, items, section, side_by_side, table
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
