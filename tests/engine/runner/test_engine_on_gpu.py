"""The engine on a GPU: graphs change nothing, and answers are those of the CPU and of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from armillary.engine.runner.executor import FastExecutor
from armillary.model.transformer import Transformer, build
from tests.engine.fake import ask
from tests.engine.runner.test_reference_executor import MODELS, model, serve
from tests.model.layers.test_attention_forms import small

pytestmark = pytest.mark.gpu


def requests(**wishes: Any) -> list[Any]:
    made = [ask(f"r{i}", [2 + i % 5, 3, 4, 5] * (1 + i % 4), 12, **{"temperature": 0.0} | wishes) for i in range(9)]
    return [*made, ask("wishes", [5, 6], 9, temperature=1.0, seed=3, n=2, logprobs=2, frequency_penalty=0.4)]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_answers_are_those_of_the_cpu(name: str) -> None:
    on_gpu = build(MODELS[name], dtype=torch.float32, device="cuda", seed=3)
    found = serve(MODELS[name], on_gpu, requests(), executor=FastExecutor)
    right = serve(MODELS[name], model(name), requests(), executor=FastExecutor)
    assert [made.tokens for made in found] == [made.tokens for made in right]


SIZES: dict[str, Any] = {
    "hidden": 256,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 512,
    "vocab": 1000,
    "num_layers": 3,
    "context": 128,
}
EXPERTS = {"moe": {"num_experts": 8, "top_k": 2, "ffn": 128}}


@pytest.mark.parametrize("more", [{}, EXPERTS, {"qk_norm": "all"}], ids=["dense", "experts", "whole norm"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graphs_change_no_bit(dtype: torch.dtype, temperature: float, more: dict[str, Any]) -> None:
    config = small(**SIZES | more)
    weights: Transformer = build(config, dtype=dtype, device="cuda", seed=3)
    executors: list[FastExecutor] = []

    def made(*args: Any, graphs: bool, **named: Any) -> FastExecutor:
        executor = FastExecutor(*args, graphs=graphs, **named)
        if executors:
            executor.encoder.fit = executors[0].encoder.fit  # the same padding
        executors.append(executor)
        return executor

    wanted = requests(temperature=temperature, seed=1)
    first = serve(config, weights, wanted, executor=lambda *a, **k: made(*a, graphs=True, **k))
    second = serve(config, weights, wanted, executor=lambda *a, **k: made(*a, graphs=False, **k))
    assert [made.tokens for made in first] == [made.tokens for made in second]
    assert [made.logprobs for made in first] == [made.logprobs for made in second]
    assert executors[0].steps is not None and executors[0].warm() > 5


@pytest.mark.parametrize("graphs", [False, True])
def test_a_full_device_makes_steps_smaller_and_changes_no_answer(graphs: bool) -> None:
    """An MLP of 1,000 tokens takes over 500 MB; all memory but some 150 MB is taken by somebody else."""
    config = small(**SIZES | {"ffn": 65_536, "vocab": 50_000, "num_layers": 2, "context": 2048})
    weights: Transformer = build(config, dtype=torch.float32, device="cuda", seed=3)
    wanted = [
        ask(
            f"r{i}",
            [2 + i, 3, 4, 5] * (250 if i == 1 else 3),
            8,
            temperature=0.8,
            seed=i,
            frequency_penalty=0.4 * (i % 2),
        )
        for i in range(6)
    ]
    shared: dict[str, Any] = {"max_tokens_per_step": 1024, "max_running": 8, "block_tokens": 16, "blocks": 400}
    free = serve(config, weights, wanted, executor=lambda *a, **k: FastExecutor(*a, graphs=graphs, **k), **shared)
    made: list[FastExecutor] = []

    def crowded(*args: Any, **named: Any) -> FastExecutor:
        made.append(FastExecutor(*args, graphs=graphs, **named))
        torch.cuda.empty_cache()
        taken.append(torch.empty(torch.cuda.mem_get_info()[0] - 150_000_000, dtype=torch.uint8, device="cuda"))
        return made[-1]

    taken: list[torch.Tensor] = []
    try:
        tight = serve(config, weights, wanted, executor=crowded, **shared)
    finally:
        taken.clear()
        torch.cuda.empty_cache()
    assert [one.tokens for one in tight] == [one.tokens for one in free] and not any(one.error for one in tight)
