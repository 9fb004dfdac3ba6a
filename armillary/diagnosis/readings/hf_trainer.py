"""Hugging Face Trainer's output as a Reading: its dict lines, its progress bar, or trainer_state.json.

Dicts say what was learnt and, at the end, how long it took; the bar says when each step was done. transformers 5 writes
the numbers of the dicts as texts.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from armillary.diagnosis.readings.log_lines import number, without_warm_up
from armillary.diagnosis.readings.reading import Reading
from armillary.store.gauges import Record

_DICT = re.compile(r"\{'(?:loss|eval_\w+|train_\w+|grad_norm|learning_rate)':.*?\}")
_BAR = re.compile(r"(\d+)/(\d+) \[((?:\d+:)?\d+:\d\d)<(?:(?:\d+ days?, )?(?:\d+:)?\d+:\d\d|\?),\s*([\d.]+)(s/it|it/s)")
_NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "eval_loss": "val_loss",
    "eval_runtime": "validation_s",
    "num_input_tokens_seen": "tokens_total",
    "train_tokens_per_second": "tokens_per_s",
    "tokens_per_second": "tokens_per_s",
}
_COARSE_S = 8.0
"""the bar's clock has whole seconds: below this many between two marks its own rate is more exact"""
_STATE = (
    "max_steps",
    "save_steps",
    "eval_steps",
    "logging_steps",
    "train_batch_size",
    "num_train_epochs",
    "global_step",
)


def is_trainer(lines: Sequence[str]) -> bool:
    return any(_DICT.search(line) for line in lines)


def parse_trainer_state(text: str) -> dict[str, Any] | None:
    """The content of a trainer_state.json; None where the text is none."""
    if not text.lstrip().startswith("{") or '"log_history"' not in text:
        return None
    try:
        state = json.loads(text)
    except ValueError:
        return None
    return state if isinstance(state.get("log_history"), list) and "global_step" in state else None


def read_trainer(lines: Sequence[str], source: str) -> Reading:
    """From what was printed."""
    total = _length(lines)
    records, step, values = _Steps(), 0, dict[str, float]()
    for line in lines:
        for done, of, elapsed, rate, unit in _BAR.findall(line):
            if int(of) == total and int(done) > 0:
                step = int(done)
                records.mark(step, _seconds(elapsed), float(rate) if unit == "s/it" else 1 / max(1e-9, float(rate)))
        for text in _DICT.findall(line):
            entry = _dict(text)
            values |= _whole(entry)
            records.add(step, entry)
    return _reading(records, values, source, {"max_steps": str(total)} if total else {})


def read_trainer_state(state: Mapping[str, Any], source: str) -> Reading:
    """From the file beside a checkpoint."""
    records, values = _Steps(), dict[str, float]()
    for entry in state["log_history"]:
        if isinstance(entry, dict):
            values |= _whole(entry)
            records.add(int(entry.get("step", 0)), entry)
    return _reading(records, values, source, {name: str(state[name]) for name in _STATE if state.get(name)})


class _Steps:
    """Records by step, and the bar's marks."""

    def __init__(self) -> None:
        self.by_step: dict[int, Record] = {}
        self.last = (0, 0.0)
        self.unnumbered = 0

    def mark(self, step: int, elapsed: float, rate_s: float) -> None:
        before, then = self.last
        if step <= before:
            return
        exact = elapsed - then >= _COARSE_S
        self._at(step)["step_s"] = (elapsed - then) / (step - before) if exact else rate_s
        self.last = (step, elapsed)

    def add(self, step: int, entry: Mapping[str, Any]) -> None:
        """Without a bar or a step, dicts are counted."""
        gauges = {
            ours: value for theirs, ours in _NAMES.items() if (value := number(str(entry.get(theirs)))) is not None
        }
        if gauges:
            self.unnumbered += step == 0
            self._at(step or self.unnumbered).update(gauges)

    def _at(self, step: int) -> Record:
        return self.by_step.setdefault(step, {"step": step})


def _reading(records: _Steps, values: dict[str, float], source: str, settings: dict[str, str]) -> Reading:
    steps, notes = without_warm_up([records.by_step[step] for step in sorted(records.by_step)], "steps")
    if not any("step_s" in record for record in steps) and "step_s" not in values:
        notes.append("nothing says how long steps took: keep the progress bar, or the last dict with train_runtime")
    return Reading(
        source=source,
        kind="training",
        by="hf-trainer",
        steps=tuple(steps),
        values=values,
        settings=settings,
        notes=tuple(notes),
    )


def _whole(entry: Mapping[str, Any]) -> dict[str, float]:
    """What the last dict says of all steps; step_s includes everything done between them."""
    names = ("train_runtime", "train_tokens_per_second", "train_steps_per_second")
    run_s, tokens, steps = (number(str(entry.get(name))) for name in names)
    values = {"run_s": run_s, "tokens_per_s": tokens, "step_s": 1 / steps if steps else None}
    return {name: value for name, value in values.items() if value}


def _length(lines: Sequence[str]) -> int:
    """Steps of the training bar: the one that ran longest; validation has its own."""
    longest: dict[int, float] = {}
    for line in lines:
        for _, of, elapsed, _, _ in _BAR.findall(line):
            longest[int(of)] = max(longest.get(int(of), 0.0), _seconds(elapsed))
    return max(longest, key=lambda of: longest[of], default=0)


def _seconds(text: str) -> float:
    total = 0
    for part in text.split(":"):
        total = 60 * total + int(part)
    return float(total)


def _dict(text: str) -> dict[str, Any]:
    try:
        value = ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", text))
    except (ValueError, SyntaxError):
        return {}
    return value if isinstance(value, dict) else {}
