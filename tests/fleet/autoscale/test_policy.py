"""The autoscaler with a hand-made clock: what it needs, what bounds it, when it waits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadData
from armillary.fleet.autoscale.decision_log import AutoscalerStart, Logged, append, read_log, replay
from armillary.fleet.autoscale.policy import Autoscaler, Decision
from armillary.fleet.autoscale.replica_capacity import Capacity, Limits, pooled_rate
from armillary.fleet.autoscale.signals import Signals
from armillary.spec.tables.fleet import Autoscale

LIMITS = Limits(requests_per_s=10.0, in_flight=20.0, ttft_s=1.0, itl_s=0.1, usd_per_hour=2.0)


class Service:
    """Replicas that start at once, and looks every five seconds."""

    def __init__(self, *, replicas: int = 1, limits: Limits = LIMITS, **settings: Any) -> None:
        self.scaler = Autoscaler(Autoscale(**{"max_replicas": 10, **settings}), limits, start_s=0.0)
        self.replicas, self.now = replicas, 0.0
        self.log: list[tuple[Signals, Decision]] = []

    def look(self, rate: float, times: int = 1, **signals: Any) -> Decision:
        """The decision after `times` looks."""
        for _ in range(times):
            self.now += 5.0
            seen = Signals(now=self.now, ready=self.replicas, arrived_per_s=rate, **signals)
            decision = self.scaler.decide(seen)
            self.log.append((seen, decision))
            self.replicas = decision.replicas
        return decision


def test_replicas_follow_the_rate() -> None:
    service = Service(max_rate_up=10.0)
    service.look(4.0, 20)
    assert service.replicas == 1
    decision = service.look(39.0, 60)
    assert max(each.replicas for _, each in service.log) <= 7  # the step looked like a ramp
    assert service.replicas == 5 and decision.needs["rate"] == pytest.approx(39 / 9, rel=0.05)  # 39 / (10 · 0.9)


def test_a_surge_is_seen_by_the_panic_window() -> None:
    service = Service(replicas=2, max_rate_up=10.0)
    service.look(10.0, 20)
    first = service.look(60.0, 2)
    assert first.panic and service.replicas >= 7
    service.look(2.0, 6)
    assert service.replicas >= 7  # nothing is stopped in panic mode


def test_it_grows_by_a_factor_at_most() -> None:
    service = Service()
    sizes = [service.look(80.0).replicas for _ in range(5)]
    assert sizes == [2, 4, 8, 9, 9]


@pytest.mark.parametrize(
    ("signals", "name"),
    [
        ({"in_flight": 70}, "in flight"),
        ({"waiting": 8}, "waiting"),
        ({"kv_used": 0.99}, "KV"),
        ({"gpu_used": 0.99}, "GPU"),
        ({"ttft_p99_s": 1.3}, "latency"),
        ({"itl_p99_s": 0.2}, "latency"),
    ],
)
def test_every_signal_can_ask_for_a_replica(signals: dict[str, Any], name: str) -> None:
    service = Service(replicas=2, max_gpu_used=0.8)
    service.look(10.0, 3)
    assert service.replicas == 2
    decision = service.look(10.0, 12, **signals)
    assert decision.replicas > 2 and any(each.reason.startswith(name) for _, each in service.log if each.change)


def test_it_shrinks_to_what_the_last_half_cooldown_needed() -> None:
    service = Service(cooldown_s=60.0, max_rate_up=10.0)
    service.look(60.0, 20)
    assert service.replicas == 7
    changes = [service.look(10.0).change for _ in range(40)]
    assert service.replicas == 2 and sum(change < 0 for change in changes) >= 1
    assert all(change <= 0 for change in changes)
    first = next(i for i, change in enumerate(changes) if change < 0)
    assert first * 5.0 >= 30.0 - 5.0


def test_a_rate_that_falls_is_taken_to_now() -> None:
    """Its mean is half a window old: on a steady way down, too many replicas would run all along."""
    service = Service(replicas=10, max_replicas=12)
    for step in range(40):
        decision = service.look(90.0 - 2.0 * step)
    rate = 90.0 - 2.0 * 39
    stale = rate + 2.0 * 6  # of the window's middle
    assert decision.needs["rate"] < (rate + stale) / 2 / 9.0


def test_starts_count_as_measured_once_there_are_some() -> None:
    scaler = Autoscaler(Autoscale(max_replicas=4), LIMITS, start_s=4.0)
    assert scaler.start_s == 4.0
    scaler.started(6.0)
    scaler.started(8.0)
    assert scaler.start_s == 7.0


def test_it_does_not_flap_where_the_rate_does() -> None:
    service = Service(replicas=3, cooldown_s=120.0)
    for _ in range(40):
        service.look(10.0, 3)
        service.look(22.0, 3)
    directions = [(each.now, each.change > 0) for _, each in service.log if each.change]
    reversals = [now for (_, before), (now, after) in pairwise(directions) if before != after]
    assert all(later - earlier >= 120.0 for earlier, later in pairwise(reversals))
    assert len(directions) <= 3


def test_money_and_sizes_are_limits() -> None:
    assert Service(max_usd_per_hour=6.0).look(100.0, 10).replicas == 3
    assert Service(max_replicas=4).look(100.0, 10).replicas == 4
    assert Service(min_replicas=3).look(1.0, 10).replicas == 3
    assert "at most $6 per hour" in Service(max_usd_per_hour=6.0).look(100.0, 10).reason


def test_to_zero_and_back() -> None:
    service = Service(min_replicas=0, idle_s=30.0, cooldown_s=20.0, stable_window_s=10.0)
    service.look(1.0, 5, in_flight=1)
    service.look(0.0, 5)
    assert service.replicas == 1
    service.look(0.0, 8)
    assert service.replicas == 0
    assert service.look(0.0, 5).replicas == 0
    assert service.look(0.2, waiting=1).replicas == 1


def test_a_replica_is_started_before_it_is_needed_where_starts_take_long() -> None:
    quick, slow = Service(replicas=2, cooldown_s=30.0), Service(replicas=2, cooldown_s=30.0)
    for _ in range(4):
        slow.scaler.given_start_s = None
        slow.scaler.started(60.0)
    grown: list[int | None] = [None, None]
    for step in range(60):
        for i, service in enumerate((quick, slow)):
            if service.look(10.0 + 0.25 * step).replicas > 2 and grown[i] is None:
                grown[i] = step
    assert grown[0] is not None and grown[1] is not None and grown[1] < grown[0]


def test_capacity_is_corrected_by_what_is_measured() -> None:
    service = Service(replicas=4, cooldown_s=1000.0)
    service.look(30.0, 30, ttft_p99_s=1.2)  # misses at 7.5 requests/s and replica, where 10 were planned
    assert service.scaler.capacity.requests_per_s < 9.0
    better = Service(replicas=1, max_replicas=1)
    better.look(15.0, 60, ttft_p99_s=0.2, itl_p99_s=0.02)  # keeps its objectives at 15
    assert 12.0 < better.scaler.capacity.requests_per_s < 15.01


def test_what_saturates_asks_for_half_as_many_again_at_most() -> None:
    """Hundreds of waiting requests say that there are too few replicas, not how few; the rate does."""
    service = Service(replicas=4, max_replicas=40)
    service.look(10.0, 3)
    decision = service.look(10.0, 1, in_flight=900, waiting=800, kv_used=1.0)
    assert decision.replicas <= 6
    starting = Autoscaler(Autoscale(max_replicas=40), LIMITS, start_s=60.0)
    for step in range(12):
        seen = Signals(now=5.0 * step, ready=4, starting=2, arrived_per_s=10.0, in_flight=900, waiting=800)
        assert starting.decide(seen).replicas == 6  # what queues meanwhile is what the two are for


def test_nothing_is_stopped_while_the_rate_grows() -> None:
    service = Service(replicas=6, cooldown_s=30.0)
    assert all(service.look(10.0 + 0.4 * step).change >= 0 for step in range(48))
    assert service.look(29.0, 60).replicas == 4


def test_a_start_follows_a_stop_where_the_fleet_has_shrunk_for_a_cooldown() -> None:
    service = Service(replicas=10, cooldown_s=60.0)
    while not (service.log and service.log[-1][1].change < 0 and service.now > 250.0):
        service.look(max(10.0, 80.0 - 0.25 * service.now))
    stopped = service.now
    while service.look(90.0).change <= 0:
        pass
    assert service.now - stopped < 60.0


def test_the_target_follows_the_error_budget() -> None:
    needs = []
    for ttft_s, slow_s in ((None, None), (0.1, 0.1), (0.1, 1.4)):
        service = Service(replicas=3, max_replicas=3, limits=replace(LIMITS, in_flight=1e3))
        for step in range(48):
            decision = service.look(25.0, ttft_p99_s=slow_s if step % 2 else ttft_s)
        needs.append(decision.needs["rate"] * service.scaler.capacity.requests_per_s / 25.0)
    unknown, kept, missed = needs
    assert kept == pytest.approx(unknown / 1.05, rel=1e-6) and kept < missed


def test_the_rate_of_many_replicas_is_consistent_with_that_of_several() -> None:
    pooled = pooled_rate(0.8, 1.1, 6)
    capacity = Capacity(Limits(requests_per_s=0.8, pooled_per_s=pooled, in_flight=1.0))
    assert capacity.of_fleet(1) == pytest.approx(0.8, rel=1e-6)
    assert capacity.of_fleet(6) == pytest.approx(6 * 1.1, rel=1e-6)
    assert capacity.replicas_for(6 * 1.1) == pytest.approx(6, rel=1e-6)
    assert pooled > 1.1 and pooled_rate(0.8, 0.7, 6) == 0.8


def test_the_log_is_replayed(tmp_path: Path) -> None:
    service, file = Service(cooldown_s=60.0), tmp_path / "decisions.jsonl"
    for rate in (5.0, 30.0, 80.0, 20.0, 5.0):
        service.look(rate, 12)
    begun = AutoscalerStart(settings=service.scaler.settings, limits=LIMITS, start_s=0.0)
    for part in (service.log[:30], service.log[30:]):
        append(file, begun)
        for signals, decision in part:
            append(file, Logged(signals=signals, decision=decision))
        with file.open("a") as end:
            end.write('{"signals": {"now"')  # the process was killed while it wrote
    lines = list(replay(read_log(file)))
    assert len(lines) == 60
    assert all(_outcome(logged.decision) == _outcome(now) for logged, now in lines[:30])
    other = Autoscale(max_replicas=4)
    assert max(now.replicas for _, now in replay(read_log(file), other)) == 4
    file.write_text(file.read_text().replace('"reason"', '"cause"', 1))
    with pytest.raises(BadData, match="line 2 of"):
        read_log(file)


def _outcome(decision: Decision) -> tuple[int, int, str]:
    return decision.before, decision.replicas, decision.reason
