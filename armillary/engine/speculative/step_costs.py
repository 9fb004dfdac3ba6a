"""Seconds of a step by its number of rows: measured when the engine starts, and by every step since."""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

_LEARN = 0.2  # weight of one step in the time of its size
_FOLLOW = 0.05  # and in that of the other sizes: what slows one, like a longer context, slows all
_MOST = 2.0  # a step that took more than so many times as long as expected was held up, and counts as so many


class StepCosts:
    """Piecewise linear between the measured sizes; beyond them as steep as between the last two."""

    def __init__(self, measured: Mapping[int, float], *, is_relative: bool = False) -> None:
        """`is_relative`: only the proportions are known, until the first step."""
        assert measured, "nothing was measured"
        self.is_relative = is_relative
        self._rows = sorted(measured)
        self._seconds = [measured[rows] for rows in self._rows]
        self._factors = [1.0] * len(self._rows)
        self._curve = self._expected()

    def seconds(self, rows: int) -> float:
        """Expected time of a step of so many rows; no less than that of a smaller one."""
        if rows <= 0:
            return 0.0
        sizes, at = self._rows, bisect_left(self._rows, rows)
        if at == 0 or len(sizes) == 1:
            return self._curve[0]
        at = min(at, len(sizes) - 1)
        low, high = self._curve[at - 1], self._curve[at]
        return low + (high - low) / (sizes[at] - sizes[at - 1]) * (rows - sizes[at - 1])

    def learn(self, rows: int, factor: float) -> None:
        """A step of so many rows took `factor` times as long as expected."""
        if self.is_relative:
            self.is_relative, self._factors = False, [factor] * len(self._rows)
            factor = 1.0
        factor = min(_MOST, max(1 / _MOST, factor))
        near = min(range(len(self._rows)), key=lambda i: abs(self._rows[i] - rows))
        for i in range(len(self._rows)):
            self._factors[i] *= 1 + (_LEARN if i == near else _FOLLOW) * (factor - 1)
        self._curve = self._expected()

    def _expected(self) -> list[float]:
        return list(accumulate((s * factor for s, factor in zip(self._seconds, self._factors, strict=True)), max))
