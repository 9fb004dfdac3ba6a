"""A core is left to the server where another thread would not speed a decode step up; ceilings are of those threads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.machine.device_name import device_name
from armillary.planning.calibrate.engine_calibration import small_replica
from armillary.planning.serving.cpu_threads import engine_threads, peaks_of_threads
from armillary.store.home import Home
from armillary.store.peaks import load_peaks, new_peaks, save_peaks
from tests.training.test_auto_precision import measured


def with_calls(home: Home, seconds: float):
    replica, _ = small_replica(home)
    assert replica.measured is not None
    return replace(replica, measured=replica.measured.with_points("calls", [{"what": "engine", "seconds": seconds}]))


def test_calls_leave_a_core(home: Home) -> None:
    measured(home, 0.3e9)
    found = engine_threads(with_calls(home, 50e-6), 4, 128)
    assert found.count == 3 and "3 of 4 cores" in found.reason
    assert engine_threads(with_calls(home, 50e-6), 1, 128).count == 1


def test_arithmetic_takes_all_cores(home: Home) -> None:
    measured(home, 0.3e9)
    assert engine_threads(with_calls(home, 1e-9), 4, 128).count == 4


def test_ceilings_are_of_those_threads(home: Home) -> None:
    measured(home, 0.3e9)
    whole = load_peaks(home, device_name("cpu"))
    assert whole is not None
    half = peaks_of_threads(home, whole, 1, 2)
    assert half is not None and half.best_gemm("fp32") == pytest.approx(whole.best_gemm("fp32") / 2), "in proportion"
    point = {"m": 8, "n": 8, "k": 8, "dtype": "fp32", "flops": 1e9}
    save_peaks(home, new_peaks(device_name("cpu", threads=1)).with_points("gemm", [point]))
    own = peaks_of_threads(home, whole, 1, 2)
    assert own is not None and own.best_gemm("fp32") == 1e9, "as measured with so many"
    assert peaks_of_threads(home, whole, 2, 2) is whole
