"""Rules on a gateway's page: the pages are a real gateway's, with the counters that a case needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.readings.metrics_page import reading_of_page
from armillary.store.home import Home
from tests.fleet.gateway.replicas import FakeReplica, gateway_of, scenario

Counts = tuple[tuple[int, int], ...]


async def page_of(folder: Path, counts: Counts) -> str:
    """After a request; then with so many requests, and in flight, at each replica."""
    async with gateway_of(folder, *(FakeReplica() for _ in counts)) as client:
        assert (await client.post({"model": "bot", "prompt": "hello"})).status == 200
        for (_, replica), (requests, in_flight) in zip(client.models.replicas(), counts, strict=True):
            replica.requests, replica.in_flight = requests, in_flight
        return (await client.get("/metrics")).text


def judged(text: str, earlier: str | None = None) -> Diagnosis:
    reading = reading_of_page(text, source="gateway", earlier=earlier, seconds=5.0 if earlier else 0.0)
    assert reading.by == "gateway"
    return diagnose(reading, Home.at("nowhere"))


@pytest.mark.parametrize(
    ("counts", "cause"),
    [
        (((400, 30), (60, 2), (50, 1)), "routing_skew"),
        (((400, 8), (60, 9), (50, 7)), None),  # a quick replica gets more and has no more in flight
        (((40, 30), (6, 2), (5, 1)), None),  # too few to say
        (((200, 5), (190, 6), (210, 5)), None),
        (((400, 30),), None),
    ],
)
def test_routing_skew(tmp_path: Path, counts: Counts, cause: str | None) -> None:
    @scenario
    async def run(folder: Path) -> None:
        found = judged(await page_of(folder, counts))
        assert found.cause == cause and found.judged, found.headline

    run(tmp_path)


@scenario
async def test_what_came_between_two_looks_counts(folder: Path) -> None:
    """A restart sent everything to one replica once; since then it is even."""
    before = await page_of(folder / "before", ((5000, 9), (100, 9)))
    after = await page_of(folder / "after", ((5200, 30), (310, 1)))
    for mine, theirs in zip(_urls(before), _urls(after), strict=True):
        before = before.replace(mine, theirs)
    assert judged(after).cause == "routing_skew" and judged(after, before).cause is None


def _urls(page: str) -> list[str]:
    lines = [line for line in page.splitlines() if line.startswith("armillary_gateway_replica_up{")]
    return [line.partition('url="')[2].partition('"')[0] for line in lines]


@scenario
async def test_slow_guards(folder: Path) -> None:
    page = await page_of(folder, ((200, 5), (200, 5)))
    within = page + "armillary_guard_s 0.04\narmillary_guard_limit_s 0.1\n"
    beyond = within.replace("guard_s 0.04", "guard_s 0.5")
    assert judged(within).cause is None
    found = judged(beyond)
    assert found.cause == "guard_latency" and found.levers[0].at_most == pytest.approx(5.0)
