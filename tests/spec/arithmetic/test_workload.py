"""The list of a model's operations adds up to what its parameters say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from armillary.spec import catalogue
from armillary.spec.arithmetic.ops import Op, total
from armillary.spec.arithmetic.params import kv_bytes, parameters
from armillary.spec.arithmetic.sublayers import Batch, experts_used
from armillary.spec.arithmetic.workload import even_lengths, forward_ops, make_batch, model_operations
from armillary.spec.model import MLA, LayerKind, ModelConfig, MoE, Simplicial


def backward_ops(config: ModelConfig, batch: Batch) -> list[Op]:
    return [op for operation in reversed(model_operations(config, batch, loss=True)) for op in operation.backward]


def model(kinds: list[LayerKind] | None = None, **changes: Any) -> ModelConfig:
    base: dict[str, Any] = {
        "hidden": 64,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 96,
        "vocab": 1000,
        "context": 4096,
        "layers": tuple(kinds or [LayerKind()] * 3),
    }
    return ModelConfig(**(base | changes))


EXPERTS = MoE(num_experts=8, top_k=2, ffn=32, shared_ffn=48, shared_gate=True)
LATENT = MLA(q_rank=24, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=12)
MODELS = {
    "llama": model(),
    "gpt2": model(
        positions="learned", learned_positions=64, norm="layer", gated=False, activation="gelu_tanh", tied=True
    ),
    "gemma": model([LayerKind(attention="sliding"), LayerKind()], window=128, norm_at="both"),
    "olmo": model(norm_at="after", qk_norm="all"),
    "falcon": model(parallel="one_norm"),
    "moe": model([LayerKind(), LayerKind(mlp="moe"), LayerKind(mlp="moe", rope=False)], moe=EXPERTS),
    "mla": model(mla=LATENT),
    "mla full-rank query": model(mla=replace(LATENT, q_rank=None)),
    "simplicial": model(
        [LayerKind(), LayerKind(attention="2-simplicial")], simplicial=Simplicial(window_1=4, window_2=16)
    ),
}


def matmuls(ops: list[Op]) -> float:
    return sum(op.flops for op in ops if op.kind == "matmul")


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_products_cost_two_flops_a_multiplied_weight_and_four_backward(config: ModelConfig) -> None:
    batch = make_batch(even_lengths(600, 256))
    weights = parameters(config).multiplied
    assert matmuls(forward_ops(config, batch)) == 2 * 600 * weights
    assert matmuls(backward_ops(config, batch)) == 4 * 600 * weights


@pytest.mark.parametrize("name", catalogue.models())
def test_the_whole_catalogue_adds_up(name: str) -> None:
    config, batch = catalogue.model(name).config, make_batch([64])
    assert matmuls(forward_ops(config, batch)) == 2 * 64 * parameters(config).multiplied
    assert matmuls(backward_ops(config, batch)) == 4 * 64 * parameters(config).multiplied


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_every_operation_is_named_once_and_counts_something(config: ModelConfig) -> None:
    batch = make_batch([100])
    ops = forward_ops(config, batch, loss=True) + backward_ops(config, batch)
    names = [op.name for op in ops]
    assert len(set(names)) == len(names)
    assert all(op.bytes_read > 0 and op.bytes_written > 0 for op in ops)


def test_lengths_are_cut_with_the_rest_last() -> None:
    assert even_lengths(600, 256) == [256, 256, 88] and even_lengths(512, 256) == [256, 256]


def test_packed_lengths_attend_only_to_themselves() -> None:
    def attend(lengths: list[int]) -> float:
        return sum(op.flops for op in forward_ops(model(), make_batch(lengths)) if op.kind == "attention")

    assert attend([100, 300]) == attend([100]) + attend([300]) < attend([400])


def test_the_window_bounds_attention() -> None:
    config = MODELS["gemma"]
    ops = {op.name: op for op in forward_ops(config, make_batch([4096]))}
    assert ops["layers.0.attention"].flops < ops["layers.1.attention"].flops / 10


def test_a_prefill_in_chunks_is_the_prefill() -> None:
    whole = total(forward_ops(model(), make_batch([300])))[0]
    chunks = [total(forward_ops(model(), make_batch([100], cached=[past])))[0] for past in (0, 100, 200)]
    assert sum(chunks) == whole


def test_decode_reads_weights_and_cache() -> None:
    config, batch = model(), make_batch([1] * 4, cached=[999] * 4)
    read = sum(op.bytes_read for op in forward_ops(config, batch))
    weights, cache = 2 * parameters(config).multiplied, 4 * kv_bytes(config, 1000)
    assert weights + cache < read < 1.05 * (weights + cache)
    half = replace(batch, weight_dtype="int8", kv_dtype="fp8")
    assert sum(op.bytes_read for op in forward_ops(config, half)) < 0.55 * read


def test_only_some_rows_reach_the_head() -> None:
    head = {op.name: op for op in forward_ops(model(), make_batch([100, 100], logits=2))}["head"]
    assert head.flops == 2 * 2 * 1000 * 64


def test_latent_decode_attends_to_the_latent() -> None:
    config = MODELS["mla"]
    ops = {op.name: op for op in forward_ops(config, make_batch([1], cached=[999]))}
    assert "layers.0.kv_up" not in ops
    assert ops["layers.0.attention"].flops == 2 * 8 * (32 + 8 + 32) * 1000
    cached = kv_bytes(config, 1000) / config.num_layers
    assert ops["layers.0.attention"].bytes_read == 8 * 40 * 2 + cached


def test_a_single_token_visits_top_k_experts() -> None:
    assert experts_used(EXPERTS, 1) == 2
    assert experts_used(EXPERTS, 1000) == 8
    ops = {op.name: op for op in forward_ops(MODELS["moe"], make_batch([1], cached=[10]))}
    assert ops["layers.1.moe.gate_up"].bytes_read == 2 * (2 * 64 + 2 * 64 * 64)


def test_flash_only_changes_attention() -> None:
    batch = make_batch([256])
    flash, plain = forward_ops(model(), batch), forward_ops(model(), replace(batch, flash=False))
    changed = {a.kind for a, b in zip(flash, plain, strict=True) if a != b}
    assert changed == {"attention"}
