"""Prefill controller: the prefill tokens that a step takes beside its decodes, so that it lasts at most `slowdown`
times as long as the decodes alone.

The speed of the device is learnt from its steps. The time of decodes alone comes from steps without prefill, one of
which is inserted now and then. Prefill adds γ + α·n + β·n·(p + n/2) seconds for n tokens after p others; the three are
fitted to the steps so far by recursive least squares with exponential forgetting. A step is never much larger than the
last one, because sizes that were not seen may cost more than the line says. GEMMs do not follow a line either: their
time jumps from one padded size to the next. So where a chunk size was measured, the measured time counts, corrected by
the line only for the attention added since.
"""

from collections import deque
from statistics import median

from armillary.engine.scheduler.decision import Decision

_MARGIN = 0.035  # fraction of the time limit kept in reserve: steps of one kind vary by so much
_FORGET = 0.96
_GROWTH = 1.15  # most tokens of a step over those of the last one
_FIRST = 64  # prefill tokens of the first step
_EVERY = 256  # steps with prefill after which decodes are timed alone again
_SEEN = 31  # steps without prefill whose median counts, so that a delayed one does not
_UNITS = (1.0, 128.0, 128.0 * 8192.0)  # units of γ, n and n·(p + n/2), so that all are of one size
_LAST = 3  # last steps of a size of which the fastest counts, so that a delayed one does not
_LATE = 384  # steps with prefill after which a measured size expires
_HELD_UP, _IN_A_ROW = 2.0, 2
"""a step this many times over the limit was delayed by something else (a graph capture, garbage collection) and is
ignored, up to so many in a row; more are taken as the step time"""
_LONG = 8192  # tokens of a new prompt: sending more of them takes time of its own
_MAX_COVARIANCE = 100.0


class PrefillController:
    """Learns step times and sizes the prefill of the next step."""

    def __init__(self, slowdown: float, attention_tokens: float | None, tile: int = 1) -> None:
        self.slowdown = slowdown
        self._tile = tile
        self._attention = attention_tokens
        self._alone_s: dict[int, float] = {}  # seconds of decodes alone, by the power of two at or above their number
        self._seen: dict[int, deque[float]] = {}
        self._fit: list[float] | None = None  # γ, α and β, in seconds per unit
        self._covariance = [[float(i == j) for j in range(3)] for i in range(3)]
        self._sizes: dict[tuple[int, int], deque[tuple[float, float, int]]] = {}
        """steps with one chunk, by decodes (as above) and all tokens, by which GEMMs are padded: seconds, pairs, and
        number of the step"""
        self._steps = 0  # steps with prefill
        self._held_up = 0
        self.most = _FIRST  # prefill tokens of the next step, whatever they cost
        self._mixed = 0  # steps with prefill since decodes were timed alone
        self._last_s = 0.0

    def allowance(self, rows: int) -> tuple[float, float | None]:
        """Prefill tokens without a past that a step with `rows` decodes may take, and the context at which a token
        costs twice as much. 0 tokens: decodes are timed alone."""
        alone = self._alone_s.get(_size(rows))
        if alone is None or self._mixed >= _EVERY:
            self._mixed = 0
            return 0.0, None
        if self._fit is None:
            first = alone / 300 * _UNITS[1]  # reading the weights takes as long as computing some 300 tokens
            self._fit = [0.0, first, first * _UNITS[2] / _UNITS[1] / self._attention if self._attention else 0.0]
        least = (-alone, alone / 3000 * _UNITS[1], 0.0)
        start_s, token_s, pair_s = (max(x, low) / unit for x, low, unit in zip(self._fit, least, _UNITS, strict=True))
        budget = (self._limit(alone) - alone - start_s) / token_s
        return max(1.0, budget), token_s / pair_s if pair_s else None

    def size(self, rows: int, count: int, past: int, most: int) -> int:
        """Tokens of a chunk after `past` others, near the `count` that the line allows: fewer tiles while that size was
        measured to take too long, more while it was measured not to, up to `most`."""
        limit = self._limit(self._alone_s.get(_size(rows), 0.0))
        while count >= 2 * self._tile and (self._expected(rows, count, past) or 0.0) > limit:
            count -= self._tile
        while count + self._tile <= most and (self._expected(rows, count + self._tile, past) or limit + 1) <= limit:
            count += self._tile
        return count

    def _limit(self, alone_s: float) -> float:
        return alone_s * self.slowdown * (1 - _MARGIN)

    def _expected(self, rows: int, count: int, past: int) -> float | None:
        """Seconds of a step with such a chunk, as measured; None where it was not, or long ago."""
        seen = [x for x in self._sizes.get((_size(rows), rows + count), ()) if x[2] > self._steps - _LATE]
        if not seen or self._fit is None:
            return None
        pair_s, attention_pairs = max(0.0, self._fit[2]) / _UNITS[2], count * (past + (count + 1) / 2)
        return min(seconds + pair_s * (attention_pairs - then) for seconds, then, _ in seen)

    def took(self, decision: Decision, begun: float, now: float) -> None:
        """A step that was decided at `begun` has ended."""
        seconds, self._last_s = now - max(begun, self._last_s), now
        rows, tokens = decision.num_decodes, decision.num_prefill_tokens
        if not rows or seconds <= 0.0 or any(seq.length > _LONG for seq in decision.admitted):
            return
        if not tokens:
            seen = self._seen.setdefault(_size(rows), deque(maxlen=_SEEN))
            seen.append(seconds)
            self._alone_s[_size(rows)] = median(seen)
            return
        self._mixed += 1
        self._steps += 1
        self.most = max(_FIRST, int(_GROWTH * tokens), tokens + self._tile)
        alone = self._alone_s.get(_size(rows))
        if alone is None or self._fit is None:
            return
        self._held_up = self._held_up + 1 if seconds > _HELD_UP * self.slowdown * alone else 0
        if 0 < self._held_up <= _IN_A_ROW:
            return
        attention_pairs = decision.num_prefill_pairs
        self._learn([1.0, tokens / _UNITS[1], attention_pairs / _UNITS[2]], seconds - alone)
        if len(decision.chunks) == 1:
            same_size = self._sizes.setdefault((_size(rows), rows + tokens), deque(maxlen=_LAST))
            same_size.append((seconds, attention_pairs, self._steps))

    def took_decodes(self, rows: int, seconds: list[float], now: float) -> None:
        """Several steps of `rows` decodes alone, the last of which has ended at `now`."""
        self._last_s = now
        seen = self._seen.setdefault(_size(rows), deque(maxlen=_SEEN))
        seen.extend(seconds[-_SEEN:])
        self._alone_s[_size(rows)] = median(seen)

    def _learn(self, parts: list[float], seconds: float) -> None:
        """One more equation γ + α·n + β·pairs = seconds."""
        assert self._fit is not None
        if seconds < 0.0:
            return
        error = seconds - sum(value * part for value, part in zip(self._fit, parts, strict=True))
        moved = [sum(x * part for x, part in zip(row, parts, strict=True)) for row in self._covariance]
        scale = _FORGET + sum(x * part for x, part in zip(moved, parts, strict=True))
        self._fit = [value + x / scale * error for value, x in zip(self._fit, moved, strict=True)]
        updated = [
            [(row[j] - moved[i] * moved[j] / scale) / _FORGET for j in range(3)]
            for i, row in enumerate(self._covariance)
        ]
        most = max(updated[i][i] for i in range(3))
        self._covariance = (
            updated if most < _MAX_COVARIANCE else [[x * _MAX_COVARIANCE / most for x in row] for row in updated]
        )


def _size(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()
