"""Timing: cycled calls, the median, the spread; and clock frequencies."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from armillary.kernels.core.timing import MIN_SAMPLES, calls_per_sample, num_samples, summary, time_calls
from armillary.machine import clocks as clocks_module
from armillary.machine.clocks import Clocks, cpu_clocks, gpu_clocks, parse_gpu


def test_calls_are_taken_in_turn() -> None:
    taken: list[int] = []
    timing = time_calls([lambda n=n: taken.append(n) for n in range(3)], torch.device("cpu"), budget_s=0.002)
    assert taken == [n % 3 for n in range(len(taken))]
    assert timing.seconds > 0 and timing.samples >= MIN_SAMPLES and timing.calls > 1
    assert timing.began <= timing.ended


def test_a_long_call_is_a_sample_by_itself() -> None:
    timing = time_calls([lambda: time.sleep(0.002)], torch.device("cpu"), budget_s=0.001)
    assert (timing.calls, timing.samples) == (1, MIN_SAMPLES)
    assert timing.seconds >= 0.002


def test_the_median_is_not_moved_by_one_slow_sample() -> None:
    timing = summary([1.0, 1.0, 1.1, 1.0, 50.0], calls=1, method="host clock", began=0.0)
    assert timing.seconds == 1.0
    assert summary([2.0], calls=1, method="host clock", began=0.0).spread == 0.0


@pytest.mark.parametrize(("once_s", "calls", "samples"), [(3e-6, 334, 199), (0.01, 1, 20), (10.0, 1, MIN_SAMPLES)])
def test_short_calls_are_grouped_and_long_ones_counted_out(once_s: float, calls: int, samples: int) -> None:
    assert calls_per_sample(once_s) == calls
    assert num_samples(once_s, calls, 0.2) == samples


# --- clocks


def test_clocks_between_two_times() -> None:
    values = iter([1e9, 2e9, 3e9])
    begin = time.monotonic()
    with Clocks(lambda: {"cpu_clock_hz": next(values, 3e9)}, interval_s=0.01) as clocks:
        time.sleep(0.1)
    seen = clocks.between(begin, time.monotonic())
    assert 1e9 < seen["cpu_clock_hz"] <= 3e9
    assert clocks.between(begin - 9, begin - 8) == {"cpu_clock_hz": 1e9}


def test_a_machine_that_says_nothing_has_no_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda: None)
    with Clocks(cpu_clocks, interval_s=0.01) as clocks:
        time.sleep(0.03)
    assert clocks.between(0, time.monotonic()) == {}


def test_clocks_are_read_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(current=2500.5))
    assert cpu_clocks() == {"cpu_clock_hz": pytest.approx(2500.5e6)}
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert cpu_clocks() == {}


def test_nvml_is_read_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def no_power(handle: str) -> float:
        raise NVMLError("not supported")

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM="sm",
        NVML_CLOCK_MEM="mem",
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda handle, kind: {"sm": 1980, "mem": 3201}[kind],
        nvmlDeviceGetPowerUsage=no_power,
        nvmlDeviceGetTemperature=lambda handle, sensor: 61,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_clocks("GPU-1")() == {"sm_clock_hz": 1.98e9, "memory_clock_hz": 3.201e9, "temperature_c": 61.0}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(clocks_module, "ask", lambda *arguments: "1980, 3201, 612.1, 61\n")
    assert gpu_clocks("GPU-1")()["power_w"] == 612.1


def test_a_driver_that_does_not_know_everything() -> None:
    assert parse_gpu("1980, 3201, 612.1, 61\n") == {
        "sm_clock_hz": 1.98e9,
        "memory_clock_hz": 3.201e9,
        "power_w": 612.1,
        "temperature_c": 61.0,
    }
    assert parse_gpu("1980, [N/A], [Not Supported], 61") == {"sm_clock_hz": 1.98e9, "temperature_c": 61.0}
    assert parse_gpu(None) == {}
