"""What a run writes down: at once on a CPU, with a GPU while the device works on the next step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from armillary.errors import ArmillaryError
from armillary.spec.tables.train import TrainJob
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.training.gauge_log import Recorder
from armillary.training.telemetry.step_telemetry import StepReport


def recorder(run: Run, device: str, seen: list[int]) -> Recorder:
    trainer: Any = SimpleNamespace(
        world=SimpleNamespace(is_main=True),
        device=torch.device(device),
        job=TrainJob(),
        plan=SimpleNamespace(recipe={}),
        text=SimpleNamespace(notes=()),
    )
    return Recorder(run, trainer, watch=lambda report: seen.append(report.step), say=print, start=0)


def report(step: int) -> StepReport:
    return StepReport(step=step, gauges={"loss": 1.0 + step})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(Home.at(tmp_path), {}, steps=9)


def steps(run: Run) -> list[int]:
    return [record["step"] for record in read_gauges(run.gauges)]


def test_a_cpu_s_step_is_written_at_once(run: Run) -> None:
    with recorder(run, "cpu", seen := []) as record:
        record(report(0), last=False)
        assert steps(run) == seen == [0]


def test_a_gpu_s_step_is_written_during_the_next_or_at_the_end(run: Run) -> None:
    with recorder(run, "cuda", seen := []) as record:
        record(report(0), last=False)
        assert steps(run) == seen == []
        record.write()  # as the trainer calls it, with step 1 on its way
        assert steps(run) == seen == [0]
        record(report(1), last=False)
        record(report(2), last=True)
        assert steps(run) == seen == [0, 1, 2] and run.state.step == 3
        record(report(3), last=False)
    assert steps(run) == [0, 1, 2, 3]


def test_what_ends_a_run_is_not_hidden_by_a_disk_that_is_full(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise ArmillaryError("disk full")

    with pytest.raises(ValueError, match="the reason"), recorder(run, "cuda", []) as record:
        record(report(0), last=False)
        monkeypatch.setattr("armillary.store.gauges.GaugeWriter.write", full)
        raise ValueError("the reason")
    with pytest.raises(ArmillaryError, match="disk full"), recorder(run, "cuda", []) as record:
        record(report(0), last=False)
