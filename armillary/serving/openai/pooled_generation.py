"""Prompts of which only vectors are wanted: they go to the engine together, and their vectors come back.

The engine computes them in its prefill, in one batch with whatever else it does; nothing is decoded.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from armillary.engine.request.pooling import Pooling
from armillary.engine.request.sampling_params import pooling_params
from armillary.serving.http.problem import bad_request
from armillary.serving.openai.generation import ChoiceDelta, Generation
from armillary.serving.openai.generation_request import GenerationRequest, max_new_tokens, time_limit
from armillary.serving.openai.pooling_request import MOST_INPUTS, PoolingFields
from armillary.serving.openai.response import ResponseWriter
from armillary.serving.openai.served_model import ServedModel

# N texts, H hidden

Vectors = np.ndarray[Any, np.dtype[np.float32]]


class VectorFormatter(Protocol):
    """How an endpoint writes vectors."""

    def response(self, vectors_NH: Vectors) -> dict[str, Any]:
        """Fields of the response besides model and usage."""


@dataclass(frozen=True)
class PooledChoices:
    """The formatter of a writer whose response is made of vectors."""

    vectors: VectorFormatter

    def first_choices(self) -> Iterable[dict[str, Any]]:
        return ()

    def add(self, delta: ChoiceDelta) -> Iterable[dict[str, Any]]:
        return ()

    def finish_reason(self, choice: int) -> str:
        return "stop"

    def choices(self) -> list[dict[str, Any]]:
        return []


class PooledWriter(ResponseWriter):
    """Writes the response to a request for vectors."""

    async def _complete(self) -> None:
        generation, formatter = self._generation, self._formatter
        assert isinstance(formatter, PooledChoices)
        async for _ in generation.deltas():
            pass
        vectors = [generation.box.pooled[i] for i in range(len(generation.prompts))]
        vectors_NH = np.frombuffer(b"".join(vectors), dtype="<f4").reshape(len(vectors), -1)
        self._metrics.histograms["e2e_s"].observe(time.monotonic() - generation.box.begin)
        head = {"model": self._head["model"], "usage": generation.usage()}
        await self._connection.json(200, formatter.vectors.response(vectors_NH) | head)


def pooled_generation(
    served: ServedModel,
    body: PoolingFields,
    prompts: Sequence[list[int]],
    pooling: Pooling,
    begin: float,
    param: str,
) -> Generation:
    """The engine requests of `prompts`; Problem 400 where they cannot be served."""
    if len(prompts) > MOST_INPUTS:
        raise bad_request(f"{len(prompts):,} texts are more than {MOST_INPUTS:,}; send several requests", param)
    for prompt in prompts:
        if not prompt:
            raise bad_request(f"{param} has a text without a token; leave it out", param)
        max_new_tokens(len(prompt), 1, served, param)
    total, most = sum(map(len, prompts)), served.engine.most_prompt_tokens
    if most is not None and total > most:
        raise bad_request(f"{total:,} tokens are more than this server's {most:,}; send several requests", param)
    timeout_s, own = time_limit(body.timeout_s, served.serve.timeout_s)
    request = GenerationRequest(
        params=pooling_params(pooling),
        stop=(),
        include_stop=False,
        timeout_s=timeout_s,
        own_timeout=own,
        stream=False,
        skip_special=True,
        priority=body.priority or 0,
        salt=body.cache_salt or "",
    )
    return Generation(served, prompts, request, begin)


async def encode_text(
    served: ServedModel, text: str, body: PoolingFields, param: str, *, special: bool = True, reserved: int = 0
) -> list[int]:
    """Tokens of a text, cut to truncate_prompt_tokens less `reserved`: its special tokens stay at their ends."""
    limit, tokenization = body.truncate_prompt_tokens, served.tokenization
    longest = served.max_model_len if limit is None else served.serve.max_body_bytes
    encode = partial(tokenization.encode, text, longest, param)
    await asyncio.sleep(0)  # other requests run between the texts of a long list
    ids = await encode(special=special)
    if limit is None:
        return ids
    most = (served.max_model_len - 1 if limit == -1 else limit) - reserved
    if most < 1:
        text = f"truncate_prompt_tokens={limit} leaves nothing of a text; ask for more"
        raise bad_request(text, "truncate_prompt_tokens")
    if len(ids) <= most:
        return ids
    plain = await encode(special=False)
    return _cut(ids, plain, most)


def _cut(ids: list[int], plain: list[int], most: int) -> list[int]:
    """The first tokens of a text, between the special tokens that were added to it."""
    added = len(ids) - len(plain)
    before = next((i for i in range(added + 1) if ids[i : i + len(plain)] == plain), None)
    if before is None or added >= most:
        return ids[:most]
    return ids[:before] + plain[: most - added] + ids[before + len(plain) :]


def normalized(vectors_NH: Vectors) -> Vectors:
    """Vectors of length 1."""
    lengths_N1 = np.linalg.norm(vectors_NH, axis=1, keepdims=True)
    return vectors_NH / np.maximum(lengths_N1, np.float32(1e-12))  # type: ignore[no-any-return]
