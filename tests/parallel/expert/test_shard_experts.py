"""Experts over ranks: every layout trains as one process does, with the same routing, drops and biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from armillary.kernels.gemm.grouped import grouped_linear
from armillary.model.moe.experts import MixtureOfExperts
from armillary.parallel.collectives import Group
from armillary.parallel.expert import all_to_all as dispatch
from armillary.parallel.expert.all_to_all import AllToAllPlan
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, MoE
from armillary.training.parity.case import Case, Outcome, many, tiny
from armillary.training.parity.matrix import alone
from tests.parallel.test_strategies import check
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
    case(layout(cp=2, ep=2, recompute="selective"), "biases", dtype="fp64", capacity=0.6, documents=True),
]
FOUR = [
    case(layout(dp=4, ep=2, zero=3), "biases", dtype="fp64"),
    case(layout(dp=2, tp=2, ep=2, zero=3), "shared"),
    case(layout(dp=2, pp=2, ep=2), "shared", dtype="fp64", accumulate=4),
    case(layout(dp=2, cp=2, ep=2), "shared", dtype="fp64", capacity=0.7),
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


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_layout_gives_what_one_process_gives(ranks: Ranks, world: int) -> None:
    """Experts over ep, alone and with all else; over dp and cut by tp without it."""
    held(ranks, world, TWO if world == 2 else FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
def test_more_layouts(ranks: Ranks, world: int) -> None:
    held(ranks, world, MORE if world == 4 else EIGHT)


class Noted(torch.autograd.Function):
    """Passes on what it gets, and notes when, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, notes: list[str], word: str) -> torch.Tensor:
        ctx.notes, ctx.word = notes, word
        notes.append(word)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.notes.append(f"{ctx.word}, backward")
        return grads[0], None, None


def what_runs_meanwhile() -> list[str]:
    """Exchanges and the shared expert of a layer, in the order in which this rank begins them."""
    assert dist.group.WORLD is not None
    notes: list[str] = []
    moved, waited = AllToAllPlan.move, dispatch.timed

    def move(self: AllToAllPlan, rows: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        notes.append("rows set out")
        return moved(self, rows, back=back)

    def wait(group: Group, work: Any) -> Any:
        notes.append("waits")
        return waited(group, work)

    AllToAllPlan.move, dispatch.timed = move, wait  # type: ignore[method-assign]
    try:
        mixture = MixtureOfExperts(tiny(moe=KINDS["shared"], layers=(LayerKind(mlp="moe"),)))
        for parameter in mixture.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
        group = Group(name=dist.group.WORLD.group_name, size=2, rank=dist.get_rank())
        mixture.experts.up_E2FH.data, mixture.experts.down_EHF.data = (
            weight.chunk(2)[group.rank].contiguous() for weight in (mixture.experts.up_E2FH, mixture.experts.down_EHF)
        )
        mixture.dispatch = dispatch.AllToAllDispatch(group, grouped_linear)
        whole = mixture.shared_part
        mixture.shared_part = lambda x: Noted.apply(whole(x), notes, "shared expert")  # type: ignore[method-assign]
        mixture(torch.randn(2, 6, mixture.router.weight.shape[1], requires_grad=True)).sum().backward()
    finally:
        AllToAllPlan.move, dispatch.timed = moved, waited  # type: ignore[method-assign]
    return notes


def test_the_shared_expert_runs_while_rows_travel(ranks: Ranks) -> None:
    forward = ["waits", "rows set out", "shared expert", "waits", "rows set out", "waits"]
    backward = ["rows set out", "waits", "rows set out", "shared expert, backward", "waits"]
    assert ranks.run(2, what_runs_meanwhile) == [forward + backward] * 2
