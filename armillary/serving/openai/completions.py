"""POST /v1/completions: text or token ids continued, with echo and the prompt's log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from armillary.serving.http.problem import bad
from armillary.serving.openai.generation import Answering, Piece
from armillary.serving.openai.logprobs import CompletionLogprobs
from armillary.serving.openai.sampling_request import answer_room, truncated, wish_of
from armillary.serving.openai.schemas import MOST_CHOICES, Completion
from armillary.serving.openai.served_model import Served
from armillary.serving.openai.structured_outputs import structure_of
from armillary.serving.openai.tokenization import Texts

_DEFAULT_TOKENS = 16
"""OpenAI's, where there is room for so many"""
_MOST_TOGETHER = 1024


class CompletionForm:
    """Choices of a completion."""

    def __init__(self, answering: Answering, body: Completion, texts: Texts, echoed: list[str]) -> None:
        self._new = partial(CompletionLogprobs, texts.token_text, as_ids=bool(body.return_tokens_as_token_ids))
        count = len(answering.texts)
        self._answering = answering
        self._echoed = echoed
        self._only_echo = body.max_tokens == 0
        self._wants = body.logprobs is not None
        self._logprobs = [self._new() for _ in range(count)]
        self._found: list[list[tuple[Any, ...]]] = [[] for _ in range(count)]
        self._texts = [""] * count
        self._finish = ["length"] * count
        self._shown = [False] * count

    def open(self) -> Iterable[dict[str, Any]]:
        return ()

    def grow(self, piece: Piece) -> Iterable[dict[str, Any]]:
        i, text, logprobs = piece.choice, piece.text, piece.logprobs
        if self._only_echo:
            text, logprobs = "", []
        if not self._shown[i]:
            self._shown[i] = True
            text = self._echoed[i // self._answering.n] + text
            logprobs = self._of_prompt(i) + logprobs
        self._texts[i] += text
        self._found[i] += logprobs
        if piece.finish is not None:
            self._finish[i] = "length" if self._only_echo else piece.finish
        if not (text or logprobs or piece.finish):
            return ()
        part = self._logprobs[i].part(logprobs) if self._wants and logprobs else None
        ended = None if piece.finish is None else self._finish[i]
        return ({"index": i, "text": text, "logprobs": part, "finish_reason": ended},)

    def _of_prompt(self, choice: int) -> list[tuple[Any, ...]]:
        """The prompt's tokens, where they are echoed; before its first there is nothing to go by."""
        prompt = self._answering.prompts[choice // self._answering.n]
        rest = self._answering.box.prompts.get(choice - choice % self._answering.n)
        if not self._wants or not self._echoed[choice // self._answering.n] or (rest is None and len(prompt) > 1):
            return []
        return [(prompt[0], None, None), *(rest or ())]

    def finish_of(self, choice: int) -> str:
        return self._finish[choice]

    def whole(self) -> list[dict[str, Any]]:
        return [
            {
                "index": i,
                "text": text,
                "finish_reason": self._finish[i],
                "logprobs": self._new().part(self._found[i]) if self._wants else None,
            }
            for i, text in enumerate(self._texts)
        ]


async def complete(served: Served, body: Completion, begin: float) -> tuple[Answering, CompletionForm]:
    """Ask the engine for what a checked body wants."""
    if body.suffix:
        raise bad("suffix is not supported; leave it out", "suffix")
    if (body.best_of or 1) > (body.n or 1):
        raise bad("best_of is not supported; ask for n answers and choose", "best_of")
    prompts, echoed = await _prompts(served, body)
    asked = None if body.max_tokens is None else max(1, body.max_tokens)
    rooms = [answer_room(len(prompt), asked, served, "prompt") for prompt in prompts]
    wanted = min(_DEFAULT_TOKENS, *rooms) if asked is None else asked
    logprobs, echo = body.logprobs, bool(body.echo)
    wish = wish_of(
        body,
        max_tokens=wanted,
        most_s=served.serve.timeout_s,
        structure=structure_of(body),
        defaults=served.defaults,
        bad_tokens=served.texts.bad_tokens(body.bad_words),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    detokenizer = served.texts.detokenizer(skip_special=body.skip_special_tokens is not False)
    answering = Answering(
        served.engine, prompts, wish, detokenizer, served.texts.eos_ids, stream=bool(body.stream), begin=begin
    )
    answering.shown = body.max_tokens != 0
    return answering, CompletionForm(answering, body, served.texts, echoed)


async def _prompts(served: Served, body: Completion) -> tuple[list[list[int]], list[str]]:
    """Token ids of every prompt, and what is echoed of each."""
    given, echo = body.prompt, bool(body.echo)
    many: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if isinstance(given, list) and len({type(item) for item in given}) > 1:
        raise bad("prompt mixes texts, ids and lists; give a list of one kind", "prompt")
    if len(many) * (body.n or 1) > _MOST_TOGETHER:  # before any of them is read, which takes its time
        raise bad(
            f"{len(many):,} prompts with n={body.n or 1} are more than {_MOST_TOGETHER:,} answers; "
            "send them in several requests",
            "prompt",
        )
    longest = served.max_model_len if body.truncate_prompt_tokens is None else served.serve.max_body_bytes
    special, prompts = body.add_special_tokens is not False, list[list[int]]()
    for item in many:
        ids = item if isinstance(item, list) else await served.texts.encode(item, longest, "prompt", special=special)
        prompts.append(truncated(ids, body.truncate_prompt_tokens, body.max_tokens or 1, served))
        if not prompts[-1]:
            raise bad("the prompt is empty; give at least one token", "prompt")
        if len(many) > 1:
            await asyncio.sleep(0)  # others get their turn between the prompts of a long list
    if not echo:
        return prompts, [""] * len(many)
    texts = served.texts
    return prompts, [
        item if isinstance(item, str) else await texts.work(partial(texts.decode, item), aside=False) for item in many
    ]


assert MOST_CHOICES <= _MOST_TOGETHER, "one prompt may have all its answers"
