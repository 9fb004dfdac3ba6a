"""Compiled blocks give what plain ones give, and layers of one kind share a graph."""

from __future__ import annotations

import pytest
import torch

from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind
from armillary.training.parity.case import Case, Outcome, steps, tiny
from tests.parallel.test_strategies import check
from tests.ranks import Ranks


def compiled(case: Case) -> tuple[Outcome, int]:
    """(what came of it, graphs that were compiled)."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    outcome = steps(case)
    assert not counters["graph_break"], counters["graph_break"]
    return outcome, counters["stats"]["unique_graphs"]


LAYOUTS = [
    Layout(tp=2, precision="fp32"),
    Layout(tp=2, sequence_parallel=False, recompute="full", precision="fp32"),
    Layout(dp=2, zero=3, recompute="selective", precision="fp32"),
    Layout(dp=2, precision="fp32"),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=["tp + sp", "tp, recomputed", "fsdp, selective", "ddp"])
def test_ten_layers_are_one_graph(ranks: Ranks, layout: Layout) -> None:
    config = tiny(layers=(LayerKind(),) * 10)
    case = Case(layout=layout, config=config, dtype="fp64", steps=2, compile=True)
    outcome, graphs = ranks.run(2, compiled, case, timeout_s=300)[0]
    check([outcome], [case])
    assert graphs == 1
