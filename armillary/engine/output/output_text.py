"""Output of sequences: text as it comes, stop strings, and why a sequence ended.

Stop strings are searched for as the text grows: a possible beginning of one is held back.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from armillary.engine.request.sequence import FinishReason, Logprob, Sequence
from armillary.engine.scheduler.decision import Decision, Outcome
from armillary.engine.scheduler.scheduler import Scheduler


class StopText:
    """Passes text on until one of `stops` is in it."""

    def __init__(self, stops: Items[str], *, include: bool = False) -> None:
        """`include`: the stop string is part of the output."""
        self._include = include
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text to emit now; `stopped` says whether a stop string came."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        places = [(place, len(stop)) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            place, length = min(places)
            return text[: place + length if self._include else place]
        safe = len(text) - self._beginning(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The held-back text, which is no stop string."""
        rest, self._held = self._held, ""
        return rest

    def _beginning(self, text: str) -> int:
        """Length of the longest suffix of `text` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class Detokenizer(Protocol):
    """Text of a growing list of tokens, as `armillary.model.text.tokenizer.Detokenizer` gives it."""

    def push(self, token: int) -> str:
        """Text that is final after one more token."""

    def finish(self) -> str:
        """The text that waited for more tokens."""


class NoText:
    """For models without a tokenizer: there are tokens and no text."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class OutputDelta:
    """New output of one sequence."""

    sequence: Sequence
    tokens: tuple[int, ...]
    text: str
    """new text, without end tokens and stop strings"""
    gap_s: float | None = None
    """time since the sequence's last token (ITL); none for its first, and for others of the same step"""
    finish: FinishReason | None = None
    """in its last delta: why it ended"""
    error: str = ""
    logprobs: tuple[Logprob, ...] = ()
    """of the new tokens, where requested"""


class _Stream:
    """Output state of one sequence."""

    def __init__(self, seq: Sequence, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.stop = StopText(seq.request.params.stop)
        self.num_tokens = self.num_out = 0  # output tokens without and with the end token
        self.last_at: float | None = None
        self.largest_s = 0.0
        self._unstoppable = seq.request.params.min_tokens

    def gap(self, now: float) -> float | None:
        """Time since the token before."""
        before, self.last_at = self.last_at, now
        if before is None or before == now:  # of several tokens of a step, the first has waited
            return None
        gap_s = now - before
        if gap_s > self.largest_s:
            self.largest_s = gap_s
        return gap_s

    def push(self, token: int) -> str:
        """Text to emit; stop strings do not count before min_tokens."""
        self.num_tokens += 1
        text = self.detokenizer.push(token)
        return text if self.num_tokens < self._unstoppable else self.stop.push(text)


class OutputProcessor:
    """Output of all running sequences."""

    def __init__(self, scheduler: Scheduler, detokenizer: Callable[[], Detokenizer]) -> None:
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._streams: dict[Sequence, _Stream] = {}

    def take(self, decision: Decision, outcome: Outcome, now: float) -> list[OutputDelta]:
        """Deltas of a step: one per token, and one per sequence that ended without a token."""
        if outcome.several:
            deltas = list(self._several(outcome, now))
        else:
            deltas = list(map(self._delta, outcome.sequences, outcome.tokens, repeat(now)))
        ended = [*decision.ended, *outcome.finished]
        if ended:
            with_token = set(outcome.sequences)
            ended = [seq for seq in ended if seq not in with_token]
        return deltas + self.end(ended)

    def _several(self, outcome: Outcome, now: float) -> Iterator[OutputDelta]:
        """Deltas where sequences got several tokens: the last of each says why it ended. After a stop string there are
        none."""
        left = Counter(outcome.sequences)
        for seq, token in zip(outcome.sequences, outcome.tokens, strict=True):
            left[seq] -= 1
            if left[seq] >= 0:
                delta = self._delta(seq, token, now, is_last=not left[seq])
                if delta.finish is not None:
                    left[seq] = 0
                yield delta

    def end(self, ended: Iterable[Sequence]) -> list[OutputDelta]:
        """Last deltas of sequences that ended without a token: aborted, expired, failed."""
        return [
            OutputDelta(sequence=seq, tokens=(), text=self._rest(seq), finish=seq.finish, error=seq.error)
            for seq in ended
        ]

    def _delta(self, seq: Sequence, token: int, now: float, is_last: bool = True) -> OutputDelta:
        stream = self._streams.get(seq)
        if stream is None:
            stream = self._streams[seq] = _Stream(seq, self._detokenizer())
        stream.num_out += 1
        gap_s, ends = stream.gap(now), is_last and seq.finish == "stop" and token in seq.stops
        text = "" if ends else stream.push(token)
        if stream.stop.stopped:  # the sequence ends here, whatever is in flight
            if seq.finish is None:
                self._scheduler.finish(seq, "stop", now, num_output=stream.num_tokens)
            elif not is_last:
                del seq.tokens[seq.num_prompt + stream.num_tokens :]
            seq.finish, is_last = "stop", True
        finish = seq.finish if is_last else None
        if finish is not None:
            text += self._rest(seq)
        return OutputDelta(
            sequence=seq,
            tokens=(token,),
            text=text,
            gap_s=gap_s,
            finish=finish,
            error=seq.error if is_last else "",
            logprobs=tuple(seq.logprobs[stream.num_out - 1 : stream.num_out]),
        )

    def _rest(self, seq: Sequence) -> str:
        stream = self._streams.pop(seq, None)
        if stream is None:
            return ""
        seq.largest_gap_s = stream.largest_s
        return stream.stop.push(stream.detokenizer.finish()) + stream.stop.finish()
