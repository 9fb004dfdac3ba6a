"""A folder to answers: the Python API, against plain generation."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from armillary.errors import BadInput, BadRecipe
from armillary.model.bpe import train_tokenizer
from armillary.model.generate import Sampling, generate
from armillary.model.transformer import build
from armillary.model.weights import save_model
from armillary.serving.engine.llm import LLM
from armillary.serving.engine.params import SamplingParams
from armillary.serving.engine.request import Request
from armillary.serving.engine.worker import Worker
from armillary.spec.job import Serve
from armillary.store.gauges import GaugeWriter, read_gauges
from tests.model.test_attend import small

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
TEXTS = ["def main", "return", "def main():\n    re"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm")
    tokenizer = train_tokenizer(["def main():\n    return 0\n"] * 20, 300)
    tokenizer.save(path / "tokenizer")
    model = build(small(vocab=tokenizer.vocab_size), dtype=torch.float32, device="cpu", seed=3)
    return save_model(model, path / "m", like=path / "tokenizer")


def test_texts_are_continued_as_by_plain_generation(folder: Path, tmp_path: Path) -> None:
    plain = generate(folder, TEXTS, Sampling(max_tokens=12, temperature=0))
    with GaugeWriter(tmp_path / "gauges.jsonl") as writer:
        llm = LLM(folder, Serve(block_tokens=4, kv_bytes=100_000, max_running=4), device="cpu", record=writer.write)
        found = llm.generate(TEXTS, GREEDY)
    assert [(made.tokens, made.text, made.finish) for made in found] == [
        (list(made.tokens), made.text, made.finish) for made in plain
    ]
    records = list(read_gauges(tmp_path / "gauges.jsonl"))
    assert sum("request" in record for record in records) == 3 and any("engine_step_s" in record for record in records)


def test_stop_texts_wishes_each_and_errors_of_one(folder: Path) -> None:
    llm = LLM(folder, Serve(block_tokens=4, kv_bytes=100_000, max_running=4), device="cpu")
    (whole,) = llm.generate(TEXTS[:1], GREEDY)
    stop = whole.text[4:6]
    cut, wrong, ids = llm.generate(
        [TEXTS[0], [9999], llm.tokenizer.encode(TEXTS[0])],
        [SamplingParams(temperature=0.0, max_tokens=12, stop=(stop,)), GREEDY, GREEDY],
    )
    assert cut.text == whole.text[: whole.text.find(stop)] and cut.finish == "stop"
    assert "outside the vocabulary" in wrong.error and ids.tokens == whole.tokens
    with pytest.raises(BadInput, match="1 prompts have 2 parameters"):
        llm.generate(TEXTS[:1], [GREEDY, GREEDY])


def test_streaming_gives_the_same_text(folder: Path) -> None:
    llm = LLM(folder, Serve(block_tokens=4, kv_bytes=100_000, max_running=4), device="cpu")
    whole = [made.text for made in llm.generate(TEXTS, GREEDY)]
    worker = Worker(llm.engine).start()

    async def text(name: str, prompt: str) -> str:
        request = Request(id=name, prompt=llm.tokenizer.encode(prompt), params=GREEDY)
        return "".join([piece.text async for piece in worker.stream(request)])

    async def texts() -> list[str]:
        return await asyncio.gather(*(text(str(i), prompt) for i, prompt in enumerate(TEXTS)))

    assert asyncio.run(asyncio.wait_for(texts(), 60)) == whole
    worker.stop()


def test_the_cache_is_no_larger_than_a_full_batch_needs(folder: Path) -> None:
    llm = LLM(folder, Serve(block_tokens=16, max_running=2, max_tokens_per_step=64), device="cpu")
    assert llm.plan.sequences_of(64) == 2 and "128 tokens = 2 sequences of 64" in llm.plan.text((64,))
    with pytest.raises(BadRecipe, match=r"try --set serve\.max_model_len=64"):
        LLM(folder, Serve(max_model_len=65), device="cpu")
