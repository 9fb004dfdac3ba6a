"""Hugging Face Trainer's output as a Reading: its dict lines, its progress bar, or trainer_state.json.

Dicts say what was learnt and, at the end, how long it took; the bar says when each step was done. transformers 5 writes
the numbers of the dicts as texts.
"""

import ast
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


def is_trainer_state(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("log_history"), list) and "global_step" in value


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
            told = _dict(text)
            values |= _whole(told)
            records.tell(step, told)
    return _reading(records, values, source, {"max_steps": str(total)} if total else {})


def read_trainer_state(state: Mapping[str, Any], source: str) -> Reading:
    """From the file beside a checkpoint."""
    records, values = _Steps(), dict[str, float]()
    for told in state["log_history"]:
        if isinstance(told, dict):
            values |= _whole(told)
            records.tell(int(told.get("step", 0)), told)
    return _reading(records, values, source, {name: str(state[name]) for name in _STATE if state.get(name)})


class _Steps:
    """Records by step, and the bar's marks."""

    def __init__(self) -> None:
        self.found: dict[int, Record] = {}
        self.last = (0, 0.0)
        self.unnumbered = 0

    def mark(self, step: int, elapsed: float, rate_s: float) -> None:
        before, then = self.last
        if step <= before:
            return
        seconds = (elapsed - then) / (step - before)
        exact = elapsed - then >= _COARSE_S
        self._at(step)["step_s"] = seconds if exact else rate_s
        self.last = (step, elapsed)

    def tell(self, step: int, told: Mapping[str, Any]) -> None:
        """Without a bar or a step, dicts are counted."""
        kept = {ours: value for theirs, ours in _NAMES.items() if (value := number(str(told.get(theirs)))) is not None}
        if not kept:
            return
        if step == 0:
            self.unnumbered += 1
            step = self.unnumbered
        self._at(step).update(kept)

    def _at(self, step: int) -> Record:
        return self.found.setdefault(step, {"step": step})


def _reading(records: _Steps, values: dict[str, float], source: str, settings: dict[str, str]) -> Reading:
    ordered = [records.found[step] for step in sorted(records.found)]
    kept, skipped = without_warm_up(ordered)
    notes = [f"{skipped} steps of warm-up were left out"] if skipped else []
    if not any("step_s" in record for record in kept) and "step_s" not in values:
        notes.append("nothing says how long steps took: keep the progress bar, or the last dict with train_runtime")
    return Reading(
        source=source,
        kind="training",
        by="hf-trainer",
        steps=tuple(kept),
        values=values,
        settings=settings,
        notes=tuple(notes),
    )


def _whole(told: Mapping[str, Any]) -> dict[str, float]:
    """What the last dict says of all steps; step_s includes everything done between them."""
    values = {
        "run_s": number(str(told.get("train_runtime"))),
        "tokens_per_s": number(str(told.get("train_tokens_per_second"))),
    }
    rate = number(str(told.get("train_steps_per_second")))
    if rate:
        values["step_s"] = 1 / rate
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
