"""The completions of one HTTP request: prompts go to the engine, deltas of text come back, choice by choice.

The engine generates until the server aborts it after a stop string; tokens beyond the stop string are dropped here.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from armillary.engine.output.output_text import Detokenizer, StopText
from armillary.engine.request.sampling_params import SamplingParams
from armillary.serving.http.problem import Problem, bad_request
from armillary.serving.openai.generation_request import GenerationRequest, timeout_problem
from armillary.serving.openai.served_model import ServedModel
from armillary.serving.processes.request_mailbox import FinishEvent, Mailbox, TokenEvent


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
        return "" if self.stopped else self._stop.push(self._detokenizer.finish()) + self._stop.finish()


@dataclass(slots=True, kw_only=True)
class ChoiceDelta:
    """New text of one choice, with (token, log-probability, top tokens) of each token that is shown; the last delta has
    the finish reason."""

    choice: int
    text: str = ""
    logprobs: list[tuple[Any, ...]] = field(default_factory=list)
    finish: str | None = None


class Generation:
    """The engine requests of one HTTP request: n completions of each of its prompts."""

    def __init__(
        self,
        served: ServedModel,
        prompts: Sequence[Sequence[int]],
        request: GenerationRequest,
        begin: float,
        visible: frozenset[str] = frozenset(),
    ) -> None:
        """`visible`: special tokens that are part of the text."""
        self.prompts = prompts
        self.request = request
        params = request.params
        self.n = params.n
        self.box = Mailbox(len(prompts) * params.n, eager=request.stream or bool(request.stop), begin=begin)
        end_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else served.tokenization.eos_ids)
        detokenizer = served.tokenization.detokenizer(visible, skip_special=request.skip_special)
        self.texts = [
            ChoiceText(detokenizer, params, request.stop, end_ids, include_stop=request.include_stop)
            for _ in range(len(prompts) * params.n)
        ]
        self.gauges: dict[str, float] = {}  # the engine's, of the completion that ended last
        self.cached_tokens = 0
        self.shown = True  # false: a token is generated only for the prompt's log-probabilities, and is not counted
        self.finished: set[int] = set()
        self._engine, self._adapter = served.engine, served.adapter
        self._numbers: list[int] = []

    def send(self) -> None:
        """Submit the prompts to the engine."""
        request = self.request
        for i, prompt in enumerate(self.prompts):
            self._numbers.append(
                self._engine.submit(
                    prompt,
                    request.params,
                    self.box,
                    i * self.n,
                    timeout_s=request.timeout_s,
                    priority=request.priority,
                    salt=request.salt,
                    adapter=self._adapter,
                )
            )

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """One delta for each choice with new tokens, until all choices have ended."""
        while len(self.finished) < len(self.texts):
            deltas: dict[int, ChoiceDelta] = {}
            for event in await self.box.take():
                if event.choice not in self.finished:
                    delta = deltas.setdefault(event.choice, ChoiceDelta(choice=event.choice))
                    self._take(event, delta)
            yield list(deltas.values())

    def close(self) -> None:
        """Abort the engine requests that have not ended."""
        for i, number in enumerate(self._numbers):
            if not self.finished.issuperset(range(i * self.n, (i + 1) * self.n)):
                self._engine.abort(number)

    def _take(self, event: TokenEvent, delta: ChoiceDelta) -> None:
        text = self.texts[event.choice]
        if event.end is not None:
            self._end(event.end, event.choice)
            delta.text += text.finish()
            delta.finish = "stop" if text.stopped else event.end.finish  # held-back text may complete a stop string
            return
        assert event.token is not None, "an event is a token or an end"
        delta.text += text.push(event.token)
        if event.logprob is not None and not text.closed:
            delta.logprobs.append(event.logprob)
        if text.stopped:
            delta.finish = "stop"
            self.finished.add(event.choice)
            self._engine.abort(self._numbers[event.choice // self.n], event.choice % self.n)

    def _end(self, end: FinishEvent, choice: int) -> None:
        self.gauges = end.gauges
        self.cached_tokens += int(end.gauges.get("cached_tokens", 0)) if choice % self.n == 0 else 0
        if end.finish == "deadline":
            raise timeout_problem(self.request, waited_s=None if "queue_s" in end.gauges else end.gauges.get("e2e_s"))
        if end.finish == "abort":
            raise Problem(503, "the server aborted the request; try again", code="aborted", retry_after_s=1)
        if end.finish == "error":
            raise self._error(end)
        self.finished.add(choice)

    def _error(self, end: FinishEvent) -> Problem:
        params = self.request.params
        if params.allowed_token_ids is not None or params.bad_tokens:
            return bad_request(
                "the request leaves no token that may be generated; allow more (allowed_token_ids, bad_words, "
                "structured outputs)",
                "allowed_token_ids" if params.allowed_token_ids else "bad_words",
                "structure_failed",
            )
        if params.structure is not None:
            return bad_request(
                "the output could not follow the structure to its end; make the structure simpler",
                "response_format",
                "structure_failed",
            )
        return Problem(500, end.error or "the engine failed on this request; try again", code="engine_error")

    def usage(self) -> dict[str, Any]:
        """Prompt and completion tokens so far, as OpenAI reports them."""
        prompt_tokens = sum(map(len, self.prompts))
        completion_tokens = sum(text.num_tokens for text in self.texts) if self.shown else 0
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
