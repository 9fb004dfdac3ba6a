"""POST /v1/embeddings: one vector per text, pooled as the model's own files say."""

from base64 import b64encode
from dataclasses import dataclass
from typing import Any

import numpy as np

from armillary.engine.request.pooling import Pooling
from armillary.serving.http.problem import bad_request
from armillary.serving.openai.generation import Generation
from armillary.serving.openai.pooled_generation import (
    PooledChoices,
    Vectors,
    encode_text,
    normalized,
    pooled_generation,
)
from armillary.serving.openai.pooling_request import MOST_INPUTS, EmbeddingRequest
from armillary.serving.openai.served_model import ServedModel


@dataclass(frozen=True)
class EmbeddingFormatter:
    """Writes vectors as OpenAI does."""

    body: EmbeddingRequest

    def response(self, vectors_NH: Vectors) -> dict[str, Any]:
        vectors_NH = vectors_NH[:, : self.body.dimensions]
        if self.body.normalize is not False:
            vectors_NH = normalized(vectors_NH)
        data = [
            {"object": "embedding", "index": i, "embedding": self._encoded(vector_H)}
            for i, vector_H in enumerate(vectors_NH)
        ]
        return {"object": "list", "data": data}

    def _encoded(self, vector_H: Vectors) -> Any:
        if self.body.encoding_format == "base64":
            return b64encode(vector_H.astype("<f4").tobytes()).decode()
        return np.asarray(vector_H, dtype=np.float64).tolist()


async def embed(served: ServedModel, body: EmbeddingRequest, begin: float) -> tuple[Generation, PooledChoices]:
    """The vectors that a validated body asks for."""
    pooling = embedding_pooling(served)
    if body.dimensions is not None and body.dimensions > served.hidden:
        raise bad_request(f"dimensions={body.dimensions} is more than the model's {served.hidden}", "dimensions")
    prompts = await _prompts(served, body)
    generation = pooled_generation(served, body, prompts, pooling, begin, "input")
    return generation, PooledChoices(EmbeddingFormatter(body))


def embedding_pooling(served: ServedModel) -> Pooling:
    """How this model's embeddings are pooled; Problem 400 where it has none."""
    config = served.pooling
    if config.unsupported:
        raise bad_request(
            f"'{served.name}' has no embeddings on this server: {config.unsupported}; ask a server of another model",
            "model",
            "pooling_unsupported",
        )
    return Pooling(mode=config.mode)


async def _prompts(served: ServedModel, body: EmbeddingRequest) -> list[list[int]]:
    given = body.input
    many: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if isinstance(given, list) and len({type(item) for item in given}) > 1:
        raise bad_request("input mixes texts, ids and lists; give a list of one kind", "input")
    if len(many) > MOST_INPUTS:
        raise bad_request(f"{len(many):,} texts are more than {MOST_INPUTS:,}; send several requests", "input")
    prompts = []
    for item in many:
        if isinstance(item, list):
            most = None if body.truncate_prompt_tokens in (None, -1) else body.truncate_prompt_tokens
            prompts.append(item[:most])
        else:
            text = served.pooling.default_prompt + item
            special = body.add_special_tokens is not False
            prompts.append(await encode_text(served, text, body, "input", special=special))
    return prompts
