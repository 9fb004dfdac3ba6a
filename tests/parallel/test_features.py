"""What a model may have, on tensor-parallel ranks: each against one process in fp64."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind
from armillary.training.parity.case import Case, many, tiny
from tests.parallel.test_strategies import check
from tests.ranks import Ranks

FEATURES: dict[str, dict[str, Any]] = {
    "grouped-query": dict(kv_heads=4, qk_norm="head"),
    "norm over all heads": dict(kv_heads=4, qk_norm="all", norm_plus_one=True),
    "LayerNorm over all heads": dict(qk_norm="all", norm="layer", norm_bias=True),
    "sinks": dict(sinks=True, qkv_clip=0.05),
    "ALiBi": dict(positions="alibi"),
    "biases": dict(qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True),
    "tied": dict(tied=True, norm_at="both", embedding_scale=4.0),
    "parallel, one norm": dict(parallel="one_norm", norm="layer", norm_bias=True),
    "parallel, two norms": dict(parallel="two_norms", residual_scale=0.5),
    "soft caps": dict(attention_softcap=5.0, logit_softcap=3.0, logit_scale=0.5),
    "learned positions": dict(positions="learned", learned_positions=20, gated=False, activation="gelu"),
    "window": dict(window=5, layers=(LayerKind(attention="sliding"), LayerKind())),
    "chunks": dict(
        window=5,
        layers=(LayerKind(attention="chunked"), LayerKind(rope=False)),
        query_temperature=0.5,
        temperature_floor=3,
        qk_norm="head",
        qk_norm_kind="plain",
    ),
    "norm after": dict(norm_at="after", norm_weight=False, final_norm=False),
    "fewer words than ranks": dict(vocab=3),
}
PACKED = ("grouped-query", "ALiBi", "window", "chunks")


def cases(names: Iterable[str], layout: Layout) -> list[Case]:
    return [
        Case(layout=layout, config=tiny(**FEATURES[name]), dtype="fp64", steps=2, chunk=50, documents=name in PACKED)
        for name in names
    ]


def test_features_on_cut_heads_and_tokens(ranks: Ranks) -> None:
    given = cases(FEATURES, Layout(tp=2, precision="fp32"))
    check(ranks.run(2, many, given)[0], given)


@pytest.mark.slow
def test_features_whose_parts_may_be_smaller_than_ranks(ranks: Ranks) -> None:
    given = cases(("grouped-query", "fewer words than ranks"), Layout(tp=4, precision="fp32"))
    check(ranks.run(4, many, given)[0], given)


@pytest.mark.slow
def test_all_features_on_four_ranks(ranks: Ranks) -> None:
    given = cases(FEATURES, Layout(tp=4, precision="fp32"))
    check(ranks.run(4, many, given)[0], given)


def test_features_on_cut_heads_and_whole_tokens(ranks: Ranks) -> None:
    """Those that tokens matter to: what ranks share, and what is added once."""
    chosen = ("norm over all heads", "biases", "tied", "parallel, two norms", "learned positions")
    given = cases(chosen, Layout(tp=2, sequence_parallel=False, precision="fp32"))
    check(ranks.run(2, many, given)[0], given)


@pytest.mark.slow  # by default test_strategies has these layouts, and the others here these features
def test_features_on_shards_of_cut_heads(ranks: Ranks) -> None:
    chosen = ("norm over all heads", "biases", "tied", "fewer words than ranks")
    given = cases(chosen, Layout(dp=2, tp=2, zero=3, precision="fp32"))
    check(ranks.run(4, many, given)[0], given)
