"""Training over weeks: goodput is Daly's formula, and every second is accounted for."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from armillary.planning.cost.failures import Failures, goodput
from armillary.planning.simulation.simulated_training import SimulatedTraining, TrainingCase

CASE = TrainingCase(
    step_s=10.0, slow_step_s=13.0, steps=40_000, interval_steps=60, checkpoint_s=20.0, restart_s=400.0, mtbf_s=9000.0
)


def test_goodput_is_dalys() -> None:
    runs = [SimulatedTraining(CASE, seed=seed).run() for seed in range(6)]
    failures = Failures(
        num_devices=1, device_mtbf_s=CASE.mtbf_s, checkpoint_s=CASE.checkpoint_s, restart_s=CASE.restart_s
    )
    assert mean(run.goodput_fraction for run in runs) == pytest.approx(goodput(failures, 600.0), rel=0.02)
    assert all(run.steps == CASE.steps for run in runs)


@pytest.mark.parametrize("straggler_mtbf_s", [float("inf"), 30_000.0])
def test_spans_cover_the_run_and_their_steps_add_up(straggler_mtbf_s: float) -> None:
    case = replace(CASE, straggler_mtbf_s=straggler_mtbf_s, straggler_s=3000.0, longest_s=300_000.0)
    run = SimulatedTraining(case, seed=1).run()
    assert run.failures > 10 and (run.stragglers > 3) == (straggler_mtbf_s < 1e9)
    assert sum(span.steps for span in run.spans) == run.steps < case.steps
    assert all(one.end_s == pytest.approx(other.begin_s) for one, other in zip(run.spans, run.spans[1:], strict=False))
    assert run.goodput_fraction + sum(run.lost().values()) == pytest.approx(1.0)
    assert (run.lost()["stragglers"] > 0.0) == (run.stragglers > 0)


def test_a_recipes_training_is_simulated(cli: Any, tmp_path: Any) -> None:
    recipe, page, trace = tmp_path / "t.toml", tmp_path / "t.html", tmp_path / "t.json"
    recipe.write_text(
        '[model]\nname = "llama-3-8b"\n[hardware]\non = "h100x8"\n[layout]\npp = 4\ndp = 2\n'
        "[train]\nsequence = 4096\nbatch_tokens = 262144\nsteps = 5000\n[faults]\nstraggler_mtbf_h = 10\n"
    )
    ran = cli("simulate", str(recipe), "--for", "train", "--page", str(page), "--trace", str(trace), "--json")
    gauges = ran.json["gauges"]
    assert ran.code == 0 and 0 < gauges["goodput_fraction"] <= 1 and gauges["stragglers"] > 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"forward 0", "backward 0", "training"} <= {event["name"] for event in events}
    assert "Steps over time" in page.read_text()
    priced = cli("plan", str(recipe), "--json").json["plan"]["predicted"]["step_s"]
    assert gauges["step_s"] == pytest.approx(priced, rel=0.05)
    swept = cli("simulate", str(recipe), "--for", "train", "--sweep", "layout.schedule=gpipe,1f1b", "--json").json
    assert [each["set"] for each in swept] == [["layout.schedule=gpipe"], ["layout.schedule=1f1b"]]
