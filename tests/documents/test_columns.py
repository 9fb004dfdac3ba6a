"""Widths of columns: numbers and words stay on one line beside very long texts."""

from armillary.documents.writers.columns import column_shares, is_number, number_columns

LETTERS = 95
"""letters of 8.5 points on a line of 17 cm, about"""


def test_numbers_keep_their_line_beside_long_texts() -> None:
    columns = ("name", "note", "amount", "likelihood")
    rows = [["x" * 400, "word " * 60, "$18,063,206.40", "medium"], ["short", "", "–", "high"]]
    shares = column_shares(columns, rows)
    assert abs(sum(shares) - 1) < 1e-12
    assert shares[2] * LETTERS >= len("$18,063,206.40") and shares[3] * LETTERS >= len("likelihood")
    assert number_columns(columns, rows) == [False, False, True, False]


def test_what_is_a_number() -> None:
    assert all(map(is_number, ("$1.00", "−€3", "72.8 k tokens/s", "3 h 27 min", "never", "–", "")))
    assert not any(map(is_number, ("tp=8 × pp=16 × dp=4 · 8 chunks", "in the row above", "medium")))
