"""Logs of torchtitan, Megatron-LM and the Hugging Face Trainer as Readings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from armillary.diagnosis.readings.log_lines import clock, in_order, plain_lines
from armillary.diagnosis.readings.open_reading import is_log, read_log
from armillary.diagnosis.readings.reading import Reading
from armillary.errors import BadData, NotFound
from armillary.spec.gauges import GAUGES
from armillary.store.gauges import KEYS
from tests.diagnosis.logs import megatron_log, titan_log

DATA = Path(__file__).parents[1] / "data"


def read(tmp_path: Path, text: str) -> Reading:
    path = tmp_path / "train.log"
    path.write_text(text)
    assert is_log(path)
    reading = read_log(path)
    assert {name for step in reading.steps for name in step} | set(reading.values) <= {*GAUGES, *KEYS}
    return reading


def test_torchtitan(tmp_path: Path) -> None:
    reading = read(tmp_path, titan_log())
    assert (reading.kind, reading.by) == ("training", "torchtitan")
    last = reading.steps[-1]
    assert last["step"] == 300 and last["step_s"] == pytest.approx(1.12, rel=1e-3)
    assert last["tokens_per_s_per_device"] == 7314 and last["mfu"] == pytest.approx(0.4356)
    assert last["flops_per_s"] == pytest.approx(430.81e12) and last["memory_used_fraction"] == 0.72
    assert last["memory_reserved_bytes"] == pytest.approx(56.95 * 2**30)
    assert reading.settings["device"] == "NVIDIA H100 80GB HBM3" and reading.settings["sequence"] == "8192"
    assert reading.steps[0]["step"] == 10, "the first line, which compiled, is left out"


def test_colours_and_ranks_change_nothing(tmp_path: Path) -> None:
    plain = read(tmp_path, titan_log())
    assert read(tmp_path, titan_log(ranks=4, colours=True)).steps == plain.steps


def test_lines_of_an_older_torchtitan(tmp_path: Path) -> None:
    line = (
        "[rank0]:2024-08-13 10:00:{:02d},100 - root - INFO - step: {:2}  loss:  5.1234  memory: 26.10GiB(32.90%)  "
        "wps: 3,113  mfu: 15.10%"
    )
    reading = read(tmp_path, "\n".join(line.format(second, second) for second in range(1, 9)))
    assert [step["step_s"] for step in reading.steps] == pytest.approx([1.0] * 7)
    assert reading.steps[0]["mfu"] == pytest.approx(0.151) and reading.steps[0]["tokens_per_s_per_device"] == 3113


def test_checkpoints_of_torchtitan_belong_to_the_next_line(tmp_path: Path) -> None:
    reading = read(tmp_path, titan_log(save=50, save_s=20.0))
    saved = {step["step"]: step["checkpoint_stall_s"] for step in reading.steps if "checkpoint_stall_s" in step}
    assert saved == {60: 20.0, 110: 20.0, 160: 20.0, 210: 20.0, 260: 20.0}


@pytest.mark.parametrize("old_timers", [False, True])
def test_megatron(tmp_path: Path, old_timers: bool) -> None:
    reading = read(tmp_path, megatron_log(old_timers=old_timers))
    first, last = reading.steps[0], reading.steps[-1]
    assert reading.by == "megatron" and last["step"] == 300 and last["step_s"] == pytest.approx(1.2)
    assert last["tokens_per_s"] == pytest.approx(256 * 4096 / 1.2) and last["flops_per_s"] == pytest.approx(220.5e12)
    assert last["tokens_per_s_per_device"] == pytest.approx(256 * 4096 / 1.2 / 64) and last["loss"] == 7.399415
    assert first["data_wait_s"] == pytest.approx(0.002) and first["optimizer_s"] == pytest.approx(0.05)
    assert first["comm_exposed_s"] == pytest.approx(0.03) and first["memory_peak_bytes"] == 30_000 * 2**20
    assert reading.settings["pipeline_model_parallel_size"] == "4"


def test_gpt_neox(tmp_path: Path) -> None:
    """Its lines as in a bug report, with DeepSpeed's between them."""
    lines = []
    for step in range(34, 60):
        lines += [
            f"[2023-07-25 21:{step}:17,269] [INFO] [timer.py:215:stop] epoch=0/micro_step={step}/global_step={step}, "
            "RunningAvgSamplesPerSec=7.864, CurrSamplesPerSec=8.009, MemAllocated=59.65GB, MaxMemAllocated=63.31GB",
            f" samples/sec: 7.799 | iteration {step:8d}/   10000 | elapsed time per iteration (ms): 4103.1 | learning "
            "rate: 2.111E-06 | approx flops per GPU: 112.9TFLOPS | lm_loss: 1.118665E+01 | number of skipped "
            "iterations:   0 | number of nan iterations:   0 |",
            "time (ms) | forward: 659.86 | backward: 2164.69 | optimizer: 1172.51 | batch generator: 0.83",
        ]
    last = read(tmp_path, "\n".join(lines)).steps[-1]
    assert (last["step"], last["step_s"], last["loss"]) == (59, pytest.approx(4.1031), 11.18665)
    assert (last["flops_per_s"], last["optimizer_s"]) == (pytest.approx(112.9e12), pytest.approx(1.17251))


