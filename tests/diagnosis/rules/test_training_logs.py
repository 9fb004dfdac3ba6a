"""What other people's logs alone tell: saving, validating, slowing down, full memory, low MFU, idle stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.readings.open_reading import read_log
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.training_logs import RULES
from armillary.store.home import Home
from tests.diagnosis.logs import megatron_log, titan_log

DATA = Path(__file__).parents[1] / "data"
Cli = Callable[..., Any]


@pytest.fixture
def judged(tmp_path: Path, home: Home) -> Callable[[str], Diagnosis]:
    def judge(text: str) -> Diagnosis:
        path = tmp_path / "train.log"
        path.write_text(text)
        return diagnose(read_log(path), home)

    return judge


Judge = Callable[[str], Diagnosis]


@pytest.mark.parametrize(
    "log",
    [
        titan_log(),
        titan_log(save=100, save_s=2.0, colours=True),
        megatron_log(),
        megatron_log(save=150, save_s=5.0, validate=100, validate_s=2.0),
    ],
)
def test_healthy_runs_are_left_alone(judged: Judge, log: str) -> None:
    found = judged(log)
    assert found.is_healthy, found.headline


@pytest.mark.parametrize(("save", "save_s"), [(50, 20.0), (100, 20.0), (50, 5.0)])
def test_saving_too_often(judged: Judge, save: int, save_s: float) -> None:
    found = judged(titan_log(steps=600, save=save, save_s=save_s))
    assert (found.loop, found.cause) == ("training", "checkpoint_stall")
    assert found.findings[0].share == pytest.approx(save_s / (save_s + save * 1.12), rel=0.15)
    flags = [lever.action.split("=")[0] for lever in found.levers]
    assert flags == ["--checkpoint.async_mode", "--checkpoint.interval"]
    assert found.levers[0].speedup == pytest.approx(1 / (1 - found.findings[0].share))


def test_a_rhythm_whose_reason_the_log_does_not_say(judged: Judge) -> None:
    found = judged(titan_log(steps=600, step_s=lambda step: 1.12 + (25.0 if step % 50 == 0 else 0.0)))
    assert found.cause == "checkpoint_stall" and "every 50 steps 25 s are lost" in found.headline
    once = judged(titan_log(steps=600, step_s=lambda step: 1.12 + (25.0 if step in (150, 260) else 0.0)))
    assert once.is_healthy, "two hiccups are no rhythm"


def test_saving_and_validating_of_megatron(judged: Judge) -> None:
    found = judged(megatron_log(save=50, save_s=30.0))
    assert (found.cause, found.levers[0].action) == ("checkpoint_stall", "--async-save")
    found = judged(megatron_log(validate=50, validate_s=15.0))
    assert found.cause == "validation_stall" and found.levers[0].action.startswith("--eval-interval ")


def test_the_trainer_that_validates_every_ten_steps(cli: Cli) -> None:
    ran = cli("diagnose", str(DATA / "hf_trainer_eval_often.log"), "--json")
    found = ran.json
    assert (ran.code, found["loop"], found["cause"]) == (0, "training", "validation_stall")
    assert found["levers"][0]["action"].startswith("eval_steps=") and found["levers"][0]["speedup"] > 1.5


@pytest.mark.parametrize("drift", [0.25, 0.5, 1.0])
def test_a_run_that_becomes_slower(judged: Judge, drift: float) -> None:
    found = judged(titan_log(step_s=lambda step: 1.12 * (1 + drift * step / 300)))
    assert (found.loop, found.cause) == ("training", "straggler")
    assert "as long as at the beginning" in found.headline
    quicker = judged(titan_log(step_s=lambda step: 1.12 * (1 - drift / 2 * step / 300)))
    assert quicker.is_healthy


def test_a_full_device_is_said_though_nothing_is_won(judged: Judge) -> None:
    found = judged(titan_log(memory=98.2))
    assert found.is_healthy and any("98% of the device's memory is taken" in one.says for one in found.findings)
    stalled = judged(
        titan_log(
            memory=99.0,
            step_s=lambda step: 1.12 + (step * 7919 % 300) / 300,
            more=("41 CUDA memory allocation retries.",),
        )
    )
    assert stalled.cause == "memory_pressure" and "try again 41 times" in stalled.headline


def test_mfu_far_below_the_chip(judged: Judge) -> None:
    found = judged(titan_log(step_s=lambda step: 3.5))
    assert (found.loop, found.cause) == ("inner", "compute") and "14% MFU" in found.headline
    assert "torch.profiler" in found.levers[0].action
    assert found.levers[0].speedup == pytest.approx(0.32 / 0.1394, rel=0.02)


def test_everything_recomputed_with_room_to_spare(judged: Judge) -> None:
    found = judged(titan_log(recompute="full", memory=37.0))
    assert found.cause == "needless_recompute"
    assert found.levers[0].action == "--activation_checkpoint.mode=selective"
    assert judged(titan_log(recompute="full", memory=80.0)).is_healthy


@pytest.mark.parametrize(("batch", "share"), [(16, 3 / 7), (32, 3 / 11), (64, 3 / 19)])
def test_few_micro_batches_for_a_pipeline(judged: Judge, batch: int, share: float) -> None:
    found = judged(megatron_log(global_batch_size=batch))
    assert (found.loop, found.cause) == ("training", "bubble")
    assert found.findings[0].share == pytest.approx(share)
    assert {lever.action for lever in found.levers} == {
        "--num-layers-per-virtual-pipeline-stage 6",
        f"--global-batch-size {2 * batch}",
    }
    count = batch / 4
    assert found.levers[0].speedup == pytest.approx((count + 3) / (count + 1.5))


def test_virtual_stages_are_counted(judged: Judge) -> None:
    found = judged(megatron_log(global_batch_size=64, num_layers_per_virtual_pipeline_stage=2))
    assert found.is_healthy, "six virtual stages: idle 3 / (6 · 16 + 3)"


def test_they_say_nothing_of_our_own_runs() -> None:
    steps = tuple({"step": step, "step_s": 1.0 + step, "memory_used_fraction": 0.99} for step in range(400))
    ours = Reading(source="x", kind="training", steps=steps)
    assert all(rule(ours, None) is None for rule in RULES)
