"""Blend: rows per data source as the smallest integers in the given proportion.

0.7 to 0.3 is 7 of every 10 rows: with integers the proportion is exact after each round, however long a run is.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import gcd, isfinite, lcm

from armillary.errors import BadRecipe

LONGEST = 100_000
"""most rows per round: its table is in memory"""


def shares(blend: Mapping[str, float]) -> tuple[tuple[str, int], ...]:
    """(source, rows per round), sorted by name: the order in a recipe has no effect."""
    for source, weight in blend.items():
        if not source.strip():
            raise BadRecipe('a source of data.blend has no name; write it like blend = { stdlib = 3, "books" = 1 }')
        if not (isfinite(weight) and weight > 0):
            raise BadRecipe(f"the weight {weight:g} of '{source}' in data.blend must be above 0; leave the source out")
    exact = {source: Fraction(str(weight)) for source, weight in sorted(blend.items())}
    unit = lcm(*(weight.denominator for weight in exact.values()))
    weights = {source: int(weight * unit) for source, weight in exact.items()}
    common = gcd(*weights.values())
    rows = sum(weights.values()) // common
    if rows > LONGEST:
        better = f"{{ {', '.join(_rounded(weights))} }}"
        raise BadRecipe(f"the weights of data.blend repeat only after {rows:,} rows; round them, as in {better}")
    return tuple((source, count // common) for source, count in weights.items())


def _rounded(weights: Mapping[str, int]) -> list[str]:
    """Per mille, at least one."""
    total = sum(weights.values())
    return [f'"{source}" = {max(1, round(1000 * count / total))}' for source, count in weights.items()]
