"""/v1/embeddings, /v1/rerank and /v1/score: OpenAI's client against a real server, and the model's plain forward."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from armillary.model.layers.attention_forms import plain
from armillary.model.pooling_config import PoolingConfig
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.weights.hf_weights import load_model
from armillary.serving.openai.pooled_generation import _cut
from armillary.serving.openai.run_server import pooling_of
from armillary.serving.processes.engine_ipc import INDEX_BITS, StepOutput, Submit
from armillary.spec.tables.serve import Serve
from tests.serving.openai.test_app import acting, api, call
from tests.serving.tiny import Server

TEXTS = ["def main", "return", "Grüße, naïve"]


def by_hand(folder: Path, text: str) -> list[float]:
    """The slow twin: one forward in fp32, the last token's hidden state, of length 1."""
    model, tokens = load_model(folder, dtype="fp32"), Tokenizer.load(folder).encode(text)
    with torch.inference_mode():
        hidden_H = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], plain)[0, -1]
    return [float(x) for x in hidden_H / hidden_H.norm()]


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_openais_client_gets_the_vectors_of_a_plain_forward(server: Server, folder: Path) -> None:
    right = [by_hand(folder, text) for text in TEXTS]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        made = client.embeddings.create(model="tiny", input=TEXTS)  # base64, unless told
        short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=5, encoding_format="float")
    for each, vector in zip(made.data, right, strict=True):
        assert each.embedding == pytest.approx(vector, abs=1e-5)
    assert made.usage.prompt_tokens == made.usage.total_tokens > 3 and [each.index for each in made.data] == [0, 1, 2]
    length = sqrt(sum(x * x for x in right[0][:5]))
    assert short.data[0].embedding == pytest.approx([x / length for x in right[0][:5]], abs=1e-5)


def test_ids_and_formats(server: Server, folder: Path) -> None:
    ids = Tokenizer.load(folder).encode(TEXTS[0])
    as_ids = server.post("/v1/embeddings", {"input": ids})[1]["data"][0]["embedding"]
    packed = server.post("/v1/embeddings", {"input": [ids], "encoding_format": "base64"})[1]["data"][0]["embedding"]
    data = base64.b64decode(packed)
    assert struct.unpack(f"<{len(data) // 4}f", data) == pytest.approx(tuple(as_ids))
    assert as_ids == pytest.approx(by_hand(folder, TEXTS[0]), abs=1e-5)
    long = server.post("/v1/embeddings", {"input": TEXTS[0], "normalize": False})[1]["data"][0]["embedding"]
    assert cosine(long, long) > 1.5 and cosine(long, as_ids) == pytest.approx(sqrt(cosine(long, long)), rel=1e-4)
    before = server.metric("tokens_out_total")
    cut = server.post("/v1/embeddings", {"input": "x" * 9000, "truncate_prompt_tokens": 7})[1]
    assert cut["usage"]["prompt_tokens"] == 7
    assert server.metric("tokens_out_total") == before  # nothing was decoded


def test_documents_are_ranked_by_the_cosine(server: Server, folder: Path) -> None:
    query, *documents = right = [by_hand(folder, text) for text in ("return 1", *TEXTS)]
    scores = [cosine(query, document) for document in documents]
    body = {"query": "return 1", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], "top_n": 2}
    status, ranked = server.post("/v1/rerank", body)
    order = sorted(range(3), key=lambda i: -scores[i])[:2]
    assert status == 200 and [each["index"] for each in ranked["results"]] == order
    assert [each["relevance_score"] for each in ranked["results"]] == pytest.approx(
        [scores[i] for i in order], abs=1e-5
    )
    assert ranked["results"][0]["document"] == {"text": TEXTS[order[0]]} and ranked["usage"]["prompt_tokens"] > 4
    pairs = server.post("/v1/score", {"text_1": TEXTS, "text_2": TEXTS[::-1]})[1]["data"]
    wanted = [cosine(right[1 + i], right[3 - i]) for i in range(3)]
    assert [each["score"] for each in pairs] == pytest.approx(wanted, abs=1e-5)
    one = server.post("/v1/score", {"text_1": "return 1", "text_2": TEXTS})[1]["data"]
    assert [each["score"] for each in one] == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/embeddings", {"input": ["a", [1]]}, "one kind"),
        ("/v1/embeddings", {"input": [""], "add_special_tokens": False}, "without a token"),
        ("/v1/embeddings", {"input": "a", "dimensions": 100_000}, "more than the model's"),
        ("/v1/embeddings", {"input": [10**6]}, "vocabulary"),
        ("/v1/embeddings", {"input": "漢" * 3000}, "shorten"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "several requests"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "as many"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ],
)
def test_what_has_no_vector_is_refused(server: Server, path: str, body: dict[str, Any], says: str) -> None:
    status, answer = server.post(path, body)
    assert status == 400 and says in answer["error"]["message"], answer


