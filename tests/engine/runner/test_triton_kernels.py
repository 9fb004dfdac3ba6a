"""Our Triton kernels inside the engine, interpreted on a CPU: the answers of the slow twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tests.kernels.interpreter  # noqa: F401
from armillary.engine.request.request import Request
from armillary.engine.runner.engine_kernels import EngineKernels
from armillary.engine.runner.executor import FastExecutor
from armillary.kernels.gemm.skinny_triton import small_linear
from armillary.kernels.latent.latent_decode_triton import latent_decode
from armillary.kernels.latent.latent_forms import most_absorbed
from armillary.kernels.latent.latent_prefill_triton import latent_prefill
from armillary.kernels.latent.latent_to_cache_triton import latent_to_cache
from armillary.kernels.moe.grouped_moe_triton import grouped_moe
from armillary.kernels.moe.small_moe_triton import small_moe
from armillary.kernels.norm import norm_triton
from armillary.kernels.paged import qkv_to_cache_triton as qkv_cache_triton
from armillary.kernels.paged.decode_inputs_triton import look_up, put
from armillary.kernels.paged.fused_decode_triton import attend_tokens
from armillary.kernels.paged.paged_attention_triton import paged_attention
from armillary.kernels.pointwise import activation_triton as gated_triton
from armillary.kernels.sampling import logprobs_triton, sampling_triton
from armillary.model.transformer import build
from armillary.spec.model import ModelConfig
from tests.engine.fake import ask
from tests.engine.runner.test_reference_executor import serve
from tests.model.layers.test_attention_forms import latent, small

pytestmark = pytest.mark.slow
TRITON = EngineKernels(
    norm=norm_triton.norm,
    add_norm=norm_triton.add_norm,
    activate=gated_triton.activate,
    qkv_cache=qkv_cache_triton.qkv_cache,
    attention=paged_attention,
    sample=sampling_triton.sample,
    logprobs=logprobs_triton.logprobs,
)


FUSED = replace(TRITON, small=small_linear, tokens=attend_tokens, look_up=look_up, put=put)
EXPERTS = replace(FUSED, moe=small_moe, grouped_moe=grouped_moe)
LATENTS = replace(
    EXPERTS, tokens=None, latent_cache=latent_to_cache, latent_decode=latent_decode, latent_prefill=latent_prefill
)
DENSE = small(head_dim=32, hidden=32, ffn=64, qk_norm="head")
GPT_OSS = small(
    head_dim=32,
    attention_pattern=["sliding", "full"],
    window=4,
    sinks=True,
    qkv_bias=True,
    out_bias=True,
    activation="swiglu_clamped",
    moe={"num_experts": 4, "top_k": 2, "ffn": 16, "score": "softmax_topk", "router_bias": True, "expert_bias": True},
)


LLAMA_4 = small(
    head_dim=32,
    attention_pattern=["chunked", "full"],
    window=4,
    nope_every=2,
    moe_every=2,
    query_temperature=0.5,
    temperature_floor=3,
    qk_norm="head",
    qk_norm_kind="plain",
    rope={"interleaved": True},
    moe={"num_experts": 4, "top_k": 1, "ffn": 16, "shared_ffn": 16, "score": "sigmoid", "scale_input": True},
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("kernels", "config"),
    [
        (TRITON, DENSE),
        (replace(TRITON, small=small_linear), DENSE),
        (FUSED, DENSE),
        (EXPERTS, GPT_OSS),
        (EXPERTS, LLAMA_4),
    ],
    ids=["wide", "small", "tokens", "gpt-oss", "llama 4"],
)
def test_answers_are_those_of_the_slow_twin(kernels: EngineKernels, config: ModelConfig) -> None:
    requests = [
        ask("greedy", [2, 3, 4, 5, 6, 7], 4, temperature=0.0),
        ask("drawn", [3, 4], 4, temperature=1.0, seed=1, top_k=5, top_p=0.9),
        ask("wishes", [5], 3, temperature=1.0, seed=2, frequency_penalty=0.5, logprobs=2),
    ]
    check(kernels, config, requests, max_tokens_per_step=6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("q_rank", [10, None])
def test_answers_over_latents_are_those_of_the_slow_twin(q_rank: int | None) -> None:
    """Prompts in chunks that are expanded, in shorter ones that stay absorbed beside decodes, and decodes."""
    config, long = latent(q_rank=q_rank), [2 + i % 7 for i in range(20)]
    assert most_absorbed(16, 8, 6) == 12  # queries
    requests = [ask("short", [3, 4], 6, temperature=0.0), ask("long", long, 4, temperature=0.0)]
    for tokens in (6, 32):
        check(LATENTS, config, requests, max_tokens_per_step=tokens)


def check(kernels: EngineKernels, config: ModelConfig, requests: list[Request], *, max_tokens_per_step: int) -> None:
    weights = build(config, dtype=torch.float32, device="cpu", seed=3)
    with torch.no_grad():  # biases and sinks begin as zeros
        for name, parameter in weights.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))

    def padded(*args: Any, **named: Any) -> FastExecutor:
        executor = FastExecutor(*args, kernels=kernels, **named)
        executor.encoder.fit = lambda tokens, rows, decodes: (rows + 1, rows + 1) if decodes else (tokens + 3, rows + 2)
        return executor

    found = serve(config, weights, requests, executor=padded, max_tokens_per_step=max_tokens_per_step)
    right = serve(config, weights, requests, max_tokens_per_step=max_tokens_per_step)
    assert [made.tokens for made in found] == [made.tokens for made in right]
