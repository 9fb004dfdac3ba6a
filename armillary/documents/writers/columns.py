"""Widths of the columns of a table, by its texts; which columns are numbers."""

from collections.abc import Sequence

LONGEST_WORD, LONGEST_TEXT, LONGEST_FORMULA = 20, 45, 110
"""letters of a word that must fit on a line, of a text beyond which a column does not grow, and the same of a last
column with texts several times as long, as formulas are"""
WORDS = ("", "–", "never", "yes", "no")


def column_shares(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[float]:
    """Shares that add up to 1: numbers on one line, no column narrower than its longest word, the rest by the length of
    the texts."""
    weights, numbers = [], number_columns(columns, rows)
    for i, head in enumerate(columns):
        texts = [head, *(row[i] for row in rows)]
        word = max(min(len(word), LONGEST_WORD) for text in texts for word in text.split() or [""])
        longest = max(len(text) for text in texts)
        is_long = i == len(columns) - 1 and longest > 4 * LONGEST_TEXT
        longest = min(LONGEST_FORMULA if is_long else LONGEST_TEXT, longest)
        weights.append(max(word, longest) + 5.0 if numbers[i] else max(word + 4.0, longest**0.88))
    return [weight / sum(weights) for weight in weights]


def number_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Columns that hold only numbers."""
    return [bool(rows) and all(is_number(row[i]) for row in rows) for i in range(len(columns))]


def is_number(text: str) -> bool:
    """Whether a cell is a number with a sign, a currency or a unit."""
    return text in WORDS or (len(text) < 24 and any(letter.isdigit() for letter in text[:4]) and text.count(" ") < 4)
