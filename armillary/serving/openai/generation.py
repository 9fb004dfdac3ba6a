"""The answers to one HTTP request: prompts go to the engine, pieces of text come back, choice by choice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from armillary.serving.http.problem import Problem, bad
from armillary.serving.openai.detokenize import AnswerText, Detokenizer
from armillary.serving.openai.sampling_request import Wish, late
from armillary.serving.processes.engine_client import EngineProcess
from armillary.serving.processes.mailbox import End, Event, Mailbox


@dataclass(slots=True, kw_only=True)
class Piece:
    """What is new of one choice."""

    choice: int
    text: str = ""
    logprobs: list[tuple[Any, ...]] = field(default_factory=list)
    """(token, value, likeliest) of tokens that are shown"""
    finish: str | None = None
    """stop or length, in its last piece"""


class Answering:
    """Requests under way for one HTTP request: n answers to each of its prompts."""

    def __init__(
        self,
        engine: EngineProcess,
        prompts: Sequence[Sequence[int]],
        wish: Wish,
        detokenizer: Callable[[], Detokenizer],
        ends: frozenset[int],
        *,
        stream: bool,
        begin: float,
    ) -> None:
        self.prompts = prompts
        params = wish.params
        self.n = params.n
        self.box = Mailbox(len(prompts) * params.n, eager=stream or bool(wish.stop), begin=begin)
        stops = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else ends)
        self.texts = [
            AnswerText(detokenizer, params, wish.stop, stops, include_stop=wish.include_stop)
            for _ in range(len(prompts) * params.n)
        ]
        self.gauges: dict[str, float] = {}
        """times and sizes of the answer that ended last, as the engine saw them"""
        self.cached_tokens = 0
        """prompt tokens that were found in the prefix cache"""
        self.shown = True
        """false: a token is made for the sake of the prompt's log-probabilities alone, and is not counted"""
        self._engine = engine
        self.wish = wish
        self._numbers: list[int] = []
        self.over: set[int] = set()
        """choices that have come to their end"""

    def send(self) -> None:
        """Hand the prompts to the engine."""
        wish = self.wish
        for i, prompt in enumerate(self.prompts):
            self._numbers.append(
                self._engine.submit(
                    prompt,
                    wish.params,
                    self.box,
                    i * self.n,
                    timeout_s=wish.timeout_s,
                    priority=wish.priority,
                    salt=wish.salt,
                )
            )

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What came, a piece for each choice that grew, until all are over."""
        while len(self.over) < len(self.texts):
            found: dict[int, Piece] = {}
            for event in await self.box.take():
                if event.choice not in self.over:
                    piece = found.setdefault(event.choice, Piece(choice=event.choice))
                    self._take(event, piece)
            yield list(found.values())

    def close(self) -> None:
        """Give up what is not over."""
        for i, number in enumerate(self._numbers):
            if not self.over.issuperset(range(i * self.n, (i + 1) * self.n)):
                self._engine.abort(number)

    def _take(self, event: Event, piece: Piece) -> None:
        text = self.texts[event.choice]
        if event.end is not None:
            self._end(event.end, event.choice)
            piece.text += text.finish()
            piece.finish = "stop" if text.stopped else event.end.finish  # what was held back may end a stop text
            return
        assert event.token is not None, "an event is a token or an end"
        piece.text += text.push(event.token)
        if event.logprob is not None and not text.closed:
            piece.logprobs.append(event.logprob)
        if text.stopped:
            piece.finish = "stop"
            self.over.add(event.choice)
            self._engine.abort(self._numbers[event.choice // self.n], event.choice % self.n)

    def _end(self, end: End, choice: int) -> None:
        self.gauges = end.gauges
        self.cached_tokens += int(end.gauges.get("cached_tokens", 0)) if choice % self.n == 0 else 0
        if end.finish == "deadline":
            raise late(self.wish, waited_s=None if "queue_s" in end.gauges else end.gauges.get("e2e_s"))
        if end.finish == "abort":
            raise Problem(503, "the request was given up by the server; try again", code="aborted", retry_after_s=1)
        params = self.wish.params
        if end.finish == "error" and (params.allowed_token_ids is not None or params.bad_tokens):
            raise bad(
                "what the request asks for leaves no token that may come; allow more (allowed_token_ids, "
                "bad_words, structures)",
                "allowed_token_ids" if params.allowed_token_ids else "bad_words",
                "structure_failed",
            )
        if end.finish == "error" and self.wish.params.structure is not None:
            raise bad(
                "the asked-for structure could not be followed to its end; make it simpler",
                "response_format",
                "structure_failed",
            )
        if end.finish == "error":
            raise Problem(500, end.error or "the engine could not answer; try again", code="engine_error")
        self.over.add(choice)

    def usage(self) -> dict[str, Any]:
        """Tokens so far, as clients are billed."""
        given = sum(map(len, self.prompts))
        made = sum(text.num_tokens for text in self.texts) if self.shown else 0
        return {
            "prompt_tokens": given,
            "completion_tokens": made,
            "total_tokens": given + made,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
