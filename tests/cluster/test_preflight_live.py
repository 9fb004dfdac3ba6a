"""The pre-flight as ranks run it: a slow rank and a slow link stay outliers however often they are measured again, and
a healthy set passes, also where other programs use the machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from armillary.cluster.preflight import judge_probe
from armillary.spec.layout import Layout
from armillary.store.cluster_probe import ClusterProbe, LinkProbe
from tests.ranks import Ranks

pytestmark = pytest.mark.slow
SLOW_RANK, SLOW_LINK = 2, (1, 3)
SLOWER, SLOWER_LINK = 3.0, 10.0
"""of a planted rank, and of a planted link, as one that fell back from 10 to 1 Gbit/s: those of healthy ranks that
share two cores with ten other programs differ by up to three times"""
PASSES = 10


def probe(folder: str, planted: str = "") -> ClusterProbe:
    """On a rank: the whole check; every GEMM of one rank, or every exchange of one pair, takes many times as long."""
    import torch
    import torch.distributed as dist

    from armillary.cli.launch.check import probe_undisturbed
    from armillary.parallel import probe_ranks
    from armillary.parallel.consensus import Consensus
    from armillary.parallel.world import join_world

    multiply, exchange = torch.mm, probe_ranks._exchange_s

    def slow_mm(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        done = multiply(*args, **options)
        end = begin + SLOWER * (time.perf_counter() - begin)
        while time.perf_counter() < end:
            pass
        return done

    def slow_exchange_s(world: Any, other: int, size: int) -> float:
        return exchange(world, other, size) * (SLOWER_LINK if {world.rank, other} == set(SLOW_LINK) else 1.0)

    torch.mm = slow_mm if planted == "rank" and dist.get_rank() == SLOW_RANK else multiply
    probe_ranks._exchange_s = slow_exchange_s if planted == "link" else exchange
    try:
        with join_world("cpu") as world:
            consensus = Consensus(rank=world.rank, size=world.size)
            return probe_undisturbed(Layout(dp=4), world, consensus, Path(folder))
    finally:
        torch.mm, probe_ranks._exchange_s = multiply, exchange


def lowest(rates: list[float]) -> float:
    return min(rates) / sorted(rates)[len(rates) // 2]


def figures(seen: ClusterProbe) -> str:
    def of(links: tuple[LinkProbe, ...]) -> float:
        return lowest([link.bytes_per_s for link in links])

    gemm, copy = (lowest([getattr(rank, name) for rank in seen.ranks]) for name in ("gemm_flops", "copy_bytes_per_s"))
    return f"lowest over median: GEMM {gemm:.2f}, copy {copy:.2f}, links {of(seen.links):.2f}; {seen.seconds:.0f} s"


def test_a_planted_slow_rank_is_named(ranks: Ranks, tmp_path: Path) -> None:
    seen = ranks.run(4, probe, str(tmp_path), "rank")[0]
    print(figures(seen))
    said = [outlier.text for outlier in judge_probe(seen).outliers]
    assert any(text.startswith(f"rank {SLOW_RANK} on ") and "GEMM" in text for text in said), said


def test_a_planted_slow_link_is_named(ranks: Ranks, tmp_path: Path) -> None:
    seen = ranks.run(4, probe, str(tmp_path), "link")[0]
    print(figures(seen))
    said = [outlier.text for outlier in judge_probe(seen).outliers]
    assert any(text.startswith("link between ranks 1 (") and ", 3 (" in text for text in said), said


def test_a_healthy_set_passes_ten_times(ranks: Ranks, tmp_path: Path) -> None:
    for number in range(PASSES):
        seen = ranks.run(4, probe, str(tmp_path))[0]
        print(f"pass {number + 1}: {figures(seen)}")
        assert judge_probe(seen).is_healthy, [outlier.text for outlier in judge_probe(seen).outliers]
