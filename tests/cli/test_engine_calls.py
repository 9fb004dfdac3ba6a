"""Calls of torch are timed in the real engine and scale what the planner says of a CPU's steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.cli.engine_calls import _replica, measure_engine_calls
from armillary.machine.device_name import device_name
from armillary.planning.efficiency import CALL_S, DECODE_CALL_S
from armillary.store.home import Home
from armillary.store.peaks import load_peaks
from tests.training.test_auto_precision import measured


def test_they_are_timed_and_kept(home: Home) -> None:
    measured(home, 0.3e9)
    found = measure_engine_calls(home)
    known = load_peaks(home, device_name("cpu"))
    assert known is not None and known.points["calls"][0]["seconds"] == found > 0


def test_steps_are_planned_by_them(home: Home) -> None:
    measured(home, 0.3e9)
    replica = _replica(home)
    assert replica.measured is not None
    calls = [{"what": "engine", "seconds": 4 * DECODE_CALL_S}]
    slow = replace(replica, measured=replica.measured.with_points("calls", calls))
    assert slow.decode(2, 64).host_s == pytest.approx(4 * DECODE_CALL_S * slow.calls(2))
    assert slow.curves.call_s == pytest.approx(4 * CALL_S), "training's in proportion"
