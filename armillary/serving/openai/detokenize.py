"""The text of one answer as its tokens come: characters whole, stop texts found, end tokens left out.

The engine draws on until it is told that a stop text came; what it drew beyond is dropped here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from armillary.engine.output.stop_strings import StopText
from armillary.engine.request.sampling_params import SamplingParams


class Detokenizer(Protocol):
    """Text of a growing list of tokens."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class AnswerText:
    """One answer on its way to the client."""

    def __init__(
        self,
        detokenizer: Callable[[], Detokenizer],
        params: SamplingParams,
        stop: tuple[str, ...],
        ends: frozenset[int],
        *,
        include_stop: bool = False,
    ) -> None:
        """`include_stop`: stop texts and end tokens are part of the answer."""
        self._detokenizer = detokenizer()
        self._stop = StopText(stop, include=include_stop)
        self._ends = ends
        self._include = include_stop
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        """tokens of the answer, its end token included"""
        self.closed = False
        """an end token came"""

    @property
    def stopped(self) -> bool:
        """A stop text came: nothing after it is shown."""
        return self._stop.stopped

    def push(self, token: int) -> str:
        """What can be shown after one more token."""
        self.num_tokens += 1
        if token in self._ends and self.num_tokens >= self._min_tokens:
            self.closed = True
            return self._detokenizer.push(token) if self._include else ""
        text = self._detokenizer.push(token)
        return text if self.num_tokens < self._min_tokens else self._stop.push(text)

    def finish(self) -> str:
        """What was held back."""
        if self.stopped:
            return ""
        return self._stop.push(self._detokenizer.finish()) + self._stop.finish()
