"""A run folder as a reading: warm-up and recorded steps left out, an engine's records told from training's."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.diagnosis.readings.run_folder import read_gauges_file, read_records, read_run
from armillary.errors import BadInput, NotFound
from armillary.store.home import Home
from tests.diagnosis.trained import plan_of, reading_of, records, run_of


def test_warm_up_is_left_out() -> None:
    made = reading_of(step_s=lambda step: 30.0 if step < 3 else 1.0)
    assert made.get("step_s") == 1.0 and max(made.series("step_s")) == 1.0
    assert made.notes == ("3 steps of warm-up were left out",)


def test_a_recorded_step_tells_where_its_time_went_and_not_how_long_steps_are() -> None:
    made = reading_of(step_s=lambda step: 5.0 if step == 9 else 1.0)
    assert max(made.series("step_s")) == 1.0 and made.get("useful_fraction") == 0.5 and made.get("compute_s") == 0.9


def test_a_recorded_step_tells_who_was_slowest_in_the_one_before() -> None:
    made = reading_of(rank_spread_s=0.1, slowest_rank=1.0)
    assert len(made.series("rank_spread_s")) == 17 and len(made.series("step_s")) == 16


def test_a_machine_that_others_use_is_said_to_be_busy() -> None:
    assert "waited for a core 40% of the time" in reading_of(host_queue_s=0.4).notes[-1]
    assert len(reading_of(host_queue_s=0.05).notes) == 1


def test_what_warm_up_steps_tell_all_the_same() -> None:
    made = reading_of(memory_weights_bytes=lambda step: 7.0 if step == 1 else None)
    assert made.get("memory_weights_bytes") == 7.0


def test_a_run_of_few_steps_says_so() -> None:
    made = read_records(records(3), source="x")
    assert len(made.series("step_s")) == 3 and "few steps" in made.notes[-1]
    with pytest.raises(BadInput, match="has measured nothing yet; wait"):
        read_records([], source="x")


def test_a_folder_and_its_file_read_alike(tmp_path: Path) -> None:
    home = Home.at(tmp_path)
    run = run_of(home, plan_of(), name="quiet-otter")
    whole, alone = read_run(run, home), read_gauges_file(run.gauges)
    assert whole.steps == alone.steps and whole.plan == alone.plan and whole.source == "run quiet-otter"
    run.gauges.unlink()
    with pytest.raises(NotFound, match="has not taken a step yet"):
        read_run(run, home)


def test_an_engine_s_records_are_served() -> None:
    step = {"time": 1.0, "engine_step_s": 0.01, "decode_tokens": 4, "running": 4, "preemptions_total": 3}
    request = {"time": 2.0, "request": "a", "arrived_s": 0.0, "ttft_s": 0.2, "e2e_s": 1.0, "tokens_out": 10}
    made = read_records([step, request], source="x")
    assert made.kind == "serving" and len(made.steps) == len(made.requests) == 1
    assert made.get("ttft_p50_s") == 0.2 and made.get("preemptions_total") == 3


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(BadInput, match="has step_s='abc', which is not a number; delete that line"):
        read_records([{"time": 1.0, "step": 0, "step_s": "abc"}], source="x")
