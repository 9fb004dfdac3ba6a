"""A folder to answers: the Python API, against plain generation."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import armillary
from armillary.engine.engine_thread import EngineThread
from armillary.engine.llm import LLM
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import Sampling, SamplingParams, default_sampling
from armillary.errors import BadInput, BadRecipe
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from armillary.profiling.ceilings.ceilings import name_of
from armillary.spec.tables.serve import Serve
from armillary.store.gauges import GaugeWriter, read_gauges
from armillary.store.home import Home
from armillary.store.peaks import Peaks, save_peaks
from tests.model.families import random_model
from tests.model.layers.test_attention_forms import small
from tests.model.plain_generation import plain_completions

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
TEXTS = ["def main", "return", "def main():\n    re"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm")
    tokenizer = train_tokenizer(["def main():\n    return 0\n"] * 20, 300)
    tokenizer.save(path / "tokenizer")
    model = build(small(vocab=tokenizer.vocab_size), dtype=torch.float32, device="cpu", seed=3)
    return save_model(model, path / "m", template=path / "tokenizer")


def test_texts_are_continued_as_by_plain_generation(folder: Path, tmp_path: Path) -> None:
    plain = plain_completions(folder, TEXTS, Sampling(max_tokens=12, temperature=0))
    with GaugeWriter(tmp_path / "gauges.jsonl") as writer:
        llm = LLM(folder, Serve(block_tokens=4, kv_bytes=100_000, max_running=4), device="cpu", record=writer.write)
        found = llm.generate(TEXTS, GREEDY)
    assert [(made.tokens, made.text, made.finish) for made in found] == plain
    records = list(read_gauges(tmp_path / "gauges.jsonl"))
    assert sum("request" in record for record in records) == 3 and any("engine_step_s" in record for record in records)


def test_one_call_does_the_same(folder: Path) -> None:
    sampling = Sampling(max_tokens=12, temperature=0)
    found = armillary.generate(folder, TEXTS, sampling, device="cpu")
    assert [made.prompt for made in found] == list(TEXTS)
    assert [(made.tokens, made.text, made.finish) for made in found] == plain_completions(folder, TEXTS, sampling)
    with pytest.raises(BadInput, match="exceed the context"):
        armillary.generate(folder, TEXTS, Sampling(max_tokens=1000), device="cpu")


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
    worker = EngineThread(llm.engine).start()

    async def text(name: str, prompt: str) -> str:
        request = Request(id=name, prompt=llm.tokenizer.encode(prompt), params=GREEDY)
        return "".join([delta.text async for delta in worker.stream(request)])

    async def texts() -> list[str]:
        return await asyncio.gather(*(text(str(i), prompt) for i, prompt in enumerate(TEXTS)))

    assert asyncio.run(asyncio.wait_for(texts(), 60)) == whole
    worker.stop()


def test_the_cache_is_no_larger_than_a_full_batch_needs(folder: Path) -> None:
    llm = LLM(folder, Serve(block_tokens=16, max_running=2, max_tokens_per_step=64), device="cpu")
    assert llm.plan.sequences_of(64) == 2 and "128 tokens = 2 sequences of 64" in llm.plan.text((64,))
    with pytest.raises(BadRecipe, match=r"try --set serve\.max_model_len=64"):
        LLM(folder, Serve(max_model_len=65), device="cpu")


def test_many_streams_at_once_by_the_object_itself(folder: Path) -> None:
    with armillary.LLM(folder, Serve(block_tokens=4, kv_bytes=100_000, max_running=4), device="cpu") as llm:
        whole = [made.text for made in llm.generate(TEXTS, GREEDY)]

        async def text(prompt: str) -> str:
            return "".join([delta.text async for delta in llm.stream(prompt, GREEDY)])

        async def texts() -> list[str]:
            return await asyncio.gather(*map(text, TEXTS))

        assert asyncio.run(asyncio.wait_for(texts(), 60)) == whole
        with pytest.raises(BadInput, match="close"):
            llm.generate(TEXTS, GREEDY)
    assert [made.text for made in llm.generate(TEXTS, GREEDY)] == whole


BAD = {
    "": "",
    "\ud800": "surrogates",
    (): "is empty",
    (2, -1): "token -1 outside",
    (2, 10**9): "outside the",
    (1.5,): "has 1.5 among",
    (True,): "has True among",
    ("a",): "whole numbers",
    b"ab": "of type bytes",
    None: "of type NoneType",
    7: "of type int",
    tuple([2] * 500): "shorten it to 63",
}


@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_wrong_with_a_prompt_is_said_to_it_alone(folder: Path, streamed: bool) -> None:
    serve = Serve(block_tokens=4, kv_bytes=100_000, max_running=4, check_every=1)
    prompts = [mixed for bad in BAD for mixed in (bad, TEXTS[0], (2, 3, 4), torch.tensor([2, 3, 4]))]
    with LLM(folder, serve, device="cpu") as llm:
        right = [made.tokens for made in llm.generate([TEXTS[0], (2, 3, 4)], GREEDY)]

        async def one(prompt: Any) -> tuple[list[int], str]:
            try:
                return [token async for delta in llm.stream(prompt, GREEDY) for token in delta.tokens], ""
            except BadInput as error:
                return [], str(error)

        async def all_of_them() -> list[tuple[list[int], str]]:
            return await asyncio.gather(*map(one, prompts))

        if streamed:
            found = asyncio.run(asyncio.wait_for(all_of_them(), 60))
        else:
            found = [(made.tokens, made.error) for made in llm.generate(prompts, GREEDY)]
    for at, words in enumerate(BAD.values()):
        (tokens, error), good, ids, array = found[4 * at : 4 * at + 4]
        assert words in error and (bool(error) or tokens) and "\n" not in error
        assert good == (right[0], "") and ids == array == (right[1], "")


def test_a_model_without_a_tokenizer_answers_token_ids(tmp_path: Path) -> None:
    theirs = random_model("llama", 1)
    theirs.save_pretrained(tmp_path)
    prompt, ends = [3, 4, 5, 6, 7], theirs.generation_config.eos_token_id
    right = theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 5), max_new_tokens=20, do_sample=False, pad_token_id=0
    )[0, 5:].tolist()
    llm = LLM(tmp_path, Serve(block_tokens=4, kv_bytes=400_000, max_running=4), device="cpu")
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    shaped = SamplingParams(max_tokens=5, structure=armillary.Structure(kind="json"))
    made, text, structured = llm.generate([prompt, "text", prompt], [greedy, greedy, shaped])
    assert made.tokens == right and (made.finish == "stop") == (right[-1] == ends) and not made.text
    assert "give token ids" in text.error and structured.finish == "error"
    assert llm.engine.scheduler.settings.eos_ids == {ends}


def test_a_cache_too_small_for_one_is_said_to_that_one(folder: Path) -> None:
    llm = LLM(folder, Serve(block_tokens=4, kv_bytes=5000, max_running=4), device="cpu")
    long, short = llm.generate([[2] * 16, [2, 3]], SamplingParams(max_tokens=4, temperature=0.0))
    assert "may have 12 together; shorten it to 11 or raise serve.max_model_len and serve.kv_bytes" in long.error
    assert len(short.tokens) == 4
    with pytest.raises(BadInput, match="a single text; give a list"):
        llm.generate("def main")


def test_fewer_bits_change_little_and_never_with_the_batch(folder: Path) -> None:
    told: list[str] = []
    serve = Serve(block_tokens=4, kv_bytes=100_000, max_running=4, weights="int8")
    llm = LLM(folder, serve, device="cpu", phase=lambda name, seconds: told.append(name))
    wish = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    exact = LLM(folder, Serve(max_running=1), device="cpu")
    (near,), (right,) = llm.generate(TEXTS[:1], wish), exact.generate(TEXTS[:1], wish)
    assert near.logprobs[0].value == pytest.approx(right.logprobs[0].value, abs=0.1)
    alone = [llm.generate([text], GREEDY)[0].tokens for text in TEXTS]
    assert [made.tokens for made in llm.generate(TEXTS, GREEDY)] == alone
    assert told == ["weights", "kernels and KV cache"]
    with pytest.raises(BadInput, match="no scales for a KV cache in int8"):
        LLM(folder, Serve(kv_dtype="int8", kv_bytes=100_000), device="cpu")


def test_structures_always_validate(folder: Path) -> None:
    llm = LLM(folder, Serve(block_tokens=4, kv_bytes=400_000, max_running=4), device="cpu")
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}}, "required": ["a", "b"], "additionalProperties": false}'  # noqa: E501
    structures = [
        armillary.Structure(kind="regex", source="[0-9]{3}-[a-f]{2}"),
        armillary.Structure(kind="choice", source="yes\nno\nmaybe"),
        armillary.Structure(kind="grammar", source='start: "<" /[a-z]{1,4}/ ">"'),
        armillary.Structure(kind="regex", source="[0-9"),
        armillary.Structure(kind="json_schema", source=schema),
    ]
    wishes = [
        SamplingParams(temperature=1.5, seed=i, max_tokens=50, structure=kind, n=2) for i, kind in enumerate(structures)
    ]
    found = llm.generate([TEXTS[0]] * len(wishes), wishes)
    for made in found:
        kind = structures[wishes.index(made.request.params)]
        if kind.source == "[0-9":
            assert made.finish == "error" and "cannot be used" in made.error
        elif made.finish == "stop":
            assert matches(kind, made.text), made.text
    assert sum(made.finish == "stop" for made in found) >= 6


def matches(structure: armillary.Structure, text: str) -> bool:
    if structure.kind == "choice":
        return text in structure.source.splitlines()
    if structure.kind == "json_schema":
        value = json.loads(text)
        return set(value) == {"a", "b"} and isinstance(value["a"], int) and value["b"] in ("x", "yz")
    pattern = structure.source if structure.kind == "regex" else "<[a-z]{1,4}>"
    return re.fullmatch(pattern, text) is not None


def test_steps_are_held_against_the_measured_roofline(folder: Path, home: Home) -> None:
    points = {
        "read": ({"bytes": 1 << 30, "bytes_per_s": 1e10},),
        "gemm": ({"m": 1, "n": 1, "k": 1, "dtype": "fp32", "flops": 1e11},),
    }
    save_peaks(home, Peaks(device=name_of(torch.device("cpu")), date="2026-01-01", points=points))
    records: list[dict[str, float]] = []
    serve = Serve(block_tokens=4, kv_bytes=100_000, max_running=4)
    llm = LLM(folder, serve, home=home, device="cpu", record=lambda gauges, **_: records.append(gauges))
    llm.generate(TEXTS, GREEDY)
    shares = [record["engine_roofline_fraction"] for record in records if "engine_roofline_fraction" in record]
    assert len(shares) > 5 and all(share > 0 for share in shares)


def test_the_default_length_is_what_the_cache_can_hold(folder: Path) -> None:
    llm = LLM(folder, Serve(block_tokens=4, kv_bytes=10_000, max_running=4), device="cpu")
    settings, cache = llm.engine.scheduler.settings, llm.engine.scheduler.cache
    assert settings.max_model_len == cache.num_blocks * 4 < llm.plan.config.context == 64
    assert llm.notes == (
        f"max_model_len is {settings.max_model_len} and not the context of 64: "
        "the KV cache holds no more; raise serve.kv_bytes for longer answers",
    )
    (made,) = llm.generate(["def main"], SamplingParams(temperature=0.0, ignore_eos=True))
    assert made.finish == "length" and len(made.request.prompt) + len(made.tokens) == settings.max_model_len
    assert LLM(folder, Serve(block_tokens=4, kv_bytes=100_000, max_running=4), device="cpu").notes == ()


def test_a_length_that_was_asked_for_and_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"try --set serve\.max_model_len=\d+ or --set serve\.kv_bytes=\d+$") as refused:
        LLM(folder, Serve(block_tokens=4, kv_bytes=10_000, max_model_len=64), device="cpu")
    for key, value in re.findall(r"serve\.(\w+)=(\d+)", str(refused.value))[1:]:  # each of the next steps works
        asked = {"kv_bytes": 10_000, "max_model_len": 64} | {key: int(value)}
        LLM(folder, Serve(block_tokens=4, **asked), device="cpu")


def test_a_call_without_parameters_takes_the_models_own(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "own"
    shutil.copytree(folder, made)
    table = {"eos_token_id": [3, 7], "temperature": 1.5, "top_k": 1, "max_new_tokens": 9, "min_p": None}
    (made / "generation_config.json").write_text(json.dumps(table))
    own = LLM(made, Serve(block_tokens=4, kv_bytes=100_000, max_running=4), device="cpu")
    assert own.default_params == SamplingParams(temperature=1.5, top_k=1, max_tokens=9)
    assert {3, 7} <= own.engine.scheduler.settings.eos_ids
    greedy = own.generate(TEXTS, SamplingParams(temperature=0.0, max_tokens=9))
    assert [answer.tokens for answer in own.generate(TEXTS)] == [answer.tokens for answer in greedy]
    neutral = LLM(made, Serve(block_tokens=4, kv_bytes=100_000, generation_config="none"), device="cpu")
    assert neutral.default_params == SamplingParams()
    assert default_sampling(made) == Sampling(temperature=1.5, top_k=1) and default_sampling(folder) == Sampling()
