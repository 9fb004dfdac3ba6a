"""Rules on an autoscaler's decisions: logs that the real one writes for a simulated fleet, and edges."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.readings.autoscaler_log import AUTOSCALER, is_autoscaler_log, read_autoscaler_log, spans_of
from armillary.diagnosis.readings.open_reading import open_reading
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.service_log import cold_starts, over_provisioned, replica_too_large, too_few_replicas
from armillary.errors import BadData
from armillary.fleet.autoscale.decision_log import AutoscalerStart, Logged, append
from armillary.fleet.autoscale.policy import Decision
from armillary.fleet.autoscale.replica_capacity import Limits
from armillary.fleet.autoscale.signals import Signals
from armillary.spec.tables.fleet import Autoscale
from armillary.store.home import Home
from tests.planted import services
from tests.planted.problem import Problem, Wish

LIMITS = Limits(requests_per_s=4.0, in_flight=8.0)


@pytest.mark.parametrize("problem", (*services.PROBLEMS, *services.HEALTHY), ids=lambda problem: problem.name)
def test_a_service_that_is_sized_wrongly(problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "HOURS", 0.9)
    home = Home.at(tmp_path)
    found = diagnose(open_reading(str(problem.make(Wish(seed=5), home)), home), home)
    assert (found.loop, found.cause) == (problem.loop, problem.causes[0] if problem.causes else None), found.headline


def line(now: float, *, ready: int, rate: float, need: float, starting: int = 0, backlog: float = 0.0) -> Logged:
    signals = Signals(now=now, ready=ready, starting=starting, arrived_per_s=rate)
    needs = {"rate": need, "waiting": backlog}
    count = signals.replicas
    return Logged(signals=signals, decision=Decision(now=now, replicas=count, before=count, reason="", needs=needs))


def test_spans_end_at_the_next_decision_and_not_over_a_gap_or_a_restart() -> None:
    settings = Autoscale(max_replicas=4, interval_s=5.0)
    start = AutoscalerStart(settings=settings, limits=LIMITS)
    times = (0.0, 5.0, 500.0)
    lines = [
        start,
        *(line(now, ready=1, rate=1.0, need=0.5) for now in times),
        start,
        line(2.0, ready=1, rate=0, need=0),
    ]
    assert [span.seconds for span in spans_of(lines, settings)] == [5.0, 15.0]


def test_a_backlog_is_no_need_of_the_traffic(tmp_path: Path) -> None:
    settings, path = Autoscale(max_replicas=8, target=0.8), tmp_path / "decisions.jsonl"
    append(path, AutoscalerStart(settings=settings, limits=LIMITS))
    for now in range(0, 60, 5):
        append(path, line(now, ready=2, rate=6.0, need=2.4, backlog=300.0))
    found = read_autoscaler_log(path).values
    assert found["replicas_needed"] == 3.0 and found["short_at_most_fraction"] == 0.0  # 2.4 at 0.8 fill 1.92 replicas


def test_what_is_no_log_of_decisions(tmp_path: Path) -> None:
    assert not is_autoscaler_log('{"time": 1.0, "step": 3}\n') and not is_autoscaler_log("settings limits")
    path = tmp_path / "decisions.jsonl"
    append(path, line(0.0, ready=1, rate=1.0, need=1.0))
    with pytest.raises(BadData, match="no policy"):
        read_autoscaler_log(path)


def reading(**values: float) -> Reading:
    settings = {"min_replicas": "4", "max_replicas": "8", "target": "0.85"}
    return Reading(source="decisions.jsonl", kind="serving", by=AUTOSCALER, values=values, settings=settings)


def test_edges_of_the_rules() -> None:
    assert over_provisioned(reading(replicas=4.0, replicas_needed=2.7), None) is None
    found = over_provisioned(reading(replicas=4.0, replicas_needed=2.0), None)
    assert found is not None and found.levers[0].action == "--set autoscale.min_replicas=2"
    late = reading(replicas=4.0, replicas_needed=2.0, short_starting_fraction=0.2)
    assert over_provisioned(late, None) is None and cold_starts(late, None) is not None
    used = {"replicas": 1.0, "requests_per_s": 1.0, "requests_per_s_p95": 2.0}
    assert replica_too_large(reading(replicas_needed_p95=0.6, **used), None) is None
    assert replica_too_large(reading(replicas_needed_p95=0.3, **used), None) is not None
    assert too_few_replicas(reading(short_at_most_fraction=0.04, replicas_wanted=9.0), None) is None
