"""Values as documents show them: a number with its unit as text, and its number format in a spreadsheet.

Money is in the report's currency; bytes, seconds and tokens are in base units and scaled for the eye. `clean` makes any
name safe to print: no control characters, and none that reverse the direction of what follows.
"""

import re
from dataclasses import dataclass
from datetime import date, timedelta

from armillary.units import bandwidth_text, bytes_text, count_text, duration_text, flops_per_s_text, scaled

SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "CNY": "CN¥", "INR": "₹", "KRW": "₩"}
EPOCH = date(1899, 12, 30)
"""day 0 of spreadsheets"""
PER = {"money": "", "money/h": " per hour", "money/M": " per million", "money/kWh": " per kWh", "money/GB": " per GB"}
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffe\uffff]"
)
_LONG_WORD = re.compile(r"[^\s\u3000-\u9fff]{20}")
NEVER = "never"
"""how a duration or share of 0 reads that stands for no break-even"""


@dataclass(frozen=True, kw_only=True)
class Notation:
    """Currency and dates of a report."""

    currency: str = "USD"
    per_usd: float = 1.0
    date_format: str = "%Y-%m-%d"

    @property
    def symbol(self) -> str:
        return SYMBOLS.get(self.currency.upper(), f"{self.currency.upper()} ")

    def text(self, value: float, unit: str, *, short: bool = False) -> str:
        """`value` with its unit; `short` rounds money for prose."""
        if unit.startswith("money"):
            return self._money(value, unit, short)
        if unit == "date":
            return (EPOCH + timedelta(days=round(value))).strftime(self.date_format)
        return _text(value, unit)

    def _money(self, value: float, unit: str, short: bool) -> str:
        sign, size = ("−" if value < 0 else ""), abs(value)
        digits = 4 if unit != "money" and 0 < size < 0.1 else 2
        amount = scaled(size) if short and size >= 1e4 else f"{size:,.{digits}f}"
        return f"{sign}{self.symbol}{amount.replace(' G', ' B')}{PER[unit] if short else ''}"

    def excel(self, unit: str) -> str:
        """Number format of a spreadsheet cell."""
        if unit.startswith("money"):
            decimals = "0.00" if unit in ("money", "money/h") else "0.0000"
            return f'"{self.symbol}"#,##{decimals};[Red]-"{self.symbol}"#,##{decimals}'
        if unit == "date":
            return excel_date(self.date_format)
        return EXCEL_FORMATS.get(unit, "#,##0.####")

    def excel_length(self, value: float, unit: str) -> int:
        """Letters that a spreadsheet cell needs, which says ### where its column is narrower."""
        longest = 0
        for form in self.excel(unit).split(";"):
            literal = sum(map(len, re.findall(r'"([^"]*)"', form))) + form.count(' "')
            number = _EXCEL_NUMBER.search(form)
            if number is None:
                longest = max(longest, len(form))
            else:
                shown = abs(value) * (100 if number["percent"] else 1) / 1000 ** len(number["thousands"])
                longest = max(longest, literal + len(f"{shown:,.{len(number['decimals'] or '')}f}{number['percent']}"))
        return longest


_EXCEL_NUMBER = re.compile(r"[#,]*0(?:\.(?P<decimals>[0#]+))?(?P<thousands>,*)(?P<percent>%?)")
EXCEL_DATES = {
    "Y": "yyyy",
    "y": "yy",
    "m": "mm",
    "B": "mmmm",
    "b": "mmm",
    "d": "dd",
    "A": "dddd",
    "a": "ddd",
    "F": "yyyy-mm-dd",
}
"""codes of strftime in number formats"""
EXCEL_FORMATS = {
    "count": "#,##0",
    "share": "0.0%",
    "never-share": '[=0]"never";0.0%',
    "months": '[=0]"never";0.0',
    "s": '#,##0.000 "s"',
    "days": '[<1]0.000 "d";#,##0.0 "d"',
    "hours": '#,##0 "h"',
    "years": '0.0 "years"',
    "B": '[>=1000000000]#,##0.0,,," GB";#,##0.0,," MB"',
    "B/s": '[>=1000000000]#,##0.0,,," GB/s";#,##0.0,," MB/s"',
    "FLOP/s": '#,##0.0,,,," TFLOP/s"',
    "W": '#,##0 "W"',
    "kW": '#,##0.0 "kW"',
    "tokens": "#,##0",
    "tokens/s": '#,##0 "tokens/s"',
    "requests/s": '#,##0.00 "requests/s"',
    "×": '0.00 "×"',
    "yes": '[=1]"yes";"no"',
}


def _text(value: float, unit: str) -> str:
    match unit:
        case "count":
            return f"{value:,.0f}"
        case "share":
            return f"{value * 100:.1f} %"
        case "never-share":
            return f"{value * 100:.1f} %" if value else NEVER
        case "months":
            return f"{value:.1f} months" if value else NEVER
        case "s":
            if value == 0:
                return "0 s"
            return duration_text(value) if value > 0 else f"−{duration_text(-value)}"
        case "days" | "years":
            return f"{value:,.{3 if unit == 'days' and 0 < value < 1 else 1}f} {unit}"
        case "hours" | "W":
            return f"{value:,.0f} {unit}"
        case "kW":
            return f"{value:,.1f} kW"
        case "B":
            return bytes_text(value)
        case "B/s":
            return bandwidth_text(value)
        case "FLOP/s":
            return flops_per_s_text(value)
        case "tokens":
            return count_text(value)
        case "tokens/s" | "requests/s":
            return f"{scaled(value)} {unit}"
        case "yes":
            return "yes" if value else "no"
        case "×":
            return f"{value:.2f} ×"
    return f"{value:,.4g} {unit}".rstrip()


def excel_date(date_format: str) -> str:
    """A format of strftime as a spreadsheet writes it; a code that it does not have makes it ISO 8601."""
    parts = re.findall(r"%-?(.)|([^%]+)", date_format)
    if any(code and code not in EXCEL_DATES for code, _ in parts):
        return EXCEL_DATES["F"]
    return "".join(EXCEL_DATES[code] if code else f'"{text.replace(chr(34), "")}"' for code, text in parts)


def serial(day: date) -> float:
    """A date as spreadsheets count it."""
    return float((day - EPOCH).days)


def clean(text: str, most: int | None = None) -> str:
    """A name or sentence in one line without characters that break a file or reverse a line, shortened to `most`."""
    line = " ".join(_UNPRINTABLE.sub("", text.encode("utf-8", "replace").decode("utf-8")).split())
    return line if most is None or len(line) <= most else line[: most - 1].rstrip() + "…"


def displayed_length(text: str) -> int:
    """Letters, wide ones of East Asia as two."""
    from unicodedata import east_asian_width

    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def breakable(text: str) -> str:
    """The text with places to break in words that no line can hold."""
    return " ".join(_LONG_WORD.sub("\\g<0>\u200b", word) for word in text.split(" "))


def plural(count: float, noun: str) -> str:
    return f"{count:,.0f} {noun}{'' if count == 1 else 's'}"


def is_rtl(text: str) -> bool:
    """Whether the first letter with a direction is Hebrew or Arabic."""
    from unicodedata import bidirectional

    kinds = (bidirectional(letter) for letter in text)
    return next((kind for kind in kinds if kind in ("L", "R", "AL")), "L") != "L"
