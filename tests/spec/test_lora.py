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


@pytest.mark.parametrize(
    ("model", "on", "message"),
    [
        ("gpt-3-175b", ("gate",), "has no gate; try --set train.lora_on=up,down"),
        ("deepseek-v3", ("qkv",), "takes no adapters yet; try --set train.lora_on=gate_up,down"),
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
