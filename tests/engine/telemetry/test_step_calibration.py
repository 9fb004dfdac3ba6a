"""Steps that are run before the first request: what they cover, that they end, and that nobody notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from armillary.engine import build as make
from armillary.engine.build import make_engine
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.scheduler.step_loop import StepTooLarge
from armillary.engine.telemetry import step_calibration
from armillary.engine.telemetry.step_calibration import calibrate_steps, step_shapes
from armillary.model.transformer import build
from armillary.spec.gauges import GAUGES
from armillary.spec.tables.serve import Serve
from tests.engine.fake import make_scheduler
from tests.model.layers.test_attention_forms import small

SERVE = Serve(max_running=8, block_tokens=4, kv_bytes=400_000, max_tokens_per_step=128, max_model_len=128)


def _engine(record: Any = None, device: str = "cpu") -> Any:
    model = build(small(vocab=64, context=256), dtype=torch.float32, device=device, seed=1)
    return make_engine(model, None, SERVE, record=record, seed=3, eos_ids=(7,))[0]


def test_kinds_of_steps_that_a_run_may_never_show_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make._CALIBRATION_S, "cpu", 60.0)
    records: list[dict[str, float]] = []
    _engine(lambda gauges, **of: records.append(gauges))
    assert all(one["calibration_step_s"] > 0 for one in records) and set().union(*records) <= set(GAUGES)
    behind = [one for one in records if one["prefill_past"]]
    assert any(one["prefill_tokens"] == 16 and not one["decode_tokens"] for one in behind)
    assert any(one["decode_tokens"] for one in behind)
    assert any(one["prefill_rows"] == 8 for one in records) and any(one["decode_tokens"] == 8 for one in records)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running": 1},
        {"max_running": 64, "max_tokens_per_step": 512},
        {"max_running": 16, "max_model_len": 20},
        {"max_running": 40, "max_tokens_per_step": 48},
    ],
)
def test_kinds_are_steps_that_the_engine_takes(settings: dict[str, int]) -> None:
    scheduler = make_scheduler(num_blocks=300, **settings)
    kinds, limits = list(step_shapes(scheduler.cache, scheduler.settings)), scheduler.settings
    assert kinds
    for kind in kinds:
        assert kind.prompts + kind.decodes <= limits.max_running and kind.tokens <= limits.max_tokens_per_step
        assert max(kind.past + kind.size, kind.context) <= limits.max_model_len


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_requests_are_answered_as_if_there_had_been_none(device: str) -> None:
    asked = [
        Request(
            id=str(i),
            prompt=[(5 * i + j) % 64 for j in range(20 + i)],
            params=SamplingParams(max_tokens=12, temperature=0.8 * (i % 2)),
        )
        for i in range(12)
    ]
    records: list[dict[str, float]] = []
    calibrated, uncalibrated = _engine(lambda gauges, **of: records.append(gauges), device), _engine(None, device)
    assert records
    answers = [[one.tokens for one in engine.generate(asked)] for engine in (calibrated, uncalibrated)]
    assert answers[0] == answers[1]
    assert max(one.get("requests_total", 0) for one in records) <= len(asked)


def test_a_step_for_which_there_is_no_memory_ends_it_and_not_the_start() -> None:
    scheduler = make_scheduler(num_blocks=300, max_running=8)

    class Full:
        def launch(self, decision: Any) -> None:
            if decision.num_tokens > 8:
                raise StepTooLarge("no room")

        def tokens(self, launched: None) -> list[int]:
            return []

    found = calibrate_steps(Full(), scheduler.cache, scheduler.settings, 60.0)
    assert found and all(one["prefill_tokens"] + one["decode_tokens"] <= 8 for one in found)


def test_it_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, now, launched = make_scheduler(num_blocks=300, max_running=8), [0.0], []

    class Slow:
        def launch(self, decision: Any) -> None:
            launched.append(decision.num_tokens)
            now[0] += 0.1

        def tokens(self, launched: None) -> list[int]:
            return []

    monkeypatch.setattr(step_calibration.time, "perf_counter", lambda: now[0])
    found = calibrate_steps(Slow(), scheduler.cache, scheduler.settings, 0.5)
    assert len(found) == 2 and len(launched) == 6 and launched == sorted(launched)
    assert all(one["calibration_step_s"] == pytest.approx(0.1) for one in found)
