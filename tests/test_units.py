"""Quantities as text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary import units
from armillary.errors import BadInput


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (units.flops_per_s_text(989.4e12), "989 TFLOP/s"),
        (units.bandwidth_text(3.35e12), "3.35 TB/s"),
        (units.bytes_text(80e9), "80.0 GB"),
        (units.bytes_text(512), "512 B"),
        (units.count_text(8_030_261_248), "8.03 B"),
        (units.count_text(999_885_952), "1.00 B"),
        (units.count_text(30), "30"),
        (units.count_text(0), "0"),
        (units.count_text(999_999), "1.00 M"),
        (units.scaled(0.01234), "0.0123"),
        (units.seconds_text(38e-3), "38 ms"),
        (units.seconds_text(5e-6), "5 µs"),
        (units.seconds_text(1.374), "1.37 s"),
        (units.seconds_text(125), "2:05"),
        (units.duration_text(125), "2 min 5 s"),
        (units.duration_text(119.9), "2 min"),
        (units.duration_text(1.374), "1.37 s"),
        (units.seconds_text(3600 * 3 + 720), "3 h 12 min"),
        (units.seconds_text(86400 * 5 + 3600 * 4), "5 d 4 h"),
        (units.dollars_text(3.857), "$3.86"),
        (units.dollars_text(2.5e6), "$2.50 M"),
    ],
)
def test_as_people_write_them(made: str, text: str) -> None:
    assert made == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16M", 16_000_000),
        ("32_768", 32_768),
        ("80GB", 80 * 10**9),
        ("64GiB", 64 * 2**30),
        ("1.5k", 1500),
        ("7b", 7 * 10**9),
        ("5,000", 5000),
        ("2e3", 2000),
        (12, 12),
    ],
)
def test_as_people_type_them(text: str, value: int) -> None:
    assert units.parse_count(text) == value


@pytest.mark.parametrize("text", ["", "many", "3 apples", "-4", "1..2", "GB"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is not a number; write it like"):
        units.parse_count(text)


@given(st.floats(min_value=1e-9, max_value=1e20))
def test_text_is_within_rounding_of_the_value(value: float) -> None:
    text = units.scaled(value)
    number, _, prefix = text.partition(" ")
    factor = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}[prefix]
    assert float(number.replace(",", "")) * factor == pytest.approx(value, rel=0.006)
    assert not number.startswith("1,000") or prefix == "E"
