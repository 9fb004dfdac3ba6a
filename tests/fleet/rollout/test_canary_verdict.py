"""Verdicts on canaries, with counts made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from armillary.errors import BadInput
from armillary.fleet.rollout.canary_verdict import Counts, Verdict, verdict_on
from armillary.fleet.rollout.rollout_record import (
    Rollout,
    begin_rollout,
    read_rollout,
    replace_rollout,
    roll_back,
    write_rollout,
)
from armillary.stats import LogMoments


def times(seconds: float, count: int = 400) -> LogMoments:
    """Latencies around a geometric mean."""
    made = LogMoments()
    for number in range(count):
        made.add(seconds * (1.5 if number % 2 else 1 / 1.5))
    return made


def counts(requests: int, failures: int = 0, ttft: float = 0.1, tpot: float = 0.01) -> Counts:
    return Counts(requests=requests, failures=failures, ttft=times(ttft, requests), tpot=times(tpot, requests))


GOOD = counts(10_000, 1)


@pytest.mark.parametrize(
    ("canary", "verdict", "words"),
    [
        (counts(40), "wait", "errors undecided"),
        (counts(400), "promote", "400 requests"),
        (counts(400, ttft=0.105), "promote", "400 requests"),
        (counts(10, failures=5), "roll back", "5 of its 10 requests"),
        (counts(10, failures=1), "wait", "errors and"),  # one failure may be chance
        (counts(400, failures=12), "roll back", "12 of its 400"),
        (counts(400, ttft=0.15), "roll back", "TTFT is 1.50"),
        (counts(400, tpot=0.02), "roll back", "TPOT is 2.00"),
        (Counts(requests=400, ttft=times(0.1)), "promote", "400 requests"),  # no streams, so no TPOT
    ],
)
def test_verdicts(canary: Counts, verdict: Verdict, words: str) -> None:
    found, reason = verdict_on(Rollout(release="registry:bot:2", began=0.0), canary, GOOD, now=10.0)
    assert found == verdict and words in reason


def test_a_least_number_of_requests() -> None:
    found, reason = verdict_on(Rollout(release="r", began=0.0, min_requests=500), counts(400), GOOD, now=1.0)
    assert found == "wait" and "500 are wanted" in reason


def test_a_canary_that_gets_no_requests_ends() -> None:
    rollout = Rollout(release="registry:bot:2", began=0.0, timeout_s=60.0)
    assert verdict_on(rollout, counts(3), GOOD, now=61.0)[0] == "roll back"


def test_errors_that_all_replicas_have_are_not_the_canary() -> None:
    rollout = Rollout(release="r", began=0.0)
    assert verdict_on(rollout, counts(2000, failures=200), counts(20_000, failures=2000), now=1.0)[0] == "promote"


def test_latencies_that_a_switched_service_has_too_few_of_are_not_waited_for() -> None:
    """After blue/green has switched, the old release gets no more requests: 29 times are too few."""
    rollout, short = Rollout(release="r", began=0.0), counts(29)
    assert verdict_on(rollout, counts(4000), short, now=1.0)[0] == "wait"
    found, reason = verdict_on(rollout, counts(4000), short, now=1.0, switched=True)
    assert found == "promote" and "not compared, as the old release has only 29" in reason
    assert verdict_on(rollout, counts(4000, ttft=0.15), counts(400), now=1.0, switched=True)[0] == "roll back"


def test_one_rollout_at_a_time(tmp_path: Path) -> None:
    begin_rollout(tmp_path, Rollout(release="registry:bot:2"))
    with pytest.raises(BadInput, match="goes on"):
        begin_rollout(tmp_path, Rollout(release="registry:bot:3"))
    rollout = read_rollout(tmp_path)
    assert rollout is not None and rollout.release == "registry:bot:2" and rollout.state == "canary"


def test_rolled_back_by_hand(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing to roll back"):
        roll_back(tmp_path)
    begin_rollout(tmp_path, Rollout(release="registry:bot:2", strategy="blue-green"))
    roll_back(tmp_path)
    ended = read_rollout(tmp_path)
    assert ended is not None and (ended.state, ended.reason) == ("rolled back", "asked for")
    write_rollout(tmp_path, Rollout(release="registry:bot:2", state="done", previous="registry:bot:1"))
    roll_back(tmp_path)
    undone = read_rollout(tmp_path)
    assert undone is not None and (undone.release, undone.state) == ("registry:bot:1", "rolling")


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"max_slowdown": 1.0}, {"max_error_fraction": 0.0}])
def test_settings_without_a_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="a rollout"):
        Rollout(release="r", **wrong)  # type: ignore[arg-type]


def test_what_is_asked_for_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    """A service notes how far it is just when somebody rolls back."""
    begin_rollout(tmp_path, Rollout(release="registry:bot:2"))
    seen = read_rollout(tmp_path)
    assert seen is not None and replace_rollout(tmp_path, seen, noted := replace(seen, previous="registry:bot:1"))
    roll_back(tmp_path)
    assert not replace_rollout(tmp_path, noted, replace(noted, state="rolling"))
    ended = read_rollout(tmp_path)
    assert ended is not None and ended.state == "rolled back" and ended.previous == "registry:bot:1"
