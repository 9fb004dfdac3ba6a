"""Log-probabilities of the engine, paged and batched, are those of a full forward pass, to the rounding of fp32."""

from __future__ import annotations

import pytest
import torch

from armillary.engine.engine import Completion
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import Transformer
from tests.engine.fake import ask
from tests.engine.runner.test_executor import padded
from tests.engine.runner.test_families import models
from tests.engine.runner.test_reference_executor import serve

NEW = ("deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text", "glm4_moe")
SIZES = (23, 1, 9)  # of prompts


def logprobs(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """[T - 1]: of every token but the first."""
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        logits = model.head(model(ids, torch.arange(len(tokens))[None], plain))[0]
    return logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]


def found(made: Completion) -> torch.Tensor:
    return torch.tensor([each.value for each in (*made.prompt_logprobs, *made.logprobs)])


@pytest.mark.parametrize("family", NEW)
def test_paged_and_batched_are_full_and_single(family: str) -> None:
    _, model = models(family, 1)
    requests = [
        ask(f"r{size}", [3 + i % 5 for i in range(size)], 6, temperature=0.0, logprobs=0, prompt_logprobs=0)
        for size in SIZES
    ]
    settings = {"executor": padded, "block_tokens": 4, "max_tokens_per_step": 12}
    together = serve(model.config, model, requests, **settings)  # type: ignore[arg-type]
    for request, batched in zip(requests, together, strict=True):
        (single,) = serve(model.config, model, [request], **settings)  # type: ignore[arg-type]
        assert batched.tokens == single.tokens
        full = logprobs(model, [*request.prompt, *batched.tokens])
        for paged in (found(batched), found(single)):
            assert float((paged - full).norm() / full.norm()) < 1e-5
