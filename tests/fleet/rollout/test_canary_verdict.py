"""Verdicts on canaries, with counts made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.errors import BadInput
from armillary.fleet.rollout.canary_verdict import Counts, Verdict, verdict_on
from armillary.fleet.rollout.rollout_record import Rollout, begin_rollout, read_rollout

GOOD = Counts(requests=1000, failures=1, ttft_p50_s=0.1, itl_p50_s=0.01)


@pytest.mark.parametrize(
    ("canary", "verdict", "words"),
    [
        (Counts(requests=40), "wait", "40 of 100"),
        (Counts(requests=120, ttft_p50_s=0.11, itl_p50_s=0.01), "promote", "120 requests"),
        (Counts(requests=10, failures=5), "roll back", "50.0%"),
        (Counts(requests=10, failures=1), "wait", "10 of 100"),  # one failure may be chance
        (Counts(requests=400, failures=12, ttft_p50_s=0.1), "roll back", "3.0%"),
        (Counts(requests=120, ttft_p50_s=0.15, itl_p50_s=0.01), "roll back", "TTFT p50 is 1.50"),
        (Counts(requests=120, ttft_p50_s=0.1, itl_p50_s=0.02), "roll back", "ITL p50 is 2.00"),
    ],
)
def test_verdicts(canary: Counts, verdict: Verdict, words: str) -> None:
    found, reason = verdict_on(Rollout(release="registry:bot:2", began=0.0), canary, GOOD, now=10.0)
    assert found == verdict and words in reason


def test_a_canary_that_gets_no_requests_ends() -> None:
    rollout = Rollout(release="registry:bot:2", began=0.0, timeout_s=60.0)
    assert verdict_on(rollout, Counts(requests=3), GOOD, now=61.0)[0] == "roll back"


def test_errors_that_all_replicas_have_are_not_the_canary() -> None:
    shared = Counts(requests=1000, failures=100)
    assert (
        verdict_on(Rollout(release="r", began=0.0), Counts(requests=200, failures=20), shared, now=1.0)[0] == "promote"
    )


def test_one_rollout_at_a_time(tmp_path: Path) -> None:
    begin_rollout(tmp_path, Rollout(release="registry:bot:2"))
    with pytest.raises(BadInput, match="goes on"):
        begin_rollout(tmp_path, Rollout(release="registry:bot:3"))
    rollout = read_rollout(tmp_path)
    assert rollout is not None and rollout.release == "registry:bot:2" and rollout.state == "canary"
