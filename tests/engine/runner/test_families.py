"""Greedy answers are transformers' own, token for token, for every family and whatever the schedule."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.engine.runner.executor import FastExecutor
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import load_model
from tests.engine.fake import ask
from tests.engine.runner.test_executor import padded
from tests.engine.runner.test_reference_executor import serve
from tests.model.families import FAMILIES, random_model

TOKENS = 8
LONG, LONG_SEEDS = {"original_max_position_embeddings": 20}, (101, 105)


@cache
def models(family: str, seed: int) -> tuple[Any, Transformer]:
    theirs = random_model(family, seed, **LONG if seed in LONG_SEEDS else {})
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder) / "model")
        return theirs, load_model(Path(folder) / "model")


@cache
def their_answer(family: str, seed: int, prompt: tuple[int, ...]) -> list[int]:
    theirs, _ = models(family, seed)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        made = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_greedy_answers_equal_transformers(family: str, data: st.DataObject) -> None:
    draw = data.draw
    seed = draw(st.integers(0, 2))
    config = models(family, seed)[1].config
    sizes = draw(st.lists(st.integers(1, 26), min_size=1, max_size=4))
    wanted = [tuple(3 + (i + size % 2) % 5 for i in range(size)) for size in sizes]  # some begin alike
    requests = [ask(f"r{i}", prompt, TOKENS, temperature=0.0) for i, prompt in enumerate(wanted)]
    found = serve(
        config,
        models(family, seed)[1],
        requests,
        executor=draw(st.sampled_from([FastExecutor, padded])),
        overlap=draw(st.booleans()),
        batching=draw(st.sampled_from(["none", "static", "dynamic", "continuous"])),
        batch_window_s=0.001,
        block_tokens=draw(st.sampled_from([1, 4, 7])),
        blocks=draw(st.sampled_from([36, 40, 80])),
        max_tokens_per_step=draw(st.sampled_from([4, 7, 64])),
        prefix_cache=draw(st.booleans()),
    )
    assert [made.tokens for made in found] == [their_answer(family, seed, prompt) for prompt in wanted]


@pytest.mark.parametrize("seed", LONG_SEEDS)
@pytest.mark.parametrize(("overlap", "blocks"), [(True, 80), (False, 80), (True, 36)])
def test_answers_that_grow_across_a_switch_of_rotary_frequencies(seed: int, overlap: bool, blocks: int) -> None:
    config, weights = models("phi3", seed)[1].config, models("phi3", seed)[1]
    assert config.rope.original_context == 20
    wanted = [tuple(3 + i % 5 for i in range(size)) for size in (12, 13, 15, 18, 20, 21, 24)]
    requests = [ask(f"r{i}", prompt, TOKENS, temperature=0.0, n=1 + i % 2) for i, prompt in enumerate(wanted)]
    found = serve(config, weights, requests, executor=padded, overlap=overlap, blocks=blocks, block_tokens=1)
    for made in found:
        assert made.tokens == their_answer("phi3", seed, tuple(made.request.prompt)), len(made.request.prompt)
