"""Who is looked at in a step, where everybody has to be now and then: even work instead of all at once."""

from __future__ import annotations

from armillary.serving.engine.sequence import Sequence


class Turn:
    """Each sequence once in `period` steps, about."""

    __slots__ = ("_next", "_period")

    def __init__(self, period: int) -> None:
        self._period, self._next = period, 0

    def take(self, running: list[Sequence]) -> list[Sequence]:
        """Those whose turn it is."""
        begin = self._next if self._next < len(running) else 0
        self._next = begin + len(running) // self._period + 1
        return running[begin : self._next]
