"""Which projections carry adapters, and how many weights those are."""

from __future__ import annotations

import pytest

from armillary.errors import BadRecipe
from armillary.spec import catalogue
from armillary.spec.lora import adapter_weights, frozen_experts, targets
from armillary.spec.tables.train import TrainJob

LLAMA = catalogue.model("llama-3.1-8b").config
ALL = ("qkv", "out", "gate_up", "down")


def test_every_projection_has_its_own_a_and_b() -> None:
    """rank · (inputs + outputs) of q, k, v, out, gate, up and down, as peft counts them."""
    hidden, kv, ffn, rank = 4096, 1024, 14336, 16
    each = 2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + ffn)
    assert adapter_weights(LLAMA, rank=rank, on=ALL) == 32 * rank * each == 41_943_040


def test_parts_of_a_fused_matrix_may_be_chosen() -> None:
    assert adapter_weights(LLAMA, rank=8, on=("q", "v")) == 32 * 8 * (4096 + 4096 + 4096 + 1024)
    found = targets(LLAMA, ("q", "v", "up"))
    assert list(found)[:2] == ["blocks.0.attention.qkv", "blocks.0.mlp.up"]
    assert found["blocks.0.attention.qkv"].chosen == (True, False, True)
    assert found["blocks.0.attention.qkv"].widths == (4 * 128, 128, 128)
    assert found["blocks.31.mlp.up"].num_a == 1


def test_experts_stay_frozen() -> None:
    mixtral = catalogue.model("mixtral-8x7b").config
    assert {name.rpartition(".")[2] for name in targets(mixtral, ALL)} == {"qkv", "out"}
    assert frozen_experts(mixtral, ALL) == 32 and frozen_experts(mixtral, ("qkv",)) == 0
    with pytest.raises(BadRecipe, match="only experts where down, gate, up would be"):
        targets(mixtral, ("gate_up", "down"))


def test_latent_attention_has_adapters_on_both_sides_of_its_latents() -> None:
    """As peft counts them on q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj and o_proj of DeepSeek-V3."""
    deepseek, hidden, heads = catalogue.model("deepseek-v3").config, 7168, 128
    each = {
        "q_down": hidden + 1536,
        "q": 1536 + heads * 192,
        "kv_down": hidden + 576,
        "kv_up": 512 + heads * 256,
        "out": heads * 128 + hidden,
    }
    assert adapter_weights(deepseek, rank=4, on=("qkv", "out")) == 61 * 4 * sum(each.values())
    assert set(targets(deepseek, ("q",))) == {
        f"blocks.{i}.attention.{name}" for i in range(61) for name in ("q_down", "q")
    }
    down, up = (targets(deepseek, ("qkv",))[f"blocks.0.attention.kv_{name}"] for name in ("down", "up"))
    assert down.unsharded_weights(4) == down.weights(4) and up.unsharded_weights(4) == 4 * 512


@pytest.mark.parametrize(
    ("model", "on", "message"),
    [
        ("gpt-3-175b", ("gate",), "has no gate; try --set train.lora_on=up,down"),
        ("deepseek-v3", ("q", "v"), "projected together, so there is no v; try --set train.lora_on=q,kv_a,kv_b"),
        ("deepseek-v2-lite", ("q_a",), "no latents of queries, so no q_a; try --set train.lora_on=q_b,kv_a,kv_b"),
        ("llama-3.1-8b", ("q", "kv_b"), "has no latents, so no kv_b; try --set train.lora_on=qkv,out"),
    ],
)
def test_what_cannot_be_is_said(model: str, on: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadRecipe, match=message):
        targets(catalogue.model(model).config, on)


def test_a_job_checks_its_adapters() -> None:
    assert TrainJob(lora_rank=16).lora_scale == 2.0
    assert TrainJob(lora_rank=16, lora_alpha=8).lora_scale == 0.5
    assert TrainJob(lora_rank=16).peak_lr(7_000_000_000) == 2e-4
    with pytest.raises(BadRecipe, match=r"no projection 'qvk'.*try --set train.lora_on=qkv"):
        TrainJob(lora_on=("qvk",))
    with pytest.raises(BadRecipe, match="lora_on is empty"):
        TrainJob(lora_on=())
    with pytest.raises(BadRecipe, match=r"lora_dropout=1.0 must be below 1"):
        TrainJob(lora_dropout=1.0)
