"""Stages: every layer in one chunk, no chunk much longer than it must be, and the least memory among these."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.spec import catalogue
from armillary.spec.layout_rules.pipeline_split import chunks_of, layers_by_stage, places, split
from armillary.spec.model import LayerKind, ModelConfig


def model(num_layers: int, vocab: int = 64, **changes: object) -> ModelConfig:
    sizes = dict(hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=32, context=64, vocab=vocab)
    return ModelConfig(layers=(LayerKind(),) * num_layers, **sizes | changes)  # type: ignore[arg-type]


@given(num_layers=st.integers(1, 9), num_chunks=st.integers(1, 11), vocab=st.integers(8, 4000), tied=st.booleans())
@settings(deadline=None)
def test_no_cut_is_more_than_five_percent_shorter_and_none_so_short_is_lighter(
    num_layers: int, num_chunks: int, vocab: int, tied: bool
) -> None:
    """Against every cut there is."""
    if num_chunks > num_layers + 2:
        return
    config = model(num_layers, vocab, tied=tied)
    found, spans = places(config, 64), split(config, num_chunks, sequence=64)
    assert [layer for span in spans for layer in span.layers] == list(range(num_layers))
    assert [span.first for span in spans] == [i == 0 for i in range(num_chunks)]
    assert [span.last for span in spans] == [i + 1 == num_chunks for i in range(num_chunks)]

    def worst(ends: tuple[int, ...]) -> tuple[float, float]:
        chunks = [found[start:stop] for start, stop in zip((0, *ends), (*ends, len(found)), strict=True)]
        return (
            max(sum(place.flops for place in chunk) for chunk in chunks),
            max(sum(place.weights for place in chunk) for chunk in chunks),
        )

    cuts = [worst(ends) for ends in combinations(range(1, len(found)), num_chunks - 1)]
    longest, heaviest = worst(
        tuple(
            span.first + len(span.layers) + sum(len(one.layers) for one in spans[: span.index]) + (span.index > 0)
            for span in spans[:-1]
        )
    )
    shortest = min(time for time, _ in cuts)
    assert longest <= 1.05 * shortest * (1 + 1e-9)
    assert heaviest <= min(weight for time, weight in cuts if time <= 1.05 * shortest) * (1 + 1e-9)


def test_a_heavy_head_has_fewer_layers_beside_it() -> None:
    first, last = layers_by_stage(model(8, vocab=512), 2, 1, sequence=64)
    assert 0 < last < first < 8
    assert layers_by_stage(catalogue.model("llama-3.1-8b").config, 4, 1, sequence=8192) == (7, 9, 9, 7)


def test_chunks_are_dealt_out_in_turn() -> None:
    spans = split(model(6), 6, sequence=64)
    assert [span.index for span in chunks_of(spans, 1, 2)] == [1, 3, 5]
    assert sum(layers_by_stage(model(6), 2, 3, sequence=64)) == 6


@given(num_layers=st.integers(4, 40), stages=st.integers(2, 4), interleave=st.integers(2, 4), vocab=st.integers(8, 300))
@settings(deadline=None)
def test_the_chunks_of_a_stage_make_up_for_each_other(
    num_layers: int, stages: int, interleave: int, vocab: int
) -> None:
    """Each stage's chunks together are within a layer and the head of every neighbour's, and none is lost."""
    if stages * interleave > num_layers + 2:
        return
    config = model(num_layers, vocab)
    spans = split(config, stages, interleave, sequence=64)
    assert [layer for span in spans for layer in span.layers] == list(range(num_layers))
    layer, head = places(config, 64)[1].flops, places(config, 64)[-1].flops
    times = [
        sum(layer * len(span.layers) + head * span.last for span in chunks_of(spans, i, stages)) for i in range(stages)
    ]
    assert max(times) - min(times) <= 2 * layer + head


def test_interleaved_stages_are_as_even_as_plain_ones() -> None:
    """Eight chunks of four or five layers each, in four stages: 34 layers' worth, and none has ten."""
    config = catalogue.model("llama-3.1-8b").config
    assert layers_by_stage(config, 4, 2, sequence=4096) == (8, 9, 9, 6)


def test_dense_layers_among_experts_weigh_what_they_weigh() -> None:
    """DeepSeek-V3: three dense layers first, experts of more memory behind; a token visits few of them."""
    counts = layers_by_stage(catalogue.model("deepseek-v3").config, 8, 1, sequence=4096)
    assert sum(counts) == 61 and counts[-1] == min(counts) and max(counts) == 8
