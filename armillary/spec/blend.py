"""Blend: how much is read of each source, as the smallest whole numbers in the same proportion.

0.7 to 0.3 is 7 rows of every 10: whole numbers make the proportion exact after each such round, however long a run is.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import gcd, isfinite, lcm

from armillary.errors import BadRecipe

LONGEST = 100_000
"""rows of a round at most: its table is kept in memory"""


def shares(blend: Mapping[str, float]) -> tuple[tuple[str, int], ...]:
    """Source and rows of a round, by name: the order in which a recipe lists its sources means nothing."""
    for source, weight in blend.items():
        if not source.strip():
            raise BadRecipe('a source of data.blend has no name; write it like blend = { stdlib = 3, "books" = 1 }')
        if not (isfinite(weight) and weight > 0):
            raise BadRecipe(f"the weight {weight:g} of '{source}' in data.blend must be above 0; leave the source out")
    exact = {source: Fraction(str(weight)) for source, weight in sorted(blend.items())}
    unit = lcm(*(weight.denominator for weight in exact.values()))
    whole = {source: int(weight * unit) for source, weight in exact.items()}
    common = gcd(*whole.values())
    rows = sum(whole.values()) // common
    if rows > LONGEST:
        better = f"{{ {', '.join(_rounded(whole))} }}"
        raise BadRecipe(f"the weights of data.blend repeat only after {rows:,} rows; round them, as in {better}")
    return tuple((source, count // common) for source, count in whole.items())


def _rounded(whole: Mapping[str, int]) -> list[str]:
    """Per mille, at least one."""
    total = sum(whole.values())
    return [f'"{source}" = {max(1, round(1000 * count / total))}' for source, count in whole.items()]
