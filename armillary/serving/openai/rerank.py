"""POST /v1/rerank and /v1/score: how well texts fit a query.

An embedding model compares the vectors of both (cosine). A model that was trained to judge, like Qwen3-Reranker, reads
query and document together and is asked for yes or no; the score is the probability of yes against no.
"""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np

from armillary.engine.request.pooling import Pooling
from armillary.serving.http.problem import bad_request
from armillary.serving.openai.embeddings import embedding_pooling
from armillary.serving.openai.generation import Generation
from armillary.serving.openai.pooled_generation import (
    PooledChoices,
    VectorFormatter,
    Vectors,
    encode_text,
    normalized,
    pooled_generation,
)
from armillary.serving.openai.pooling_request import PoolingFields, RerankRequest, ScoreRequest
from armillary.serving.openai.served_model import ServedModel

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_BEFORE = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""the prompt of Qwen3-Reranker, as its model card gives it"""


@dataclass(frozen=True)
class Pairs:
    """Scores of (query, document) pairs from the vectors of their prompts."""

    queries: list[int]  # for each pair: the prompt of its query; empty: a prompt holds both, and gives (no, yes)
    documents: list[int]

    def scores(self, vectors_NH: Vectors) -> list[float]:
        if not self.queries:
            margins = (vectors_NH[:, 1] - vectors_NH[:, 0]).astype(np.float64)
            return [float(score) for score in 1 / (1 + np.exp(-np.clip(margins, -700, 700)))]
        units_NH = normalized(vectors_NH)
        return [float(score) for score in (units_NH[self.queries] * units_NH[self.documents]).sum(axis=1)]


@dataclass(frozen=True)
class RerankFormatter:
    """Writes the best documents first."""

    body: RerankRequest
    compared: Pairs

    def response(self, vectors_NH: Vectors) -> dict[str, Any]:
        scores, texts = self.compared.scores(vectors_NH), _texts_of(self.body)
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: self.body.top_n]
        shown = self.body.return_documents is not False
        results = [
            {"index": i, "relevance_score": scores[i]} | ({"document": {"text": texts[i]}} if shown else {})
            for i in best
        ]
        return {"id": f"rerank-{uuid4().hex}", "results": results}


@dataclass(frozen=True)
class ScoreFormatter:
    """Writes scores in the order of the texts."""

    compared: Pairs

    def response(self, vectors_NH: Vectors) -> dict[str, Any]:
        scores = enumerate(self.compared.scores(vectors_NH))
        data = [{"object": "score", "index": i, "score": score} for i, score in scores]
        return {"id": f"score-{uuid4().hex}", "object": "list", "data": data}


async def rerank(served: ServedModel, body: RerankRequest, begin: float) -> tuple[Generation, PooledChoices]:
    """The ranking that a validated body asks for."""
    documents = _texts_of(body)
    prompts, pooling, compared = await _prompts(served, body, [body.query], documents, ("query", "document"))
    return _started(served, body, prompts, pooling, begin, "documents", RerankFormatter(body, compared))


async def score(served: ServedModel, body: ScoreRequest, begin: float) -> tuple[Generation, PooledChoices]:
    """The scores that a validated body asks for."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) not in (1, len(second)):
        raise bad_request(f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many", "text_1")
    prompts, pooling, compared = await _prompts(served, body, first, second, ("", ""))
    return _started(served, body, prompts, pooling, begin, "text_2", ScoreFormatter(compared))


def _texts_of(body: RerankRequest) -> list[str]:
    return [each if isinstance(each, str) else each.text for each in body.documents]


def _started(
    served: ServedModel,
    body: PoolingFields,
    prompts: list[list[int]],
    pooling: Pooling,
    begin: float,
    param: str,
    formatter: VectorFormatter,
) -> tuple[Generation, PooledChoices]:
    return pooled_generation(served, body, prompts, pooling, begin, param), PooledChoices(formatter)


async def _prompts(
    served: ServedModel,
    body: RerankRequest | ScoreRequest,
    queries: list[str],
    documents: list[str],
    kinds: tuple[str, str],
) -> tuple[list[list[int]], Pooling, Pairs]:
    """Prompts, their pooling, and the pairs of them; `kinds` name the model's own prompts for both sides."""
    if served.scoring == "yes_no":
        asked_of = zip(queries * (len(documents) if len(queries) == 1 else 1), documents, strict=True)
        prompts = [await _judged(served, body, query, document) for query, document in asked_of]
        return prompts, Pooling(mode="logits", token_ids=_no_yes(served)), Pairs([], [])
    pooling, config = embedding_pooling(served), served.pooling
    before = [config.prompts.get(kind, config.default_prompt) for kind in kinds]
    texts = [before[0] + text for text in queries] + [before[1] + text for text in documents]
    prompts = [await encode_text(served, text, body, "documents") for text in texts]
    places = range(len(queries), len(texts))
    asked = [min(i, len(queries) - 1) for i in range(len(documents))]
    return prompts, pooling, Pairs(asked, list(places))


async def _judged(served: ServedModel, body: RerankRequest | ScoreRequest, query: str, document: str) -> list[int]:
    """The prompt that asks whether a document answers a query; a long document is cut, not the question after it."""
    longest, tokenization = served.max_model_len, served.tokenization
    before, after = [await tokenization.encode(text, longest, "query", special=False) for text in (_BEFORE, _AFTER)]
    text = f"<Instruct>: {body.instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    reserved = len(before) + len(after)
    return before + await encode_text(served, text, body, "documents", special=False, reserved=reserved) + after


def _no_yes(served: ServedModel) -> tuple[int, int]:
    """The tokens of both answers."""
    tokenizer = served.tokenization.tokenizer
    answers = [tokenizer.encode(text, special=False) for text in ("no", "yes")] if tokenizer is not None else []
    if [len(ids) for ids in answers] != [1, 1]:
        raise bad_request(
            f"'{served.name}' cannot judge by yes and no, which are no single tokens of it; start it with --set "
            "serve.scoring=embedding",
            "model",
            "pooling_unsupported",
        )
    return answers[0][0], answers[1][0]
