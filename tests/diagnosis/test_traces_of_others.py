"""Kineto traces of programs unrelated to this one: excerpts of HolisticTraceAnalysis's public test data.

The verdicts were worked out from the events by hand: unions of kernel times with and without NCCL's, and what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.profiling.traces import EXCERPTS

Cli = Callable[..., Any]


def diagnosed(cli: Cli, name: str) -> Any:
    ran = cli("diagnose", str(EXCERPTS / f"{name}.json.gz"), "--json")
    assert ran.code == 0
    return ran.json


def test_a_recommender_on_eight_a100(cli: Cli) -> None:
    """Of 18.0 ms NCCL's kernels run alone for 10.2, other kernels for 5.4, nothing for 2.4."""
    diagnosis = diagnosed(cli, "recommender_eight_a100")
    assert (diagnosis["loop"], diagnosis["cause"]) == ("training", "exposed_communication")
    assert diagnosis["budget"]["comm_exposed"] == pytest.approx(10.179 / 18.013, abs=0.01)
    assert diagnosis["levers"][0]["speedup"] == pytest.approx(1 / (1 - 10.179 / 18.013), rel=0.02)


def test_a_recommender_on_two_v100(cli: Cli) -> None:
    """Of 5.17 ms 4.14 are kernels and copies that compute, mostly memory-bound; the device is idle for 1.03."""
    diagnosis = diagnosed(cli, "recommender_two_v100")
    assert (diagnosis["loop"], diagnosis["cause"]) == ("inner", "memory_bandwidth")
    computed = sum(diagnosis["budget"][part] for part in ("useful", "inefficiency", "unjudged"))
    assert computed == pytest.approx(4.137 / 5.168, abs=0.01) and diagnosis["budget"]["comm_exposed"] == 0
    assert {finding["cause"] for finding in diagnosis["findings"]} == {"memory_bandwidth", "launch_overhead"}


def test_a_collective_after_a_long_kernel(cli: Cli) -> None:
    """Of 1.45 ms a memory-bound kernel takes 1.22 and NCCL alone 0.23: both are named, the larger first."""
    diagnosis = diagnosed(cli, "recommender_two_v100_all_to_all")
    assert (diagnosis["loop"], diagnosis["cause"]) == ("inner", "memory_bandwidth")
    assert diagnosis["budget"]["comm_exposed"] == pytest.approx(0.230 / 1.446, abs=0.01)
    assert [finding["cause"] for finding in diagnosis["findings"]] == ["memory_bandwidth", "exposed_communication"]


def test_the_start_of_a_program(cli: Cli) -> None:
    """AlexNet's first passes: 66 ms of 13.0 s on the device, the rest is the host making contexts and memory."""
    diagnosis = diagnosed(cli, "alexnet_start")
    assert (diagnosis["loop"], diagnosis["cause"]) == ("inner", "sync")
    assert diagnosis["budget"]["host"] + diagnosis["budget"]["sync"] > 0.99
