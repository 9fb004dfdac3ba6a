"""FLOPs a token by the stated convention, against published counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from armillary.spec.arithmetic.mfu import attention_flops_per_token, hardware_flops_per_token, model_flops_per_token
from armillary.spec.arithmetic.params import parameters
from armillary.spec.model import MLA, LayerKind, ModelConfig, MoE


def model(**changes: Any) -> ModelConfig:
    """Llama-3-8B."""
    base: dict[str, Any] = {
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn": 14_336,
        "vocab": 128_256,
        "context": 8192,
        "layers": (LayerKind(),) * 32,
    }
    return ModelConfig(**(base | changes))


def test_six_a_weight_and_half_the_causal_attention() -> None:
    config = model()
    weights = parameters(config).multiplied
    assert weights == 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    assert model_flops_per_token(config, 8192) == 6 * weights + 6 * 32 * 8192 * 32 * 128
    assert model_flops_per_token(config, 8192) == pytest.approx(51.5e9, rel=0.002)  # Megatron-Bridge's count


def test_the_output_projection_counts_tied_or_not() -> None:
    assert model_flops_per_token(model(tied=True), 2048) == model_flops_per_token(model(), 2048)


def test_frozen_weights_count_four_and_adapters_six() -> None:
    weights = parameters(model()).multiplied
    full = model_flops_per_token(model(), 2048)
    assert full - model_flops_per_token(model(), 2048, frozen=weights) == 2 * weights
    assert model_flops_per_token(model(), 2048, adapters=1000) - full == 6000


def test_a_sliding_window_bounds_attention() -> None:
    kinds = (LayerKind(attention="sliding"),) * 32
    short, wide = (model(layers=kinds, window=w) for w in (1024, 8192))
    assert attention_flops_per_token(wide, 8192) == attention_flops_per_token(model(), 8192)
    per_layer = 2 * 32 * (128 + 128) * (1024 - 1024**2 / 2 / 8192)
    assert attention_flops_per_token(short, 8192) == 32 * per_layer


def test_latent_attention_uses_its_own_dims() -> None:
    latent = MLA(q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert attention_flops_per_token(model(mla=latent), 1000) == 32 * 2 * 32 * (192 + 128) * 500


def test_only_visited_experts_count() -> None:
    kinds = (LayerKind(mlp="moe"),) * 32
    few, many = (model(layers=kinds, moe=MoE(num_experts=experts, top_k=2, ffn=14_336)) for experts in (8, 64))
    more = model_flops_per_token(many, 2048) - model_flops_per_token(few, 2048)
    assert more == 6 * 32 * (64 - 8) * 4096  # the wider router alone


def test_hardware_flops_add_what_is_done_again() -> None:
    config = model()
    needed, attend = model_flops_per_token(config, 8192), attention_flops_per_token(config, 8192)
    assert hardware_flops_per_token(config, 8192, flash=False) == needed
    assert hardware_flops_per_token(config, 8192) == needed + attend / 2
    assert hardware_flops_per_token(config, 8192, recompute="selective") == needed + attend / 2
    layers = parameters(config).multiplied - config.vocab * config.hidden
    full = hardware_flops_per_token(config, 8192, recompute="full", flash=False)
    assert full == needed + 2 * layers + attend
    half = hardware_flops_per_token(config, 8192, recompute="full", recompute_every=2, flash=False)
    assert half - needed == (full - needed) / 2


def test_full_recompute_is_four_thirds_without_a_head() -> None:
    config = replace(model(), vocab=1)
    ratio = hardware_flops_per_token(config, 2048, recompute="full", flash=False) / model_flops_per_token(config, 2048)
    assert ratio == pytest.approx(4 / 3, rel=1e-5)
