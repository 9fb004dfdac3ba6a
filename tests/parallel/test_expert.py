"""Experts over ranks: every layout trains as one process does, with the same routing, drops and biases."""

from __future__ import annotations

from typing import Any

import pytest

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
    return Case(layout=layout, config=tiny(moe=KINDS[kind], layers=layers), **({"steps": 3} | changes))


def layout(**changes: Any) -> Layout:
    return Layout(**({"precision": "fp32"} | changes))


def held(ranks: Ranks, world: int, cases: list[Case]) -> None:
    """Losses, norms, weights, and every gauge of the routers."""
    found: list[Outcome] = ranks.run(world, many, cases)[0]
    check(found, cases)
    for outcome, each in zip(found, cases, strict=True):
        for mine, wanted in zip(outcome.gauges, alone(each.alone()).gauges, strict=True):
            assert mine == pytest.approx(wanted, rel=1e-5 if each.dtype == "fp32" else 1e-10), each.layout


def test_two_ranks(ranks: Ranks) -> None:
    """Experts over ep, alone and with weights shared out; over dp and cut by tp without it."""
    held(ranks, 2, [
        case(layout(dp=2, ep=2), "shared", dtype="fp64", accumulate=2),
        case(layout(dp=2, ep=2), "biases", dtype="fp64", capacity=0.7),
        case(layout(dp=2, ep=2, zero=3, recompute="full"), "gated", dtype="fp64", meta=True),
        case(layout(dp=2, zero=1), "shared", dtype="fp64", capacity=1.0),
        case(layout(tp=2), "gated", dtype="fp64"),
        case(layout(tp=2, sequence_parallel=False), "biases", dtype="fp64"),
        case(layout(dp=2, ep=2, recompute="selective"), "plain", capacity=0.6),
    ])  # fmt: skip


def test_four_ranks(ranks: Ranks) -> None:
    held(ranks, 4, [
        case(layout(dp=4, ep=2), "shared", dtype="fp64", accumulate=2),
        case(layout(dp=4, ep=2, zero=3), "biases", dtype="fp64"),
        case(layout(dp=4, ep=4, zero=2), "shared", dtype="fp64", accumulate=2),
        case(layout(dp=4, ep=2, zero=3, shard=2), "gated", dtype="fp64", meta=True),
        case(layout(dp=2, tp=2, ep=2), "biases", dtype="fp64"),
        case(layout(dp=2, tp=2, ep=2, zero=3), "shared"),
    ])  # fmt: skip


def test_with_stages_and_cut_rows(ranks: Ranks) -> None:
    held(ranks, 4, [
        case(layout(dp=2, pp=2, ep=2), "shared", dtype="fp64", accumulate=4),
        case(layout(dp=2, pp=2, ep=2, zero=2), "biases", dtype="fp64", accumulate=4),
        case(layout(dp=2, cp=2, ep=2), "shared", dtype="fp64"),
        case(layout(dp=1, cp=2, tp=2, ep=2), "gated", dtype="fp64"),
    ])  # fmt: skip
