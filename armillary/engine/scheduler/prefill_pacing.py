"""How much of prompts a step may take beside decodes, so that it lasts at most so many times what they take alone.

Nobody says how quick a device is: steps are watched. What decodes take is seen in steps without prompts, one of which
is put in now and then; what prompts add is taken to be γ + α·n + β·n·(p + n/2) seconds for n tokens after p others, and
these three are fitted to the steps so far, late ones counting most (recursive least squares). A step is never much
larger than the last one: what was not seen yet may cost more than a line says. Products do not cost what a line says
either, but jump from one padded size to the next: where parts of a size were seen, what they took counts, and of the
line only what attention has added since.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from armillary.engine.scheduler.decision import Decision

_MARGIN = 0.035
"""of the time that is not planned with: steps of one kind differ by so much"""
_FORGET = 0.96
"""weight of a step at the next one"""
_GROWTH = 1.15
"""a step's tokens over those of the last one, at most"""
_FIRST = 64
"""tokens of prompts in the first step"""
_EVERY = 256
"""steps with prompts after which decodes are watched alone again"""
_SEEN = 31
"""steps without prompts whose median counts: one that something else held up says nothing of decodes"""
_UNITS = (1.0, 128.0, 128.0 * 8192.0)
"""what γ, n and n·(p + n/2) are counted in, so that all are of one size"""
_LAST = 3
"""steps of a size that count, of which the quickest: one that was held up says nothing of the size"""
_LATE = 384
"""steps with prompts after which a size is tried again as if it had not been seen"""
_HELD_UP, _IN_A_ROW = 2.0, 2
"""times the pace: steps that took longer were something else's doing (a graph captured, memory collected), up to so
many one after the other; more are what steps take here"""
_LONG = 8192
"""tokens of a prompt that is new: to send more of them takes time of its own"""
_UNSURE = 100.0
"""how little is known of the fit, at most"""


class PrefillController:
    """Times of steps, and what they mean for the next."""

    def __init__(self, slowdown: float, attention_tokens: float | None, tile: int = 1) -> None:
        self.slowdown = slowdown
        self._tile = tile
        self._attention = attention_tokens
        self._alone_s: dict[int, float] = {}
        """what decodes of so many sequences take, by the power of two at or above"""
        self._seen: dict[int, deque[float]] = {}
        """the times that are known from"""
        self._fit: list[float] | None = None
        """γ, α and β, in seconds a unit"""
        self._unsure = [[float(i == j) for j in range(3)] for i in range(3)]
        """how little is known of them"""
        self._sizes: dict[tuple[int, int], deque[tuple[float, float, int]]] = {}
        """of steps with one part of a prompt, by decodes (as above) and all tokens, which is what products are padded
        by: seconds, pairs, and which step it was"""
        self._steps = 0
        """with prompts"""
        self._held_up = 0
        """steps one after the other that took far too long"""
        self._largest = _FIRST
        self._mixed = 0
        """steps with prompts since decodes were seen alone"""
        self._last_s = 0.0
        """when the step before was over"""

    def allowance(self, rows: int) -> tuple[float, float | None]:
        """Tokens of prompts without a past that a step with `rows` decodes may take, and the context at which a token
        costs twice as much. No tokens: decodes are to be seen alone."""
        alone = self._alone_s.get(_size(rows))
        if alone is None or self._mixed >= _EVERY:
            self._mixed = 0
            return 0.0, None
        if self._fit is None:
            first = alone / 300 * _UNITS[1]  # weights are read in the time in which some 300 tokens are computed
            self._fit = [0.0, first, first * _UNITS[2] / _UNITS[1] / self._attention if self._attention else 0.0]
        least = (-alone, alone / 3000 * _UNITS[1], 0.0)
        start_s, token_s, pair_s = (max(x, low) / unit for x, low, unit in zip(self._fit, least, _UNITS, strict=True))
        budget = (self._limit(alone) - alone - start_s) / token_s
        return max(1.0, budget), token_s / pair_s if pair_s else None

    def size(self, rows: int, count: int, past: int, most: int) -> int:
        """Tokens of a part after `past` others, near the `count` that the line allows: tiles less while that size was
        seen to take too long, or more while it was seen not to, up to `most`."""
        limit = self._limit(self._alone_s.get(_size(rows), 0.0))
        while count >= 2 * self._tile and (self._expected(rows, count, past) or 0.0) > limit:
            count -= self._tile
        while count + self._tile <= most and (self._expected(rows, count + self._tile, past) or limit + 1) <= limit:
            count += self._tile
        return count

    def _limit(self, alone_s: float) -> float:
        return alone_s * self.slowdown * (1 - _MARGIN)

    def _expected(self, rows: int, count: int, past: int) -> float | None:
        """Seconds of a step with such a part as it was seen; None where it was not, or long ago."""
        seen = [x for x in self._sizes.get((_size(rows), rows + count), ()) if x[2] > self._steps - _LATE]
        if not seen or self._fit is None:
            return None
        pair_s, pairs = max(0.0, self._fit[2]) / _UNITS[2], count * (past + (count + 1) / 2)
        return min(seconds + pair_s * (pairs - then) for seconds, then, _ in seen)

    @property
    def most(self) -> int:
        """Tokens of prompts in the next step, whatever they cost."""
        return self._largest

    def took(self, decision: Decision, begun: float, now: float) -> None:
        """A step that was decided at `begun` is over."""
        seconds, self._last_s = now - max(begun, self._last_s), now
        rows, tokens = len(decision.decodes), decision.num_prefill_tokens
        if not rows or seconds <= 0.0 or any(seq.length > _LONG for seq in decision.admitted):
            return
        if not tokens:
            seen = self._seen.setdefault(_size(rows), deque(maxlen=_SEEN))
            seen.append(seconds)
            self._alone_s[_size(rows)] = median(seen)
            return
        self._mixed += 1
        self._steps += 1
        self._largest = max(_FIRST, int(_GROWTH * tokens), tokens + self._tile)
        alone = self._alone_s.get(_size(rows))
        if alone is None or self._fit is None:
            return
        self._held_up = self._held_up + 1 if seconds > _HELD_UP * self.slowdown * alone else 0
        if 0 < self._held_up <= _IN_A_ROW:
            return
        pairs = decision.num_prefill_pairs
        self._learn([1.0, tokens / _UNITS[1], pairs / _UNITS[2]], seconds - alone)
        if len(decision.chunks) == 1:
            like = self._sizes.setdefault((_size(rows), rows + tokens), deque(maxlen=_LAST))
            like.append((seconds, pairs, self._steps))

    def _learn(self, parts: list[float], seconds: float) -> None:
        """One more equation γ + α·n + β·pairs = seconds."""
        assert self._fit is not None
        if seconds < 0.0:
            return
        error = seconds - sum(value * part for value, part in zip(self._fit, parts, strict=True))
        moved = [sum(x * part for x, part in zip(row, parts, strict=True)) for row in self._unsure]
        scale = _FORGET + sum(x * part for x, part in zip(moved, parts, strict=True))
        self._fit = [value + x / scale * error for value, x in zip(self._fit, moved, strict=True)]
        kept = [
            [(row[j] - moved[i] * moved[j] / scale) / _FORGET for j in range(3)] for i, row in enumerate(self._unsure)
        ]
        most = max(kept[i][i] for i in range(3))
        self._unsure = kept if most < _UNSURE else [[x * _UNSURE / most for x in row] for row in kept]


def _size(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()
