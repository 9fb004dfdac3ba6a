"""Vectors of prompts against their slow twin: the model's plain forward in fp32, pooled by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.engine.request.pooling import Pooling
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams, pooling_params
from armillary.engine.runner.executor import FastExecutor
from armillary.errors import BadInput
from armillary.model.layers.attention_forms import plain
from tests.engine.fake import ask
from tests.engine.runner.test_executor import padded
from tests.engine.runner.test_reference_executor import MODELS, model, serve

POOLINGS = [
    Pooling(mode="last"),
    Pooling(mode="mean"),
    Pooling(mode="cls"),
    Pooling(mode="logits", token_ids=(5, 2, 9)),
]


def by_hand(name: str, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    weights, tokens_1T = model(name), torch.tensor([prompt])
    with torch.inference_mode():
        hidden_TH = weights(tokens_1T, torch.arange(len(prompt))[None], plain)[0]
        match pooling.mode:
            case "last":
                return hidden_TH[-1]
            case "mean":
                return hidden_TH.mean(0)
            case "cls":
                return hidden_TH[0]
            case _:
                return weights.head(hidden_TH)[-1, list(pooling.token_ids)]


@settings(max_examples=6, deadline=None)
@given(
    name=st.sampled_from(["plain", "hybrid"]),
    prompts=st.lists(st.lists(st.integers(2, 6), min_size=1, max_size=18), min_size=1, max_size=5),
    blocks=st.sampled_from([7, 12, 60]),
    max_tokens_per_step=st.sampled_from([4, 7, 32]),
    prefix_cache=st.booleans(),
    overlap=st.booleans(),
    executor=st.sampled_from([FastExecutor, padded]),
)
def test_vectors_are_those_of_a_plain_forward(name: str, prompts: list[list[int]], **schedule: Any) -> None:
    """In one step with each other and with generation, in chunks, after preemptions and with cached prefixes."""
    pooled = [(prompt, POOLINGS[i % 4]) for i, prompt in enumerate(prompts)]
    requests = [
        Request(id=f"p{i}", prompt=prompt, params=pooling_params(pooling)) for i, (prompt, pooling) in enumerate(pooled)
    ]
    generated = [ask(f"g{i}", prompt, 6, temperature=0.0) for i, prompt in enumerate(prompts)]
    mixed = [request for pair in zip(generated, requests, strict=True) for request in pair]
    made = {each.request.id: each for each in serve(MODELS[name], model(name), mixed, **schedule)}
    alone = serve(MODELS[name], model(name), generated)
    assert [made[each.id].tokens for each in generated] == [each.tokens for each in alone]
    for request, (prompt, pooling) in zip(requests, pooled, strict=True):
        found = made[request.id]
        assert (found.tokens, found.finish, found.error) == ([], "length", "")
        torch.testing.assert_close(torch.tensor(found.pooled), by_hand(name, prompt, pooling), rtol=1e-4, atol=1e-5)


def test_a_repeated_prompt_takes_its_prefix_from_the_cache() -> None:
    prompt = [2, 3, 4, 5] * 4
    requests = [Request(id=str(i), prompt=prompt, params=pooling_params(Pooling(mode="last"))) for i in range(2)]
    first, second = serve(MODELS["plain"], model("plain"), requests, executor=FastExecutor, max_running=1)
    torch.testing.assert_close(torch.tensor(first.pooled), torch.tensor(second.pooled), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Pooling(mode="logits"),
        lambda: Pooling(mode="mean", token_ids=(3,)),
        lambda: SamplingParams(max_tokens=2, pooling=Pooling()),
        lambda: SamplingParams(max_tokens=1, n=2, pooling=Pooling()),
    ],
)
def test_what_cannot_be_pooled_is_refused(wrong: Any) -> None:
    with pytest.raises(BadInput):
        wrong()
