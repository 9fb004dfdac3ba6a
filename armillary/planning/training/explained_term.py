"""One line of the explanation of a training plan."""

from dataclasses import dataclass

from armillary.units import bytes_text, seconds_text


@dataclass(frozen=True, kw_only=True)
class Term:
    """One line of the explanation."""

    name: str
    formula: str
    numbers: str
    value: float
    """the result, in seconds, bytes or as stated"""
    text: str
    """the result with its unit"""


def seconds_term(name: str, formula: str, numbers: str, value: float) -> Term:
    return Term(name=name, formula=formula, numbers=numbers, value=value, text=seconds_text(max(value, 0.0)))


def bytes_term(name: str, formula: str, numbers: str, value: float) -> Term:
    return Term(name=name, formula=formula, numbers=numbers, value=value, text=bytes_text(value))
