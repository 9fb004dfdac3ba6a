"""Experts over ranks: every layout trains as one process does, with the same routing, drops and biases."""

from __future__ import annotations

from typing import Any

import pytest

from armillary.parallel.mesh import expert_axis_sizes
from armillary.parallel.placement import axis_words
from armillary.spec.catalogue import cluster
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, MoE
from tests.parallel.test_strategies import alone, check
from tests.parallel.training import Case, Outcome, many, tiny
from tests.ranks import Ranks

GAUGES = ("aux_loss", "expert_load_max_over_mean", "expert_tail_fraction", "expert_drop_fraction", "router_entropy")
SHARED: dict[str, Any] = dict(num_experts=8, top_k=2, ffn=8, shared_ffn=16, score="sigmoid", selection_bias=True)
KINDS: dict[str, MoE] = {
    "plain": MoE(num_experts=8, top_k=2, ffn=8),
    "shared": MoE(**SHARED),
    "gated": MoE(**SHARED | dict(shared_gate=True, groups=2, top_groups=1, scale_input=True)),
    "biases": MoE(num_experts=8, top_k=3, ffn=8, score="softmax_topk", router_bias=True, expert_bias=True),
}


def case(layout: Layout, kind: str = "plain", **changes: Any) -> Case:
    layers = (LayerKind(), LayerKind(mlp="moe"))
    return Case(layout=layout, config=tiny(moe=KINDS[kind], layers=layers), **({"steps": 2} | changes))


def layout(**changes: Any) -> Layout:
    return Layout(**({"precision": "fp32"} | changes))


def held(ranks: Ranks, world: int, cases: list[Case]) -> None:
    """Losses, norms, weights, and every gauge of the routers."""
    found: list[Outcome] = ranks.run(world, many, cases)[0]
    check(found, cases)
    for outcome, each in zip(found, cases, strict=True):
        for mine, wanted in zip(outcome.gauges, alone(each.alone()).gauges, strict=True):
            assert mine == pytest.approx(wanted, rel=1e-5 if each.dtype == "fp32" else 1e-10), each.layout


TWO = [
    case(layout(dp=2, ep=2), "biases", dtype="fp64", capacity=0.7, accumulate=2),
    case(layout(dp=2, ep=2, zero=3, recompute="selective"), "gated", dtype="fp64", meta=True),
    case(layout(dp=2, zero=1), "shared", dtype="fp64", capacity=1.0),
    case(layout(tp=2), "gated", dtype="fp64"),
    case(layout(tp=2, sequence_parallel=False), "biases", dtype="fp64"),
    case(layout(dp=2, ep=2, recompute="full"), "plain", capacity=0.6),
]
FOUR = [
    case(layout(dp=4, ep=2, zero=3), "biases", dtype="fp64"),
    case(layout(dp=2, tp=2, ep=2, zero=3), "shared"),
    case(layout(dp=2, pp=2, ep=2), "shared", dtype="fp64", accumulate=4),
    case(layout(dp=2, cp=2, ep=2), "shared", dtype="fp64"),
]
MORE = [
    case(layout(dp=4, ep=2), "shared", dtype="fp64", accumulate=2),
    case(layout(dp=4, ep=4, zero=2), "shared", dtype="fp64", accumulate=2),
    case(layout(dp=4, ep=2, zero=3, shard=2), "gated", dtype="fp64", meta=True),
    case(layout(dp=2, tp=2, ep=2), "biases", dtype="fp64"),
    case(layout(dp=2, pp=2, ep=2, zero=2), "biases", dtype="fp64", accumulate=4),
    case(layout(dp=1, cp=2, tp=2, ep=2), "gated", dtype="fp64"),
]
EIGHT = [
    case(layout(dp=8, ep=4, zero=3, recompute="full"), "shared", capacity=0.8),
    case(layout(dp=4, tp=2, ep=4, zero=3, shard=2), "biases", dtype="fp64"),
    case(layout(dp=2, tp=2, pp=2, ep=2, zero=1), "shared", dtype="fp64", accumulate=4),
    case(layout(dp=2, cp=2, tp=2, ep=4, zero=3), "gated", dtype="fp64"),
]


@pytest.mark.parametrize("world", [2, 4])
def test_a_layout_gives_what_one_process_gives(ranks: Ranks, world: int) -> None:
    """Experts over ep, alone and with all else; over dp and cut by tp without it."""
    held(ranks, world, TWO if world == 2 else FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
def test_more_layouts(ranks: Ranks, world: int) -> None:
    held(ranks, world, MORE if world == 4 else EIGHT)


def test_experts_are_shared_out_among_neighbours() -> None:
    """64 GPUs in nodes of 8: tokens for experts stay inside a node, and so do those of tp inside ep."""
    on = cluster("h100x64")
    inside = axis_words(expert_axis_sizes(layout(dp=64, ep=8, zero=3)), on)
    assert inside[0] == "ep=8: neighbouring ranks, over NVLink 4 (8 devices)"
    assert inside[1] == "expert_shard=8: every 8th rank, over InfiniBand NDR (64 devices)"
    both = axis_words(expert_axis_sizes(layout(dp=32, tp=2, ep=4)), on)
    assert both[1] == "ep=4: every 2nd rank, over NVLink 4 (8 devices)"
    assert expert_axis_sizes(layout(dp=8, ep=4, zero=3, shard=2)) == dict(
        pp=1, expert_replicate=2, expert_shard=1, ep=4, tp=1
    )
