"""`armillary load` against our own server: both forms of request, the server's counts, equal beginnings found again."""

from __future__ import annotations

import re

import pytest

from armillary.serving.load.run import LoadTest, load_test
from armillary.spec.tables.traffic import Load, Objective, Traffic
from tests.serving.tiny import Server

TRAFFIC = Traffic(requests_per_s=40, tokens_in=96, tokens_out=8, shared_prefix=64, duration_s=1.0)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_server_under_load(server: Server, api: str) -> None:
    load = Load(api=api, warmup_s=0.2, requests=16)  # type: ignore[arg-type]
    report = load_test(server.url, LoadTest(traffic=TRAFFIC, load=load, objective=Objective()))
    found = report.last
    assert found.failed == 0 and found.requests == 16, found.errors
    assert found.counted_by == "usage" and found.tokens_out == 8  # it takes ignore_eos, and counts
    assert found.tokens_in == pytest.approx(96, abs=24) and found.ttft.count == 16


def test_equal_beginnings_are_found_in_the_prefix_cache(server: Server) -> None:
    def hits() -> float:
        found = re.search(r"^armillary_prefix_hits_total (\S+)", server.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = hits()
    load = Load(warmup_s=0, requests=8, concurrency=1)  # one by one: the first leaves its blocks
    load_test(server.url, LoadTest(traffic=TRAFFIC, load=load, objective=Objective()))
    server.until(lambda: hits() - before >= 7 * 32)  # of some 64 tokens each, in blocks of 16; counts come with a step
