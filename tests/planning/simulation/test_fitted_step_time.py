"""Step times that are no line: one more decode costs less the more there are, and drawing a token costs more."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from armillary.planning.simulation.fitted_step_time import fit_step_cost
from armillary.planning.simulation.request_stats import served_gauges

CORNERS = ((4, 1.9e-3), (12, 1.4e-3), (1e9, 0.8e-3))
"""as an engine of five million parameters on two cores had it (2026-11-19): each decode up to so many costs so much"""


def seconds(decodes: int, drawn: int = 0) -> float:
    total, begin = 5e-3 + 4e-4 * drawn, 0.0
    for end, each_s in CORNERS:
        total += each_s * max(0.0, min(decodes, end) - begin)
        begin = end
    return total


def step(decodes: int, drawn: int = 0, times: float = 1.0, name: str = "engine_step_s") -> dict[str, Any]:
    return {"decode_tokens": decodes, "drawn_tokens": drawn, name: times * seconds(decodes, drawn)}


@pytest.mark.parametrize("seed", range(4))
def test_decodes_whose_cost_falls_with_their_number(seed: int) -> None:
    """Fitted to a run of few decodes with a short time of many; a line would say a third too much for more."""
    dice = Random(seed)
    counts = [dice.randint(1, 8) for _ in range(900)] + [dice.randint(9, 28) for _ in range(150)]
    found = fit_step_cost([step(each, times=dice.lognormvariate(0.0, 0.05)) for each in counts])
    assert found is not None
    for decodes in (1, 4, 8, 16, 28, 40):
        assert found.of(step(decodes)) == pytest.approx(seconds(decodes), rel=0.06), decodes


def test_more_decodes_than_a_run_had_are_as_they_were_calibrated() -> None:
    dice = Random(0)
    run = [step(dice.randint(1, 5), times=dice.lognormvariate(0.0, 0.05)) for _ in range(400)]
    calibration = [step(1 << i, name="calibration_step_s") for i in range(7)]
    calibration += [step(rows, rows, name="calibration_step_s") for rows in (1, 8, 32)]
    found = fit_step_cost(run, calibration=calibration)
    assert found is not None
    assert found.of(step(64)) == pytest.approx(seconds(64), rel=0.1)
    assert found.of(step(32, 32)) == pytest.approx(seconds(32, 32), rel=0.1), "the run drew no tokens"


def test_a_recorded_step_stands_for_those_that_were_not() -> None:
    """Nine in ten short steps are not recorded, so the usual gap is short."""
    short = {"engine_step_s": 0.005, "decode_tokens": 4.0, "recorded_steps": 10}
    long = {"engine_step_s": 0.05, "decode_tokens": 4.0, "recorded_steps": 1}
    assert served_gauges([short] * 10 + [long] * 50, ())["itl_p50_s"] == 0.005
