"""From tokens to what a client gets: text as it comes, stop texts, and why an answer ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from armillary.engine.output.stop_strings import StopText
from armillary.engine.request.sequence import Finish, Logprob, Sequence
from armillary.engine.scheduler.decision import Decision, Outcome
from armillary.engine.scheduler.scheduler import Scheduler


class Detokenizer(Protocol):
    """Text of a growing list of tokens, as `armillary.model.text.tokenizer.Detokenizer` gives it."""

    def push(self, token: int) -> str:
        """Text that is certain after one more token."""

    def finish(self) -> str:
        """What was waiting for more tokens."""


class NoText:
    """For models without a tokenizer: there are tokens and no text."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is new of one answer."""

    sequence: Sequence
    """the answer"""
    tokens: tuple[int, ...]
    """new tokens"""
    text: str
    """new text; end tokens and stop texts are not part of it"""
    gap_s: float | None = None
    """time since the answer's token before; none for its first: the ITL"""
    finish: Finish | None = None
    """why it ended, in its last piece"""
    error: str = ""
    """what went wrong, and what to do"""
    logprobs: tuple[Logprob, ...] = ()
    """of the new tokens, where they were asked for"""


class _Stream:
    """Text of one answer on its way out."""

    def __init__(self, seq: Sequence, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.stop = StopText(seq.request.params.stop)
        self.num_tokens = self.num_out = 0
        """without and with the end token"""
        self.last_at: float | None = None
        self.largest_s = 0.0
        """gap between two tokens"""
        self._unstoppable = seq.request.params.min_tokens

    def gap(self, now: float) -> float | None:
        """Time since the token before."""
        before, self.last_at = self.last_at, now
        if before is None:
            return None
        gap_s = now - before
        if gap_s > self.largest_s:
            self.largest_s = gap_s
        return gap_s

    def push(self, token: int) -> str:
        """What can be shown; stop texts do not count before min_tokens are out."""
        self.num_tokens += 1
        text = self.detokenizer.push(token)
        return text if self.num_tokens < self._unstoppable else self.stop.push(text)


class Answers:
    """Text of all answers that are being made."""

    def __init__(self, scheduler: Scheduler, detokenizer: Callable[[], Detokenizer]) -> None:
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._streams: dict[Sequence, _Stream] = {}

    def take(self, decision: Decision, outcome: Outcome, now: float) -> list[Piece]:
        """What a step brought: a piece for each token, and one for each answer that was given up."""
        pieces = list(map(self._piece, outcome.sequences, outcome.tokens, repeat(now)))
        ended = [*decision.ended, *outcome.finished]
        if ended:
            with_token = set(outcome.sequences)
            ended = [seq for seq in ended if seq not in with_token]
        return pieces + self.end(ended)

    def end(self, ended: Iterable[Sequence]) -> list[Piece]:
        """Last pieces of answers that ended without a token: aborted, too late, failed."""
        return [
            Piece(sequence=seq, tokens=(), text=self._rest(seq), finish=seq.finish, error=seq.error) for seq in ended
        ]

    def _piece(self, seq: Sequence, token: int, now: float) -> Piece:
        stream = self._streams.get(seq)
        if stream is None:
            stream = self._streams[seq] = _Stream(seq, self._detokenizer())
        stream.num_out += 1
        gap_s, ends = stream.gap(now), seq.finish == "stop" and token in seq.stops
        text = "" if ends else stream.push(token)
        if stream.stop.stopped:
            self._stop(seq, stream.num_tokens, now)
        if seq.finish is not None:
            text += self._rest(seq)
        return Piece(
            sequence=seq,
            tokens=(token,),
            text=text,
            gap_s=gap_s,
            finish=seq.finish,
            error=seq.error,
            logprobs=tuple(seq.logprobs[stream.num_out - 1 : stream.num_out]),
        )

    def _stop(self, seq: Sequence, num_tokens: int, now: float) -> None:
        """A stop text came: the answer ends here, whatever else is on its way."""
        if seq.finish is None:
            self._scheduler.finish(seq, "stop", now, num_output=num_tokens)
        seq.finish = "stop"

    def _rest(self, seq: Sequence) -> str:
        stream = self._streams.pop(seq, None)
        if stream is None:
            return ""
        seq.largest_gap_s = stream.largest_s
        return stream.stop.push(stream.detokenizer.finish()) + stream.stop.finish()
