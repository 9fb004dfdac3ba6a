"""The executor against its slow twin: the same answers for any schedule, padding and wish, and log-probabilities."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.engine.request.constraint import Structure
from armillary.engine.runner.cuda_graphs import row_sizes, token_sizes
from armillary.engine.runner.engine_kernels import REFERENCE, EngineKernels
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.step_input import Shape, null_step
from armillary.kernels.gemm.grouped import GROUPED_LINEAR
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import build
from tests.engine.fake import ask
from tests.engine.runner.test_reference_executor import MODELS, Alternates, model, prompts, serve
from tests.kernels.agreeing import loaded
from tests.kernels.interpreter import needs_interpreter
from tests.model.layers.test_attention_forms import small


def padded(*args: Any, **named: Any) -> FastExecutor:
    """As on a GPU: every step a few tokens and rows too large."""
    made = FastExecutor(*args, **named)
    made.encoder.fit = lambda tokens, rows, decodes: (rows + 3, rows + 3) if decodes else (tokens + 5, rows + 2)
    return made


def reference(*args: Any, **named: Any) -> FastExecutor:
    return FastExecutor(*args, kernels=REFERENCE, **named)


@needs_interpreter
def test_experts_grouped_by_pointers_answer_alike() -> None:
    """The kernel that GPUs without TMA have, in the engine: prompts, decoding and padding."""
    config = small(moe={"num_experts": 4, "top_k": 2, "ffn": 16, "shared_ffn": 16})
    weights = build(config, dtype=torch.float32, device="cpu", seed=3)
    kernels = EngineKernels(grouped=loaded(GROUPED_LINEAR, "triton, pointers"))
    requests = [ask("a", [2, 3, 4, 5, 6], 4, temperature=0.0), ask("b", [7], 4, temperature=0.0)]
    right = serve(config, weights, requests)
    found = serve(config, weights, requests, executor=lambda *args, **named: padded(*args, kernels=kernels, **named))
    assert [made.tokens for made in found] == [made.tokens for made in right]


SCHEDULES: dict[str, Any] = dict(
    name=st.sampled_from(sorted(MODELS)),
    wanted=prompts,
    blocks=st.sampled_from([7, 8, 12, 60]),
    batching=st.sampled_from(["none", "static", "continuous"]),
    block_tokens=st.sampled_from([4, 8]),
    max_tokens_per_step=st.sampled_from([4, 7, 32]),
    kv_host_bytes=st.sampled_from([0, 20_000, 500_000]),
    overlap=st.booleans(),
    executor=st.sampled_from([FastExecutor, padded, reference]),
    temperature=st.sampled_from([0.0, 1.0]),
    n=st.integers(1, 2),
    top_k=st.sampled_from([0, 5]),
    penalty=st.sampled_from([0.0, 0.7]),
)


def agree_with_the_slow_twin(
    name: str,
    wanted: list[list[int]],
    executor: Any,
    temperature: float,
    n: int,
    top_k: int,
    penalty: float,
    **given_settings: Any,
) -> None:
    wishes: dict[str, Any] = {"temperature": temperature, "seed": 3, "n": n, "top_k": top_k, "top_p": 0.9}
    requests = [
        ask(f"r{i}", prompt, 9, presence_penalty=penalty * (i % 2), **wishes) for i, prompt in enumerate(wanted)
    ]
    found = serve(MODELS[name], model(name), requests, executor=executor, **given_settings)
    right = serve(MODELS[name], model(name), requests, **given_settings)
    assert [made.tokens for made in found] == [made.tokens for made in right]


@settings(max_examples=8, deadline=None)
@given(**SCHEDULES)
def test_answers_are_those_of_the_slow_twin(**schedule: Any) -> None:
    agree_with_the_slow_twin(**schedule)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(**SCHEDULES)
def test_answers_of_many_schedules_are_those_of_the_slow_twin(**schedule: Any) -> None:
    agree_with_the_slow_twin(**schedule)


def test_norms_over_all_heads_may_come_before_the_kernel() -> None:
    config = small(qk_norm="all", heads=4, kv_heads=2)
    weights = build(config, dtype=torch.float32, device="cpu", seed=3)
    for name, weight in weights.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    requests = [ask(f"r{i}", [2 + i, 3, 4, 5], 9, temperature=0.0) for i in range(3)]
    apart = EngineKernels(norms_apart=True)
    found = serve(config, weights, requests, executor=lambda *a, **k: FastExecutor(*a, kernels=apart, **k))
    assert [made.tokens for made in found] == [made.tokens for made in serve(config, weights, requests)]


@pytest.mark.parametrize("overlap", [False, True])
def test_every_wish_at_once(overlap: bool) -> None:
    config, weights = MODELS["plain"], model("plain")
    (free,) = serve(config, weights, [ask("a", [2, 3], 10, temperature=0.0)])
    requests = [
        ask("least", [2, 3], 10, temperature=0.0, stop_ids=(free.tokens[2],), min_tokens=8),
        ask("bias", [2, 3], 10, temperature=0.0, logit_bias={free.tokens[0]: -100.0, free.tokens[1]: 3.0}),
        ask("penalties", [2, 3], 10, temperature=0.7, seed=1, repetition_penalty=1.3, frequency_penalty=0.3),
        ask("min-p", [2, 3], 10, temperature=2.0, seed=1, min_p=0.3),
    ]
    found = serve(config, weights, requests, overlap=overlap, executor=padded)
    right = serve(config, weights, requests, overlap=overlap)
    assert [made.tokens for made in found] == [made.tokens for made in right]


@pytest.mark.parametrize("overlap", [False, True])
def test_structures_hold(overlap: bool) -> None:
    structure = Structure(kind="regex", source="alternating")
    requests = [ask(f"r{i}", [2 + i, 3], 20, structure=structure, n=2) for i in range(3)]
    found = serve(
        MODELS["plain"],
        model("plain"),
        requests,
        overlap=overlap,
        executor=padded,
        constraints={f"r{i}": Alternates for i in range(3)},
    )
    assert all(made.finish == "stop" and [t % 2 for t in made.tokens] == [0, 1] * 3 for made in found)


def test_log_probabilities_of_answers_and_prompts() -> None:
    config, weights = MODELS["plain"], model("plain")
    prompt = [2, 3, 4, 5, 6, 7, 8]
    wishes: dict[str, Any] = {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2, "n": 2}
    first, second = serve(config, weights, [ask("a", prompt, 5, **wishes)], executor=padded, max_tokens_per_step=4)
    with torch.inference_mode():
        tokens = torch.tensor([prompt + first.tokens])
        logits = weights.head(weights(tokens, torch.arange(tokens.shape[1])[None], plain))[0]
        right = logits.log_softmax(-1)
    assert [entry.token for entry in first.prompt_logprobs] == prompt[1:]
    for at, entry in enumerate([*first.prompt_logprobs, *first.logprobs]):
        assert entry.value == pytest.approx(float(right[at, entry.token]), abs=1e-4)
        assert len(entry.top) == (2 if at < len(prompt) - 1 else 3)
        assert entry.top[0][1] == pytest.approx(float(right[at].max()), abs=1e-4)
    assert [entry.token for entry in first.logprobs] == first.tokens
    assert second.prompt_logprobs == first.prompt_logprobs


def test_padding_writes_nothing_and_sizes_cover_everything() -> None:
    ints = null_step(Shape(8, 4, 2, False), 9)
    assert (ints == -1).sum() == 16 and (ints == 9).sum() == 16
    assert row_sizes(3) == [1, 2, 3] and all(row_sizes(most)[-1] == most for most in range(1, 600))
    assert token_sizes(2048)[-1] == 2048 and token_sizes(40) == [40]
    for sizes in (row_sizes(512), token_sizes(5000)):
        assert all(b <= 2 * a for a, b in pairwise(sizes))