def test_a_model_without_embeddings_says_why(folder: Path) -> None:
    made = acting(api(folder), lambda message: None)
    object.__setattr__(made.served, "pooling", PoolingConfig(unsupported="its pooling is max"))
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
        status, answer, _ = call(made, "POST", path, json.dumps(body).encode())
        assert status == 400 and "its pooling is max" in answer["error"]["message"]
        assert answer["error"]["code"] == "pooling_unsupported"


def test_a_model_that_judges_is_asked_for_yes_or_no(folder: Path) -> None:
    """The prompt has question and document, a long document is cut, and the score is a probability."""
    made, asked = api(folder, max_model_len=700), []

    def act(message: Submit) -> None:
        asked.append(message)
        margin = 2.0 if len(asked) == 1 else -800.0
        made.served.engine._take_output(
            StepOutput(
                pooled={message.number: struct.pack("<2f", 0.0, margin)},
                ends=[(message.number << INDEX_BITS, "length", "", {})],
            )
        )

    acting(made, act)
    assert made.served.engine.started is not None
    made.served.engine.started = replace(made.served.engine.started, max_model_len=700)
    object.__setattr__(made.served, "scoring", "yes_no")
    tokenizer = made.served.tokenization.tokenizer
    assert tokenizer is not None
    single = {text: [ids[0]] for text, ids in ((t, tokenizer.encode(t, special=False)) for t in ("no", "yes"))}
    whole = tokenizer.encode

    def encode(text: str, *, special: bool = True) -> list[int]:
        return single.get(text) or whole(text, special=special)

    object.__setattr__(tokenizer, "encode", encode)
    body = {
        "query": "what?",
        "documents": ["this", "that " * 500],
        "truncate_prompt_tokens": 600,
        "instruction": "Pick",
    }
    status, ranked, _ = call(made, "POST", "/v1/rerank", json.dumps(body).encode())
    assert status == 200, ranked
    assert [each["relevance_score"] for each in ranked["results"]] == pytest.approx([0.8807970779, 0.0], abs=1e-9)
    prompts = [struct.unpack(f"<{len(each.prompt) // 4}i", each.prompt) for each in asked]
    assert [len(prompt) for prompt in prompts][1] == 600
    texts = [tokenizer.decode(prompt, skip_special=False) for prompt in prompts]
    assert "<Instruct>: Pick\n<Query>: what?\n<Document>: this<|im_end|>" in texts[0]
    assert all(text.endswith("</think>\n\n") for text in texts)
    pooling = asked[0].params.pooling
    assert pooling is not None and pooling.token_ids == (single["no"][0], single["yes"][0])


def test_special_tokens_stay_where_a_text_is_cut() -> None:
    assert _cut([1, 5, 6, 7, 8, 2], [5, 6, 7, 8], 4) == [1, 5, 6, 2]
    assert _cut([5, 6, 7], [5, 6, 7], 2) == [5, 6] and _cut([1, 5, 2], [5], 1) == [1]


def test_a_recipe_may_choose_the_pooling(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]')
    assert "Dense" in pooling_of(tmp_path, Serve()).unsupported
    assert pooling_of(tmp_path, Serve(pooling="mean")) == PoolingConfig(mode="mean", described=True)
    assert pooling_of(tmp_path, Serve(pooling="none")).unsupported
