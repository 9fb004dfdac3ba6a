"""What the recording costs is taken off the budget, so that it is that of the plain step."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.profiling.analysis.analyse import analyse
from armillary.profiling.profile import Profile
from tests.profiling.traces import ROOFLINE, HandMade


def profiled(tmp_path: Path, plain_s: float | None) -> Profile:
    """1 ms: a kernel of 400 µs, then 600 µs in which the host prepares launches."""
    made = HandMade().step(1_000).kernel("elementwise", launched=0, at=0, takes=400)
    for i in range(20):
        made.op("aten::view", 400 + 30 * i, 29, [4])
    return analyse(made.write(tmp_path / "t.json"), roofline=ROOFLINE, plain_s=plain_s)


def test_nothing_is_taken_off_without_need(tmp_path: Path) -> None:
    found = profiled(tmp_path, None)
    assert found.wall_s == pytest.approx(1e-3) and not any("without the profiler" in note for note in found.notes)
    near = profiled(tmp_path, 0.98e-3)
    assert near.budget == found.budget and near.notes[-1] == "a step takes 980 µs without the profiler, 1 ms with it"


def test_the_difference_comes_off_the_hosts_parts(tmp_path: Path) -> None:
    found, plain = profiled(tmp_path, None), profiled(tmp_path, 0.5e-3)
    assert plain.wall_s == pytest.approx(0.5e-3) and sum(plain.budget.values()) == pytest.approx(0.5e-3)
    assert plain.budget["unjudged"] == found.budget["unjudged"] == pytest.approx(0.4e-3)
    assert plain.budget["launch_gap"] == pytest.approx(found.budget["launch_gap"] - 0.5e-3)
    assert "taken off launch gaps" in plain.notes[-1] and any("1.25 × faster" in line for line in plain.findings)


def test_kernels_are_never_shortened(tmp_path: Path) -> None:
    found = profiled(tmp_path, 0.1e-3)
    assert found.budget["unjudged"] == pytest.approx(0.4e-3) and "more than that cannot be" in found.notes[-1]
    assert sum(found.budget.values()) == pytest.approx(found.wall_s)


def test_on_a_cpu_the_recorded_step_is_shown_and_said(tmp_path: Path) -> None:
    made = HandMade().step(1_000).op("aten::mm", 0, 800, [64, 64], [64, 64])
    found = analyse(made.write(tmp_path / "t.json"), roofline=ROOFLINE, plain_s=0.5e-3)
    assert found.wall_s == pytest.approx(1e-3) and found.notes[-1].endswith("1 ms with it: 2.00 × as long")
