"""A diagnosis in words: the same short texts on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable

from armillary.diagnosis.evidence.finding import Evidence
from armillary.spec.gauges import GAUGES, RENAMED
from armillary.units import bytes_text, count_text, dollars_text, scaled, seconds_text


def evidence_text(one: Evidence) -> str:
    """'data_wait_fraction 23 % (most a healthy run has: 4 %)'."""
    against = f" ({one.against}: {value_text(one.gauge, one.expected)})" if one.expected is not None else ""
    return f"{one.gauge} {value_text(one.gauge, one.value)}{against}"


def value_text(gauge: str, value: float) -> str:
    """A figure as its unit is read: 38 ms, 1.2 GB, 41 %, 12.0 k tokens/s."""
    known = GAUGES.get(RENAMED.get(gauge, gauge))
    unit = known.unit if known is not None else ""
    by_unit: dict[str, Callable[[float], str]] = {
        "s": lambda x: seconds_text(x) if x else "0 s",
        "B": bytes_text,
        "fraction": lambda x: f"{100 * x:.3g} %",
        "USD": dollars_text,
    }
    if unit in by_unit:
        return by_unit[unit](value)
    if unit.endswith("/s"):
        return f"{scaled(value)} {unit}" if value >= 1e3 else f"{value:.3g} {unit}"
    if value >= 1e3:
        return count_text(value) if value >= 1e6 else f"{value:,.0f}"
    return f"{value:.4g}"
