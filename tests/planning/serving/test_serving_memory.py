"""Weights, working memory and the KV cache of known models."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadInput
from armillary.planning.serving.forward_ops import ServingDtypes, Split
from armillary.planning.serving.replica import Replica
from armillary.planning.serving.serving_memory import (
    concurrency,
    kv_capacity_tokens,
    refuse_too_big,
    sequence_bytes,
    serving_memory,
    weight_bytes,
)
from armillary.spec import catalogue
from armillary.spec.arithmetic.params import parameters
from armillary.spec.tables.serve import Serve


def replica(model: str, on: str = "h100x8", split: Split | None = None, dtypes: ServingDtypes | None = None) -> Replica:
    return Replica(
        config=catalogue.model(model).config,
        cluster=catalogue.cluster(on),
        split=split or Split(),
        dtypes=dtypes or ServingDtypes(),
    )


@pytest.mark.parametrize(
    ("model", "kilobytes"),
    [
        ("llama-2-7b", 524.288),  # 2 · 32 layers · 32 heads · 128 · 2 bytes
        ("llama-2-70b", 327.680),  # 2 · 80 · 8 · 128 · 2
        ("llama-3.1-8b", 131.072),  # 2 · 32 · 8 · 128 · 2
        ("llama-3.1-405b", 516.096),  # 2 · 126 · 8 · 128 · 2
        ("deepseek-v3", 70.272),  # 61 · (512 + 64) · 2
        ("gpt-j-6b", 458.752),  # 2 · 28 · 4096 · 2
    ],
)
def test_a_token_of_kv_cache(model: str, kilobytes: float) -> None:
    assert sequence_bytes(replica(model), 1, block_tokens=1) == pytest.approx(kilobytes * 1e3)


def test_tp_shares_the_cache_out_until_heads_run_out() -> None:
    one, eight, sixteen = (sequence_bytes(replica("llama-3.1-8b", "h100x16", Split(tp=tp)), 1600) for tp in (1, 8, 16))
    assert eight == one / 8 and sixteen == eight, "KV heads are repeated beyond eight ranks"
    latent = [sequence_bytes(replica("deepseek-v3", "h100x16", Split(tp=tp)), 1600) for tp in (1, 8)]
    assert latent[0] == latent[1], "every rank keeps the latent"


def test_sequences_take_whole_blocks() -> None:
    one = replica("llama-3.1-8b")
    assert sequence_bytes(one, 17, 16) == sequence_bytes(one, 32, 16)


def test_windows_cap_the_cache() -> None:
    gemma = replica("gemma-3-27b")
    assert sequence_bytes(gemma, 65_536) < 0.4 * 64 * sequence_bytes(gemma, 1024)


def test_weights_in_their_formats() -> None:
    counts = parameters(catalogue.model("llama-3.1-70b").config)
    ends, layers = counts.embedding + counts.head, counts.total - counts.embedding - counts.head
    eight = ServingDtypes(weights="fp8", compute="fp8", kv="fp8")
    assert weight_bytes(replica("llama-3.1-70b")) == 2 * counts.total
    assert weight_bytes(replica("llama-3.1-70b", dtypes=eight)) == layers + 2 * ends
    assert weight_bytes(replica("llama-3.1-70b", split=Split(tp=4))) == pytest.approx(2 * counts.total / 4)
    assert weight_bytes(replica("llama-3.1-70b", dtypes=ServingDtypes(weights="int4"))) == layers * 0.625 + 2 * ends


def test_experts_are_shared_out_over_ep_while_the_rest_is_repeated() -> None:
    counts = parameters(catalogue.model("deepseek-v3").config)
    spread = weight_bytes(replica("deepseek-v3", split=Split(ep=8)))
    assert spread == pytest.approx(2 * (counts.total - counts.experts * 7 / 8))


def test_llama_8b_on_an_h100() -> None:
    """80 GB · 0.9 − 16 GB − about 2 GB leaves 54 GB: some 400,000 tokens of 131 kB."""
    one = replica("llama-3.1-8b", "h100")
    memory = serving_memory(one)
    assert 50e9 < memory.kv_bytes < 56e9
    assert 380_000 < kv_capacity_tokens(one, memory) < 430_000
    assert concurrency(one, memory, 4096) == int(memory.kv_bytes // (4096 * 131_072))


def test_a_cache_size_that_was_asked_for() -> None:
    memory = serving_memory(replica("llama-3.1-8b", "h100"), Serve(kv_bytes=10_000_000_000))
    assert memory.kv_bytes == 10e9


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["llama-3.1-8b", "mixtral-8x7b", "gemma-2-9b"]), st.floats(1, 4), st.integers(1, 8192))
def test_more_memory_never_lowers_concurrency(model: str, factor: float, tokens: int) -> None:
    small = replica(model)
    chip = small.cluster.chip
    large = replace(small, cluster=replace(small.cluster, chip=replace(chip, memory_bytes=80e9 * factor)))
    held = [concurrency(one, serving_memory(one), tokens) for one in (small, large)]
    assert held[1] >= held[0]


def test_a_model_that_does_not_fit_names_the_change_that_would() -> None:
    big = replica("llama-3.1-405b", split=Split(tp=8))
    message = r"405b with tp=8 needs 115 GB per device and H100 SXM has 80.0 GB; try --set layout.tp=16 or .*fp8"
    with pytest.raises(BadInput, match=message):
        refuse_too_big(big, serving_memory(big))
    for split, dtypes in (
        (Split(tp=16), ServingDtypes()),
        (Split(tp=8), ServingDtypes(weights="fp8", compute="fp8", kv="fp8")),
    ):
        assert serving_memory(replica("llama-3.1-405b", "h100x16", split, dtypes)).fits, "the advice holds"
