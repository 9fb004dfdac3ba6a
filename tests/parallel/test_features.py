"""What a model may have, on tensor-parallel ranks: each against one process in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind
from tests.parallel.test_strategies import check
from tests.parallel.training import Case, many, tiny
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
    "norm after": dict(norm_at="after", norm_weight=False, final_norm=False),
    "fewer words than ranks": dict(vocab=3),
}
PACKED = ("grouped-query", "ALiBi", "window")


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["cut tokens", "whole tokens"])
def test_features_on_cut_heads(ranks: Ranks, sequence_parallel: bool) -> None:
    layout = Layout(tp=4, sequence_parallel=sequence_parallel, precision="fp32")
    cases = [
        Case(layout=layout, config=tiny(**given), dtype="fp64", steps=2, chunk=50, documents=name in PACKED)
        for name, given in FEATURES.items()
    ]
    check(ranks.run(4, many, cases)[0], cases)


def test_features_on_shards_of_cut_heads(ranks: Ranks) -> None:
    chosen = ("norm over all heads", "biases", "tied", "fewer words than ranks")
    cases = [
        Case(layout=Layout(dp=2, tp=2, zero=3, precision="fp32"), config=tiny(**FEATURES[name]), dtype="fp64", steps=2)
        for name in chosen
    ]
    check(ranks.run(4, many, cases)[0], cases)
