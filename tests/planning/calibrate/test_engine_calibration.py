"""A small engine in a process of its own says what torch calls cost and what a process takes; plans go by that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.machine.device_name import device_name
from armillary.planning.calibrate.engine_calibration import calibrate, small_replica
from armillary.planning.device_model.efficiency import AUTOGRAD_CALL, TORCH_CALL_S
from armillary.planning.serving.serving_memory import serving_memory
from armillary.store.home import Home
from armillary.store.peaks import load_peaks
from tests.training.test_auto_precision import measured


@pytest.mark.slow  # by default the demo measures it
def test_it_is_measured_and_kept(home: Home) -> None:
    measured(home, 0.3e9)
    found = calibrate(home)
    known = load_peaks(home, device_name("cpu"))
    assert known is not None and known.points["calls"][0]["seconds"] == found.call_s > 0
    assert known.points["process"][0]["resident_bytes"] == found.process_bytes
    assert found.process_bytes is not None and 0.1e9 < found.process_bytes < 2e9, "torch and what it brings"


def test_steps_are_planned_by_calls(home: Home) -> None:
    measured(home, 0.3e9)
    replica, _ = small_replica(home)
    assert replica.measured is not None
    calls = [{"what": "engine", "seconds": 4 * TORCH_CALL_S}]
    slow = replace(replica, measured=replica.measured.with_points("calls", calls))
    assert slow.decode(2, 64).host_s == pytest.approx(4 * TORCH_CALL_S * slow.calls(2))
    assert slow.curves.autograd_call_s == pytest.approx(4 * TORCH_CALL_S * AUTOGRAD_CALL), "training's in proportion"


def test_memory_is_planned_by_what_a_process_takes(home: Home) -> None:
    measured(home, 0.3e9)
    replica, serve = small_replica(home)
    assert replica.measured is not None
    small, large = (
        serving_memory(replace(replica, measured=replica.measured.with_points("process", [point])), serve)
        for point in ({"what": "engine", "resident_bytes": 0.2e9}, {"what": "engine", "resident_bytes": 0.7e9})
    )
    assert large.working_bytes - small.working_bytes == pytest.approx(0.5e9)
