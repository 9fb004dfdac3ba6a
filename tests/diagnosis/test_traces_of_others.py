"""Kineto traces of programs that have nothing to do with this one, from the public test data of HolisticTraceAnalysis.

The verdicts were worked out from the events by hand: unions of kernel times with and without NCCL's, and what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.profiling.traces import SHARED

TRACES = SHARED / "kineto"
Cli = Callable[..., Any]
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the folder ../shared/data/kineto is not here")


def diagnosed(cli: Cli, name: str) -> Any:
    ran = cli("diagnose", str(TRACES / f"{name}.json.gz"), "--json")
    assert ran.code == 0
    return ran.json


def test_a_recommender_on_eight_a100(cli: Cli) -> None:
    """Of 465 ms on the device NCCL's kernels run alone for 87: the largest part that anything can be done about."""
    found = diagnosed(cli, "trace_diff_control_control")
    assert (found["loop"], found["cause"]) == ("training", "exposed_communication")
    assert found["budget"]["comm_exposed"] == pytest.approx(86.6 / 464.6, abs=0.01)
    assert found["levers"][0]["speedup"] == pytest.approx(1 / (1 - 86.6 / 464.6), rel=0.02)


def test_a_recommender_on_two_v100(cli: Cli) -> None:
    """Of 745 ms 652 are kernels and copies that compute, mostly passes over memory; NCCL alone 65, nothing 27."""
    found = diagnosed(cli, "trace_diff_test_test")
    assert (found["loop"], found["cause"]) == ("inner", "memory_bandwidth")
    assert found["budget"]["comm_exposed"] == pytest.approx(65.5 / 745.2, abs=0.01)
    assert {one["cause"] for one in found["findings"]} >= {"memory_bandwidth", "exposed_communication"}


def test_the_start_of_a_program(cli: Cli) -> None:
    """AlexNet's first passes: 66 ms of 12.9 s on the device, the rest is the host making contexts and memory."""
    found = diagnosed(cli, "critical_path_alexnet_benchmark_result_2869224_1695835535_trace")
    assert (found["loop"], found["cause"]) == ("inner", "sync")
    assert found["budget"]["host"] + found["budget"]["sync"] > 0.99
