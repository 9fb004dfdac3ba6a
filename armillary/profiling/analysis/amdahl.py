"""Amdahl's law: the overall speedup from speeding up a part of the time (Amdahl, AFIPS 1967)."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from armillary.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class AmdahlRow:
    """What one class of work, or part of a budget, is worth: the overall speedup if it cost nothing (`ceiling`, 1 /
    (1 − share)) and if it ran twice as fast."""

    work: str
    share: float
    ceiling: float
    doubled: float


def speedup(fraction: float, factor: float) -> float:
    """Overall speedup when `fraction` of the time runs `factor` times as fast: 1 / (1 − p + p/s)."""
    if not 0 <= fraction <= 1:
        raise BadInput(f"a share of {fraction:g} is not between 0 and 1; write 80 % as 0.8")
    if not factor > 0:
        raise BadInput(f"{factor:g} times as fast makes no sense; give a factor above 0")
    rest = 1 - fraction + fraction / factor
    return 1 / rest if rest > 0 else inf


def amdahl(shares: Mapping[str, float]) -> tuple[AmdahlRow, ...]:
    """A row per class of work, the largest first; the shares are of the same total."""
    total = sum(shares.values())
    if total > 1 + 5e-3:
        raise BadInput(f"shares add up to {total:.3g}, more than the whole; give fractions of one whole")
    rows = (
        AmdahlRow(work=work, share=share, ceiling=speedup(share, inf), doubled=speedup(share, 2))
        for work, share in shares.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.share))
