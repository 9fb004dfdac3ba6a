"""An engine that sleeps serves in real time what the simulator says."""

from __future__ import annotations

import time

import pytest

from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.scheduler.settings import Settings
from armillary.planning.simulation.simulated_engine import System
from armillary.planning.simulation.sleeping_engine import TOKEN, make_engine
from armillary.planning.simulation.step_cost import StepCost

SETTINGS = Settings(max_model_len=512, vocab=100, max_running=4)


@pytest.mark.parametrize("waits", [True, False])
def test_a_request_takes_its_steps(waits: bool) -> None:
    system = System(settings=SETTINGS, num_blocks=100, streamed=True, overlap=waits)
    engine = make_engine(system, StepCost(base_s=0.01, prefill_s=1e-4, waits=waits))
    params = SamplingParams(max_tokens=12)
    engine.scheduler.submit(Request(id="1", prompt=[5] * 100, params=params), time.monotonic())
    begin, tokens = time.monotonic(), list[int]()
    while engine.busy:
        for delta in engine.step():
            tokens += delta.tokens
    assert tokens == [TOKEN] * 12
    assert time.monotonic() - begin >= 0.01 * 12 + 0.01  # never sooner; a busy machine may be late
