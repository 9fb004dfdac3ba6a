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
from collections.abc import Sequence
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
        self._seen: dict[int, deque[float]] = {}  # decodes alone, by the power of two at or above their number
        self._medians: dict[int, float] = {}  # of those seconds, as far as they were asked for since the last
        self._alone: dict[int, float | None] = {}  # the same by number of decodes
        self._fit: list[float] | None = None  # γ, α and β, in seconds per unit
        self._covariance = (1.0, 0.0, 0.0, 1.0, 0.0, 1.0)  # of γ, α and β: the upper triangle
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
        alone = self._alone_s(rows)
        if alone is None or self._mixed >= _EVERY:
            self._mixed = 0
            return 0.0, None
        if self._fit is None:
            first = alone / 300 * _UNITS[1]  # reading the weights takes as long as computing some 300 tokens
            self._fit = [0.0, first, first * _UNITS[2] / _UNITS[1] / self._attention if self._attention else 0.0]
        start_s = max(self._fit[0], -alone)
        token_s = max(self._fit[1] / _UNITS[1], alone / 3000)
        pair_s = max(self._fit[2], 0.0) / _UNITS[2]
        budget = (self._limit(alone) - alone - start_s) / token_s
        return max(1.0, budget), token_s / pair_s if pair_s else None

    def times_decodes(self, rows: int) -> bool:
        """Whether the next step has decodes only, so that they are timed alone."""
        return self._mixed >= _EVERY or self._alone_s(rows) is None

    def size(self, rows: int, count: int, past: int, most: int) -> int:
        """Tokens of a chunk after `past` others, near the `count` that the line allows: fewer tiles while that size was
        measured to take too long, more while it was measured not to, up to `most`."""
        limit = self._limit(self._alone_s(rows) or 0.0)
        while count >= 2 * self._tile and (self._expected(rows, count, past) or 0.0) > limit:
            count -= self._tile
        while count + self._tile <= most and (self._expected(rows, count + self._tile, past) or limit + 1) <= limit:
            count += self._tile
        return count

    def _limit(self, alone_s: float) -> float:
        return alone_s * self.slowdown * (1 - _MARGIN)

    def _expected(self, rows: int, count: int, past: int) -> float | None:
        """Seconds of a step with such a chunk, as measured; None where it was not, or long ago."""
        same_size = self._sizes.get((_size(rows), rows + count))
        if same_size is None or self._fit is None:
            return None
        oldest, pair_s = self._steps - _LATE, max(0.0, self._fit[2]) / _UNITS[2]
        attention_pairs = count * (past + (count + 1) / 2)
        return min(
            [seconds + pair_s * (attention_pairs - then) for seconds, then, step in same_size if step > oldest],
            default=None,
        )

    def took(self, decision: Decision, begun: float, now: float) -> None:
        """A step that was decided at `begun` has ended."""
        seconds, self._last_s = now - max(begun, self._last_s), now
        rows, admitted = decision.num_decodes, decision.admitted
        if not rows or seconds <= 0.0 or (admitted and any(seq.length > _LONG for seq in admitted)):
            return
        if not decision.chunks:
            return self._decoded(rows, (seconds,))
        tokens, attention_pairs, _ = decision.prefill_work()
        self._mixed += 1
        self._steps += 1
        self.most = max(_FIRST, int(_GROWTH * tokens), tokens + self._tile)
        alone = self._alone_s(rows)
        if alone is None or self._fit is None:
            return
        self._held_up = self._held_up + 1 if seconds > _HELD_UP * self.slowdown * alone else 0
        if 0 < self._held_up <= _IN_A_ROW:
            return
        self._learn(tokens / _UNITS[1], attention_pairs / _UNITS[2], seconds - alone)
        if len(decision.chunks) == 1:
            size = _size(rows), rows + tokens
            same_size = self._sizes.get(size)
            if same_size is None:
                same_size = self._sizes[size] = deque(maxlen=_LAST)
            same_size.append((seconds, attention_pairs, self._steps))

    def took_decodes(self, rows: int, seconds: list[float], now: float) -> None:
        """Several steps of `rows` decodes alone, the last of which has ended at `now`."""
        self._last_s = now
        self._decoded(rows, seconds[-_SEEN:])

    def _decoded(self, rows: int, seconds: Sequence[float]) -> None:
        size = _size(rows)
        self._seen.setdefault(size, deque(maxlen=_SEEN)).extend(seconds)
        self._medians.pop(size, None)
        self._alone.clear()

    def _alone_s(self, rows: int) -> float | None:
        """Median seconds of about so many decodes alone; None where none were seen."""
        if rows in self._alone:
            return self._alone[rows]
        size = _size(rows)
        middle = self._medians.get(size)
        if middle is None and size in self._seen:
            middle = self._medians[size] = median(self._seen[size])
        self._alone[rows] = middle
        return middle

    def _learn(self, tokens: float, qk_pairs: float, seconds: float) -> None:
        """One more equation γ + α·tokens + β·pairs = seconds, in their units: a step of recursive least squares. It is
        written out, because it runs in every step with prefill."""
        assert self._fit is not None
        if seconds < 0.0:
            return
        (fit0, fit1, fit2), (c00, c01, c02, c11, c12, c22) = self._fit, self._covariance
        moved0 = c00 + c01 * tokens + c02 * qk_pairs  # covariance · (1, tokens, pairs)
        moved1 = c01 + c11 * tokens + c12 * qk_pairs
        moved2 = c02 + c12 * tokens + c22 * qk_pairs
        scale = _FORGET + moved0 + moved1 * tokens + moved2 * qk_pairs
        gain = (seconds - fit0 - fit1 * tokens - fit2 * qk_pairs) / scale
        self._fit = [fit0 + moved0 * gain, fit1 + moved1 * gain, fit2 + moved2 * gain]
        c00, c01, c02 = c00 - moved0 * moved0 / scale, c01 - moved0 * moved1 / scale, c02 - moved0 * moved2 / scale
        c11, c12, c22 = c11 - moved1 * moved1 / scale, c12 - moved1 * moved2 / scale, c22 - moved2 * moved2 / scale
        times = min(1 / _FORGET, _MAX_COVARIANCE / max(c00, c11, c22))
        self._covariance = (c00 * times, c01 * times, c02 * times, c11 * times, c12 * times, c22 * times)


def _size(rows: int) -> int:
    return 1 << (rows - 1).bit_length() if rows else 1
