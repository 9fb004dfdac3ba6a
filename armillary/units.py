"""Bytes, FLOPs, seconds, counts and dollars as text, and back.

Decimal prefixes throughout (1 GB = 1e9 bytes), as vendors and rooflines use; `GiB` is read, never written.
"""

import re
from fractions import Fraction
from math import floor, log10

from armillary.errors import BadInput

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_DECIMAL = {letter: 10.0 ** (3 * power) for power, letter in enumerate("kmgtpe", start=1)}
_BINARY = {f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("kmgtpe", start=1)}
_FACTORS = {"": 1.0, "b": 1e9} | {
    name + end: factor for name, factor in (_DECIMAL | _BINARY).items() for end in ("", "b")
}
_NUMBER = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*$")


def scaled(value: float, unit: str = "", digits: int = 3) -> str:
    """`value` with a decimal prefix and about `digits` significant figures: 989.4e12 -> '989 TFLOP/s'."""
    for factor, prefix in _PREFIXES:
        if abs(float(f"{value:.{digits}g}")) >= factor:
            return f"{_significant(value / factor, digits)} {prefix}{unit}".rstrip()
    number = f"{value:,.0f}" if value == int(value) else _significant(value, digits)
    return f"{number} {unit}".rstrip()


def _significant(value: float, digits: int) -> str:
    """`value` rounded to `digits` figures, without an exponent."""
    rounded = float(f"{value:.{digits}g}")
    decimals = max(0, digits - 1 - floor(log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def bytes_text(value: float) -> str:
    return scaled(value, "B")


def count_text(value: float) -> str:
    """Parameters and tokens as people say them: 8.03 B, 25.3 M, 512."""
    return scaled(value).replace(" G", " B")


def flops_text(value: float) -> str:
    return scaled(value, "FLOP")


def flops_per_s_text(value: float) -> str:
    return scaled(value, "FLOP/s")


def bandwidth_text(value: float) -> str:
    return scaled(value, "B/s")


def dollars_text(value: float) -> str:
    return f"${value:,.2f}" if abs(value) < 1e4 else f"${scaled(value)}"


def seconds_text(value: float) -> str:
    """Seconds at the scale a person reads: 38 ms, 1.37 s, 2:05, 3 h 12 min, 5 d 4 h."""
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 60:
        return f"{value:.3g} s"
    if value < 3600:
        return f"{int(value // 60)}:{int(value % 60):02d}"
    hours, minutes = divmod(round(value / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def duration_text(value: float) -> str:
    """As seconds_text, but minutes with their name, where 2:05 may be taken for a time of day or a plain number."""
    if not 60 <= value < 3600:
        return seconds_text(value)
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min" + (f" {rest} s" if rest else "")


def ago_text(then: float, now: float) -> str:
    """'38 s ago', '29 min ago': past the first minute seconds do not matter."""
    passed = max(0.0, now - then)
    return f"{duration_text(passed if passed < 60 else passed // 60 * 60)} ago"


def parse_count(text: str | float | int) -> int:
    """'16M' -> 16,000,000; '32_768' -> 32,768; '64GiB' and '80GB' -> bytes; '7B' is seven billion."""
    if isinstance(text, int | float):
        return int(text)
    match = _NUMBER.match(text)
    suffix = match.group(2).lower() if match else ""
    factor = _FACTORS.get(suffix)
    if match is None or factor is None or len(match.group(1).partition("e")[2]) > 3:
        raise BadInput(f"'{text}' is not a number; write it like 512, 16M, 80GB or 64GiB")
    digits = match.group(1).replace("_", "").replace(",", "")
    exact = Fraction(digits) * Fraction(factor)
    if exact.denominator != 1 or exact >= 2**63:
        raise BadInput(f"'{text}' is not a whole number that fits 63 bits; write it like 512, 16M, 80GB or 64GiB")
    return int(exact)
