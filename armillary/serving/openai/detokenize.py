"""The text of one choice as its tokens arrive: complete characters, stop strings found, end tokens left out.

The engine generates until the server aborts it after a stop string; tokens beyond the stop string are dropped here.
"""

from collections.abc import Callable
from typing import Protocol

from armillary.engine.output.output_text import StopText
from armillary.engine.request.sampling_params import SamplingParams


class Detokenizer(Protocol):
    """Incremental text of a growing list of tokens."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class ChoiceText:
    """The text of one choice; `num_tokens` counts its end token too, and `closed` says that there was one."""

    def __init__(
        self,
        detokenizer: Callable[[], Detokenizer],
        params: SamplingParams,
        stop: tuple[str, ...],
        end_ids: frozenset[int],
        *,
        include_stop: bool = False,
    ) -> None:
        """`include_stop`: stop strings and end tokens are part of the text."""
        self._detokenizer = detokenizer()
        self._stop = StopText(stop, include=include_stop)
        self._end_ids = end_ids
        self._include = include_stop
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        self.closed = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.stopped

    def push(self, token: int) -> str:
        """Text that can be shown after one more token."""
        self.num_tokens += 1
        if token in self._end_ids and self.num_tokens >= self._min_tokens:
            self.closed = True
            return self._detokenizer.push(token) if self._include else ""
        text = self._detokenizer.push(token)
        return text if self.num_tokens < self._min_tokens else self._stop.push(text)

    def finish(self) -> str:
        """Text that was held back."""
        if self.stopped:
            return ""
        return self._stop.push(self._detokenizer.finish()) + self._stop.finish()
