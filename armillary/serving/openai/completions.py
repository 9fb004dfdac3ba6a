"""POST /v1/completions: text or token ids continued, with echo and the prompt's log-probabilities."""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from armillary.serving.http.problem import bad_request
from armillary.serving.openai.generation import ChoiceDelta, Generation
from armillary.serving.openai.generation_request import generation_request, max_new_tokens, truncate_prompt
from armillary.serving.openai.logprobs import CompletionLogprobs, TokenText
from armillary.serving.openai.schemas import MOST_CHOICES, CompletionRequest
from armillary.serving.openai.served_model import ServedModel
from armillary.serving.openai.structured_outputs import structure_of

_DEFAULT_TOKENS = 16
"""OpenAI's default, where the context has room for it"""
_MAX_COMPLETIONS = 1024


class CompletionFormatter:
    """Formats the choices of a completion."""

    def __init__(
        self, generation: Generation, body: CompletionRequest, token_text: TokenText, echoed: list[str]
    ) -> None:
        self._new_logprobs = partial(CompletionLogprobs, token_text, as_ids=bool(body.return_tokens_as_token_ids))
        count = len(generation.texts)
        self._generation = generation
        self._echoed = echoed
        self._only_echo = body.max_tokens == 0
        self._has_logprobs = body.logprobs is not None
        self._logprobs = [self._new_logprobs() for _ in range(count)]
        self._tokens: list[list[tuple[Any, ...]]] = [[] for _ in range(count)]
        self._texts = [""] * count
        self._finish = ["length"] * count
        self._shown = [False] * count

    def first_choices(self) -> Iterable[dict[str, Any]]:
        return ()

    def add(self, delta: ChoiceDelta) -> Iterable[dict[str, Any]]:
        i, text, logprobs = delta.choice, delta.text, delta.logprobs
        if self._only_echo:
            text, logprobs = "", []
        if not self._shown[i]:
            self._shown[i] = True
            text = self._echoed[i // self._generation.n] + text
            logprobs = self._of_prompt(i) + logprobs
        self._texts[i] += text
        self._tokens[i] += logprobs
        if delta.finish is not None:
            self._finish[i] = "length" if self._only_echo else delta.finish
        if not (text or logprobs or delta.finish):
            return ()
        part = self._logprobs[i].part(logprobs) if self._has_logprobs and logprobs else None
        ended = None if delta.finish is None else self._finish[i]
        return ({"index": i, "text": text, "logprobs": part, "finish_reason": ended},)

    def _of_prompt(self, choice: int) -> list[tuple[Any, ...]]:
        """Log-probabilities of an echoed prompt; its first token has none."""
        prompt = self._generation.prompts[choice // self._generation.n]
        rest = self._generation.box.prompts.get(choice - choice % self._generation.n)
        if (
            not self._has_logprobs
            or not self._echoed[choice // self._generation.n]
            or (rest is None and len(prompt) > 1)
        ):
            return []
        return [(prompt[0], None, None), *(rest or ())]

    def finish_reason(self, choice: int) -> str:
        return self._finish[choice]

    def choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": i,
                "text": text,
                "finish_reason": self._finish[i],
                "logprobs": self._new_logprobs().part(self._tokens[i]) if self._has_logprobs else None,
            }
            for i, text in enumerate(self._texts)
        ]


async def complete(
    served: ServedModel, body: CompletionRequest, begin: float
) -> tuple[Generation, CompletionFormatter]:
    """The generation that a validated body asks for, and the formatter of its choices."""
    if body.suffix:
        raise bad_request("suffix is not supported; leave it out", "suffix")
    if (body.best_of or 1) > (body.n or 1):
        raise bad_request("best_of is not supported; ask for n completions and choose", "best_of")
    prompts, echoed = await _prompts(served, body)
    wanted = None if body.max_tokens is None else max(1, body.max_tokens)
    limits = [max_new_tokens(len(prompt), wanted, served, "prompt") for prompt in prompts]
    logprobs, echo = body.logprobs, bool(body.echo)
    request = generation_request(
        body,
        max_tokens=min(_DEFAULT_TOKENS, *limits) if wanted is None else wanted,
        max_timeout_s=served.serve.timeout_s,
        structure=structure_of(body),
        defaults=served.defaults,
        bad_tokens=served.tokenization.bad_tokens(body.bad_words),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    generation = Generation(served, prompts, request, begin)
    generation.shown = body.max_tokens != 0
    return generation, CompletionFormatter(generation, body, served.tokenization.token_text, echoed)


async def _prompts(served: ServedModel, body: CompletionRequest) -> tuple[list[list[int]], list[str]]:
    """Token ids of every prompt, and the text to echo of each."""
    given, echo = body.prompt, bool(body.echo)
    many: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if isinstance(given, list) and len({type(item) for item in given}) > 1:
        raise bad_request("prompt mixes texts, ids and lists; give a list of one kind", "prompt")
    if len(many) * (body.n or 1) > _MAX_COMPLETIONS:  # before any of them is tokenized, which takes time
        raise bad_request(
            f"{len(many):,} prompts with n={body.n or 1} are more than {_MAX_COMPLETIONS:,} completions; "
            "send them in several requests",
            "prompt",
        )
    longest = served.max_model_len if body.truncate_prompt_tokens is None else served.serve.max_body_bytes
    special, prompts = body.add_special_tokens is not False, list[list[int]]()
    tokenization = served.tokenization
    for item in many:
        ids = item if isinstance(item, list) else await tokenization.encode(item, longest, "prompt", special=special)
        prompts.append(truncate_prompt(ids, body.truncate_prompt_tokens, body.max_tokens or 1, served))
        if not prompts[-1]:
            raise bad_request("the prompt is empty; give at least one token", "prompt")
        if len(many) > 1:
            await asyncio.sleep(0)  # other requests run between the prompts of a long list
    if not echo:
        return prompts, [""] * len(many)
    return prompts, [
        item
        if isinstance(item, str)
        else await tokenization.work(partial(tokenization.decode, item), tokenize_only=False)
        for item in many
    ]


assert MOST_CHOICES <= _MAX_COMPLETIONS, "one prompt may have all its completions"
