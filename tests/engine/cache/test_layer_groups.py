"""Layers by what they see, and how many bytes, tokens and sequences that makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.engine.build import refuse_drafts
from armillary.engine.cache.kv_capacity import plan_kv
from armillary.engine.cache.layer_groups import Group, group_size, layer_groups
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.settings import settings_for
from armillary.errors import BadInput, BadModel
from armillary.spec.arithmetic.params import kv_bytes
from armillary.spec.catalogue import models
from armillary.spec.model import LayerKind, ModelConfig
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask

LLAMA = ModelConfig(
    hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=128, vocab=100, context=512, layers=(LayerKind(),) * 12
)
SLIDING, FULL = LayerKind(attention="sliding"), LayerKind()
GEMMA = replace(LLAMA, window=32, layers=((SLIDING,) * 5 + (FULL,)) * 2)


def test_layers_that_see_everything_are_one_group() -> None:
    assert layer_groups(LLAMA) == (Group(layers=tuple(range(12))),)


def test_windows_have_tables_of_their_own_and_as_many_layers() -> None:
    groups = layer_groups(GEMMA)
    assert [(group.sees, len(group.layers)) for group in groups] == [("all", 2)] + [("window", 2)] * 5
    assert sorted(layer for group in groups for layer in group.layers) == list(range(12))
    assert all(group.reach == 32 for group in groups[1:])


def test_a_group_s_size_pads_little_and_makes_few_tables() -> None:
    assert group_size([21, 21]) == 21 and group_size([52, 10]) == 13 and group_size([1]) == 1


@given(st.lists(st.integers(1, 90), min_size=1, max_size=3))
def test_group_sizes_never_pad_more_than_one_group_a_kind(counts: list[int]) -> None:
    size = group_size(counts)
    groups = sum(-(-count // size) for count in counts)
    assert groups <= 8 and groups * size <= len(counts) * max(counts)


@pytest.mark.parametrize(
    ("group", "needed"),
    [
        (Group(), [0, 0, 0, 0]),
        (Group(sees="window", reach=4), [0, 0, 2, 6]),
        (Group(sees="chunk", reach=4), [0, 0, 4, 8]),
    ],
)
def test_what_the_next_query_needs(group: Group, needed: list[int]) -> None:
    assert [group.first_needed(position) for position in (0, 3, 5, 9)] == needed


@given(
    reach=st.integers(1, 40),
    block=st.sampled_from([1, 4, 16]),
    step=st.integers(1, 64),
    start=st.integers(0, 300),
    sees=st.sampled_from(["window", "chunk"]),
)
def test_blocks_at_bounds_what_a_step_holds(reach: int, block: int, step: int, start: int, sees: str) -> None:
    group = Group(sees=sees, reach=reach)  # type: ignore[arg-type]
    first = group.first_needed(start) // block
    held = -(-(start + step) // block) - first
    assert held <= group.blocks_at(start + step, block, step)


def test_capacity_of_a_plain_model() -> None:
    plan = plan_kv(LLAMA, Serve(block_tokens=16), 1_000_000, dtype="bf16")
    assert plan.block_bytes == 16 * kv_bytes(LLAMA, 1, 2) == 24_576
    assert plan.num_blocks == 40 and plan.tokens == 39 * 16 and plan.sequences_of(100) == 5
    text = plan.text((100,))
    assert text.startswith("KV cache 1.00 MB = 39 blocks of 16 tokens (24.6 kB each) = 624 tokens = 5 sequences of 100")
    assert "12 layers × 16 tokens × 64 values per token and layer in bf16" in text


def test_capacity_counts_windows_cuts_and_formats() -> None:
    serve = Serve(block_tokens=16, max_tokens_per_step=64, max_running=8)
    mixed = plan_kv(GEMMA, serve, "4MB")
    # 2 full layers keep everything; 10 with a window of 32 keep 32 - 1 + 64 tokens: 7 blocks of 16
    assert mixed.blocks_of(1600) == 100 + 5 * 7 and mixed.sequences_of(1600) == (mixed.num_blocks - 1) // 135
    assert "table 1: 2 layers that see the last 32" in mixed.text() and "padding" not in mixed.text()
    cut = plan_kv(GEMMA, serve, "4MB", tp=4)
    assert cut.block_bytes * 4 == mixed.block_bytes
    assert plan_kv(GEMMA, serve, "4MB", tp=8).block_bytes == cut.block_bytes  # KV heads are repeated
    assert plan_kv(GEMMA, replace(serve, kv_dtype="fp8"), "4MB").block_bytes * 2 == mixed.block_bytes


@pytest.mark.parametrize("name", sorted(models()))
def test_real_models_fit_as_many_bytes_as_their_tokens_take(name: str) -> None:
    config = models()[name].config
    plan = plan_kv(config, Serve(), "400GB")
    a_token = kv_bytes(config, 1, 2) / (1 - plan.padding_fraction)
    assert plan.tokens * a_token == pytest.approx(400e9, rel=0.02) and plan.padding_fraction < 0.12


@pytest.mark.parametrize("config", [LLAMA, GEMMA])
def test_as_many_sequences_run_together_as_was_said(config: ModelConfig) -> None:
    serve = Serve(block_tokens=4, max_tokens_per_step=64, max_running=64)
    plan = plan_kv(config, serve, "1MB")
    count = plan.sequences_of(60)
    settings = replace(settings_for(config, serve), reserve=1.0, check_every=10)
    scheduler = Scheduler(settings, plan.make(prefix=False))
    for i in range(count + 1):
        scheduler.submit(ask(f"r{i}", [i] * 30, 30), 0.0)
    together = 0
    while scheduler.has_work:
        decision = scheduler.schedule(0.0)
        together = max(together, len(scheduler.request_table.running))
        scheduler.update(decision, [5] * len(decision.sampling), 0.0)
    assert 3 < count < 60 and together == count and not scheduler.totals.preempted


def test_layers_with_recurrent_states_have_no_blocks() -> None:
    config = models()["qwen3-next-80b-a3b"].config
    plan = plan_kv(config, Serve(), "10GB")
    assert [group.layers for group in plan.groups] == [tuple(range(3, 48, 4))] and plan.padding_fraction == 0
    assert plan.block_bytes == 12 * 16 * 2 * 2 * 256 * 2
    assert "77.3 MB of recurrent states per sequence, of 36 layers; without a prefix cache" in plan.text()
    assert not plan.make(prefix=True).prefix
    with pytest.raises(BadModel, match="no layer with attention"):
        layer_groups(replace(config, layers=config.layers[:3]))
    with pytest.raises(BadInput, match=r"cannot be rolled back.*leave serve.speculate=none"):
        refuse_drafts(config, Serve(speculate="ngram"))


def test_too_few_bytes_are_refused_with_the_least() -> None:
    with pytest.raises(BadInput, match=r"give at least serve.kv_bytes=49152"):
        plan_kv(LLAMA, Serve(), 49_151)
    cache = plan_kv(LLAMA, Serve(), 49_152).make()
    assert cache.num_blocks == 1
