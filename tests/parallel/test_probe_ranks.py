"""The pre-flight's measurements on gloo ranks, with a slow rank and a slow link planted."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from armillary.cluster.preflight import judge_probe
from armillary.parallel import probe_ranks
from armillary.parallel.probe_ranks import MOST_PAIRS, rounds
from armillary.parallel.world import World
from armillary.spec.layout import Layout
from armillary.store.cluster_probe import ClusterProbe, read_probe, write_probe
from tests.ranks import Ranks

SLOW_RANK, SLOW_LINK = 2, (1, 3)
WORLD = World(rank=0, size=2, local_rank=0, device=torch.device("cpu"))


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_every_pair_is_measured_once_and_no_rank_twice_in_a_round(count: int) -> None:
    made = rounds(count)
    assert sorted(pair for each in made for pair in each) == sorted(combinations(range(count), 2))
    assert all(len({end for pair in each for end in pair}) == 2 * len(each) for each in made)


def test_a_large_group_has_few_rounds() -> None:
    made = rounds(128)
    assert len(made) <= 3 * 7 and MOST_PAIRS < 128
    assert {end for each in made for pair in each for end in pair} == set(range(128))


@pytest.mark.parametrize(
    ("own_s", "their_s", "trials"), [(1e-4, 1e-4, 40), (1e-4, 0.048, 10), (0.048, 1e-4, 10), (9, 9, 5)]
)
def test_a_pair_agrees_on_so_many_exchanges_as_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch, own_s: float, their_s: float, trials: int
) -> None:
    sizes = []

    def send_both(world: World, other: int, out: torch.Tensor, back: torch.Tensor) -> None:
        sizes.append(out.nbytes)
        if out.is_floating_point():
            back.fill_(their_s)

    def wait(call: Callable[[], object], device: torch.device) -> float:
        call()
        return own_s

    monkeypatch.setattr(probe_ranks, "_send_both", send_both)
    monkeypatch.setattr(probe_ranks, "_wait", wait)
    assert probe_ranks._exchange_s(WORLD, 1, 1000) == pytest.approx(own_s)
    assert sizes == [1000, 1000, 4, *[1000] * trials]


def test_a_link_that_carries_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_both(*args: object) -> None:
        raise RuntimeError("Timed out waiting 60000ms for recv operation to complete")

    monkeypatch.setattr(probe_ranks, "_send_both", send_both)
    mesh: Any = SimpleNamespace(world=WORLD, machines=("a", "b"))
    with pytest.raises(probe_ranks.LinkFailed, match=r"no exchange between ranks 0 on a and 1 on b \(Timed out"):
        probe_ranks._pair(mesh, "replicate", 1)


def probe_planted(folder: str) -> ClusterProbe:
    """On a rank: every GEMM of one rank and every larger exchange of one pair takes 0.1 s longer."""
    import torch
    import torch.distributed as dist

    from armillary.parallel import probe_ranks
    from armillary.parallel.consensus import Consensus
    from armillary.parallel.world import join_world

    multiply, exchange = torch.mm, dist.batch_isend_irecv
    budget, trials = probe_ranks.BUDGET_S, probe_ranks.TRIALS

    def slow_mm(*args: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return multiply(*args, **options)

    def slow_exchange(ops: list[Any]) -> Any:
        if {dist.get_rank(), ops[0].peer} == set(SLOW_LINK) and ops[0].tensor.numel() > probe_ranks.SMALL_BYTES:
            time.sleep(0.1)
        return exchange(ops)

    probe_ranks.BUDGET_S, probe_ranks.TRIALS = 0.02, 3
    torch.mm = slow_mm if dist.get_rank() == SLOW_RANK else multiply
    dist.batch_isend_irecv = slow_exchange
    try:
        with join_world("cpu") as world:
            consensus = Consensus(rank=world.rank, size=world.size)
            return probe_ranks.probe_ranks(Layout(dp=4), world, consensus, Path(folder))
    finally:
        torch.mm, dist.batch_isend_irecv = multiply, exchange
        probe_ranks.BUDGET_S, probe_ranks.TRIALS = budget, trials


def test_a_slow_rank_and_a_slow_link_are_found(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks.run(4, probe_planted, str(tmp_path))
    assert all(other.ranks == first.ranks and other.links == first.links for other in others)
    assert [each.ranks for each in sorted(first.links, key=lambda link: link.ranks)] == list(combinations(range(4), 2))
    said = [outlier.text for outlier in judge_probe(first).outliers]
    assert any(text.startswith(f"rank {SLOW_RANK} on ") and "GEMM" in text for text in said), said
    assert any(text.startswith("link between ranks 1 (") and ", 3 (" in text for text in said), said
    write_probe(tmp_path / "check.json", first)
    assert read_probe(tmp_path / "check.json") == first