def test_megatron_says_by_its_clock_how_long_saving_took(tmp_path: Path) -> None:
    reading = read(tmp_path, megatron_log(save=100, save_s=30.0, validate=50, validate_s=12.0))
    saved = [step["checkpoint_stall_s"] for step in reading.steps if "checkpoint_stall_s" in step]
    validated = [step["validation_s"] for step in reading.steps if "validation_s" in step]
    assert saved == pytest.approx([42.0, 42.0], abs=0.2), "with the validation of the same step"
    assert validated == pytest.approx([12.0] * 3, abs=0.2)


def test_the_hugging_face_trainer_as_it_printed(tmp_path: Path) -> None:
    """Recorded from transformers 5.22, which writes numbers as texts."""
    reading = read(tmp_path, (DATA / "hf_trainer_eval_often.log").read_text())
    assert reading.by == "hf-trainer" and reading.settings["max_steps"] == "120"
    assert reading.values["run_s"] == 15.69 and reading.values["step_s"] == pytest.approx(1 / 7.647)
    validated = [step for step in reading.steps if "validation_s" in step]
    assert [step["step"] for step in validated] == list(range(10, 121, 10))
    assert all(step["val_loss"] > 6 and step["validation_s"] > 0.1 for step in validated)
    assert sum("step_s" in step for step in reading.steps) > 20


def test_numbers_as_numbers_and_bars_in_hours(tmp_path: Path) -> None:
    """As transformers 4 writes them."""
    lines = ["  0%|          | 0/690 [00:00<?, ?it/s]"]
    for step in range(10, 691, 10):
        seconds = step * 12
        elapsed = (
            f"{seconds // 3600}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"
            if seconds >= 3600
            else f"{seconds // 60:02d}:{seconds % 60:02d}"
        )
        lines.append(f" {step // 7}%|████      | {step}/690 [{elapsed}<1:02:03, 11.90s/it]")
        lines.append(f"{{'loss': {9 - step / 100:.4f}, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.1}}")
    reading = read(tmp_path, "\r".join(lines))
    assert [step["step_s"] for step in reading.steps] == [12.0] * 69, "by the clock, which is the mean of all steps"
    assert reading.steps[-1]["loss"] == pytest.approx(2.1) and reading.steps[-1]["lr"] == 5e-05


def test_trainer_state(tmp_path: Path) -> None:
    state = json.loads((DATA / "hf_trainer_state.json").read_text())
    reading = read(tmp_path, json.dumps(state))
    assert reading.settings["eval_steps"] == "10" and reading.steps[0]["step"] == 5
    assert any("nothing says how long steps took" in note for note in reading.notes)
    state["log_history"].append({"step": 120, "train_runtime": 15.7, "train_steps_per_second": 7.6})
    assert read(tmp_path, json.dumps(state)).values == {"run_s": 15.7, "step_s": 1 / 7.6}


def test_a_run_that_was_started_again_goes_on_from_there(tmp_path: Path) -> None:
    steps = [*range(1, 9), *range(5, 12)]
    assert [one["step"] for one in in_order({"step": step} for step in steps)] == list(range(1, 12))
    assert in_order([{"step": 1, "loss": 1.0}, {"step": 1, "loss": 2.0}]) == [{"step": 1, "loss": 1.0}]


def test_lines_and_clocks() -> None:
    assert plain_lines("\x1b[31ma\x1b[0m\rb\nc") == ["a", "b", "c"]
    first, second = clock("[2026-03-01 12:00:00,250] x"), clock("2026-03-01T12:00:01.500 y")
    assert first is not None and second is not None and second - first == 1.25
    assert clock("no time") is None and clock("2026-99-01 12:00:00") is None


def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("epoch 1 done\nstep: many  loss: few\n")
    assert not is_log(path)
    with pytest.raises(BadData, match="holds no line that is known here; give output of torchtitan"):
        read_log(path)
    with pytest.raises(NotFound, match="no file"):
        read_log(tmp_path / "none")
