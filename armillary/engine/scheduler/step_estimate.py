"""How long a step may be expected to take: an upper estimate, from steps that were rehearsed or measured here.

Steps are put into classes by their work, in tokens: those computed, and attention as tokens that would cost as much.
A class holds works of (2^(i-1), 2^i]. A step of work w takes at most what one of its class or a larger one took. Where
none was seen, it is taken for w/w' times what the largest so far took, of work w': reading the weights is shared.
"""

from __future__ import annotations

from collections.abc import Mapping

from armillary.engine.scheduler.decision import Decision, work_gauges

_CLASSES = 48
_SLOW_S = 0.1
"""steps that take longer are always measured; of shorter ones one each time somebody asks"""
_KEEP = 0.9
"""of the slowest step of a class that is kept where a later one was quicker: one that was held up is forgotten"""


class StepTimes:
    """Seconds of steps by their work. Written by the engine's thread, read by others."""

    def __init__(self, attention_tokens: float | None = None) -> None:
        """`attention_tokens` is the context at which attention costs as much as all the rest of a token."""
        self._attention = attention_tokens
        self._seconds = [0.0] * _CLASSES
        """of each class; 0: none was seen. Of a fixed length, so that a reader in another thread finds it whole"""
        self.wanted = True
        """whether the next step is to be measured, however short"""

    def took(self, decision: Decision, seconds: float) -> None:
        """A step is over; cheap where it need not be measured."""
        if (self.wanted or seconds > _SLOW_S) and not decision.empty:
            self.wanted = False
            self.learn(work_gauges(decision), seconds)

    def learn(self, work: Mapping[str, float], seconds: float) -> None:
        """A step of such work (`work_gauges`) took so long."""
        at = _class(self.work(work))
        self._seconds[at] = max(seconds, _KEEP * self._seconds[at])

    def work(self, work: Mapping[str, float]) -> float:
        """In tokens."""
        tokens = work["prefill_tokens"] + work["decode_tokens"]
        pairs = work["context_tokens"] + work["prefill_pairs"]
        return tokens + (pairs / self._attention if self._attention else 0.0)

    def expected_s(self, decision: Decision) -> float | None:
        """Seconds that a step takes at most, as far as steps so far say; None where there were none."""
        work = self.work(work_gauges(decision))
        found = [(i, seconds * max(1.0, work / 2 ** (i - 1))) for i, seconds in enumerate(self._seconds) if seconds]
        as_large = [seconds for i, seconds in found if i >= _class(work)]
        return min(as_large) if as_large else found[-1][1] if found else None


def _class(work: float) -> int:
    """i such that 2^(i-1) < work ≤ 2^i, with work of one token or less in class 0."""
    return min(_CLASSES - 1, max(0, -int(-work // 1) - 1).bit_length())
