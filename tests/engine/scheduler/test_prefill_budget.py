"""How much of a prompt a step takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from armillary.engine.scheduler.prefill_budget import chunk_cost, chunk_size
from armillary.engine.scheduler.settings import attention_tokens, settings_for
from armillary.spec.catalogue import models
from armillary.spec.tables.serve import Serve


def test_plain_budgets_are_tokens() -> None:
    assert chunk_size(100, 0, 64.0, 16, None) == 64 and chunk_cost(64, 1000, None) == 64
    assert chunk_size(100, 8, 64.0, 16, None) == 56  # ends on a block
    assert chunk_size(10, 8, 64.0, 16, None) == 10
    assert chunk_size(100, 0, 5.0, 16, None) == 5  # less than a block is still progress


def test_parts_are_whole_tiles_of_queries() -> None:
    assert chunk_size(900, 0, 90.0, 16, None, 32) == 64 and chunk_size(900, 16, 90.0, 16, None, 32) == 80
    assert chunk_size(900, 0, 30.0, 16, None, 32) == 16  # less than a tile: up to the end of a block
    assert chunk_size(70, 0, 90.0, 16, None, 32) == 70  # the end of a prompt is what it is
    assert chunk_size(900, 0, 90.0, 16, None, 25) == 80  # tiles that blocks do not fit are passed over
    assert settings_for(models()["qwen3-8b"].config, Serve()).query_tile == 32


@given(
    st.integers(1, 200_000),
    st.integers(0, 1_000_000),
    st.floats(1, 1e5),
    st.sampled_from([1, 16, 256]),
    st.floats(100, 1e6),
)
def test_a_chunk_is_what_the_budget_pays_for(left: int, past: int, budget: float, block: int, context: float) -> None:
    size = chunk_size(left, past, budget, block, context)
    assert 1 <= size <= left
    assert size == 1 or chunk_cost(size, past, context) <= budget * (1 + 1e-9)
    if size < left and size > block:
        assert (past + size) % block == 0 and chunk_cost(size + block + 1, past, context) > budget


def test_attention_counts_from_the_model_s_shape() -> None:
    config = models()["llama-3.1-8b"].config
    # 2 · 6.98e9 FLOPs a token against 4 · 32 · 128 · 32 a key
    assert 12_500 < attention_tokens(config) < 14_000
    serve = Serve(max_tokens_per_step=512, max_running=64, batching="static", prefill_tokens=100, check_every=3)
    settings = settings_for(config, serve, frozenset({5}))
    assert (settings.max_model_len, settings.vocab, settings.batching) == (config.context, config.vocab, "static")
    assert (settings.prefill_tokens, settings.check_every, settings.eos_ids) == (100, 3, frozenset({5}))
