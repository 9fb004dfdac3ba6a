"""Logs of DeepSpeed and Lightning, and CSV of nvidia-smi, as they are printed."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.readings.open_reading import open_reading
from tests.diagnosis.trained import NOWHERE

BEGIN = datetime(2026, 3, 1, 12, 0, 0)


def written(folder: Path, lines: list[str], name: str = "train.log") -> str:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def deepspeed_log(*, step_s: float = 2.0, skipped_every: int = 0, steps: int = 200) -> list[str]:
    lines = ["[2026-03-01 11:59:50,000] [INFO] [config.py:1000:print]   train_batch_size ............. 64"]
    for step in range(10, steps + 1, 10):
        at = f"{BEGIN + timedelta(seconds=step * step_s):%Y-%m-%d %H:%M:%S},{step % 1000:03d}"
        skipped = step // skipped_every if skipped_every else 0
        lines += [
            f"[{at}] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped={skipped}, lr=[3e-05], "
            "mom=[[0.9, 0.95]]",
            f"[{at}] [INFO] [timer.py:260:stop] epoch=0/micro_step={8 * step}/global_step={step}, "
            "RunningAvgSamplesPerSec=31.9, CurrSamplesPerSec=32.1, MemAllocated=10.2GB, MaxMemAllocated=31.6GB",
        ]
    return lines


def test_deepspeed_says_steps_memory_and_settings(tmp_path: Path) -> None:
    reading = open_reading(written(tmp_path, deepspeed_log()), NOWHERE)
    assert reading.by == "deepspeed" and reading.settings["batch"] == "64"
    assert reading.get("step_s") == pytest.approx(2.0, rel=0.01)
    assert reading.get("memory_peak_bytes") == pytest.approx(31.6 * 2**30) and reading.get("lr") == 3e-5


def test_updates_that_deepspeed_skips_are_named(tmp_path: Path) -> None:
    verdict = diagnose(open_reading(written(tmp_path, deepspeed_log(skipped_every=8)), NOWHERE), NOWHERE)
    assert verdict.cause == "skipped_steps"


def lightning_log(*, step_s: float = 0.5, batches: int = 1000, validate_s: int = 0) -> list[str]:
    lines = ["GLOBAL_RANK: 0, MEMBER: 1/4"]
    for batch in range(0, batches + 1, 10):
        now = int(batch * step_s) + (validate_s if batch > batches // 2 else 0)
        if validate_s and batch == batches // 2 + 10:
            lines.append(f"Validation DataLoader 0: 100%|██████████| 50/50 [00:{validate_s:02d}<00:00,  2.00it/s]")
        clock = f"{now // 60:02d}:{now % 60:02d}"
        lines.append(
            f"Epoch 0:  {batch * 100 // batches}%|█▏    | {batch}/{batches} [{clock}<07:53,  2.00it/s, v_num=3, "
            f"train_loss={4 - batch / 1000:.3f}]"
        )
    return lines


def test_lightnings_bar_is_timed_over_many_lines(tmp_path: Path) -> None:
    reading = open_reading(written(tmp_path, lightning_log()), NOWHERE)
    assert reading.by == "lightning" and reading.settings["world_size"] == "4"
    assert reading.get("step_s") == pytest.approx(0.5, rel=0.05) and len(reading.steps) > 30
    assert reading.steps[-1]["loss"] == pytest.approx(3.0, abs=0.05)


def test_a_validation_within_the_epoch_is_no_slow_step(tmp_path: Path) -> None:
    reading = open_reading(written(tmp_path, lightning_log(validate_s=25)), NOWHERE)
    assert max(reading.series("step_s")) < 0.7 and reading.series("validation_s") == [25.0]


def smi(*, clock: int, hot: bool = False, power: float = 500.0, busy: int = 99) -> list[str]:
    head = (
        "timestamp, index, clocks.current.sm [MHz], clocks.max.sm [MHz], power.draw [W], power.limit [W], "
        "temperature.gpu, utilization.gpu [%], clocks_throttle_reasons.hw_thermal_slowdown"
    )
    lines = [head]
    for second in range(30):
        for index in range(2):
            mhz = clock if index == 1 else 1900
            lines.append(
                f"2026/03/01 12:00:{second:02d}.000, {index}, {mhz} MHz, 1980 MHz, {power if index else 500:.2f} W, "
                f"700.00 W, {88 if hot and index else 60}, {busy} %, {'Active' if hot and index else 'Not Active'}"
            )
    return lines


def test_a_hot_device_is_told_by_its_clock(tmp_path: Path) -> None:
    verdict = diagnose(open_reading(written(tmp_path, smi(clock=1300, hot=True), "smi.csv"), NOWHERE), NOWHERE)
    assert (verdict.loop, verdict.cause) == ("inner", "throttling") and "device 1 works at 66%" in verdict.headline
    assert verdict.levers[0].at_most == pytest.approx(1980 / 1300)


def test_a_capped_device_is_told_apart_from_a_hot_one(tmp_path: Path) -> None:
    verdict = diagnose(open_reading(written(tmp_path, smi(clock=1400, power=699), "smi.csv"), NOWHERE), NOWHERE)
    assert verdict.cause == "throttling" and "power limit" in verdict.headline


def test_devices_that_work_at_their_clock_are_healthy_and_idle_ones_are_not(tmp_path: Path) -> None:
    verdict = diagnose(open_reading(written(tmp_path, smi(clock=1900), "smi.csv"), NOWHERE), NOWHERE)
    assert verdict.is_healthy
    idle = diagnose(open_reading(written(tmp_path, smi(clock=1900, busy=60), "idle.csv"), NOWHERE), NOWHERE)
    assert idle.cause == "idle_device" and idle.findings[0].share == pytest.approx(0.4)
