"""The progress bar of PyTorch Lightning as a Reading.

'Epoch 0:  12%|█▏        | 120/1000 [01:04<07:53,  1.86it/s, v_num=3, train_loss=2.310]' for every few batches: the
elapsed time is counted from the start of the epoch, in whole seconds, so that steps are timed over many lines.
"""

import re
from collections.abc import Sequence

from armillary.diagnosis.readings.log_lines import number, without_warm_up
from armillary.diagnosis.readings.reading import Reading
from armillary.store.gauges import Record

_BAR = re.compile(
    r"\bEpoch (\d+):\s+\d+%\|.*?\|\s*(\d+)/(\d+) \[((?:\d+:)?\d+:\d\d)<[^,]*,\s*([\d.]+)(it/s|s/it)(.*)\]"
)
_LOSS = re.compile(r"\b(?:train_)?loss(?:_step)?=([\d.eE+-]+)")
_VALIDATION = re.compile(r"\bValidation DataLoader \d+:\s+100%\|.*?\[((?:\d+:)?\d+:\d\d)<")
_DEVICES = re.compile(r"distributed process.*?(\d+) processes|GLOBAL_RANK: \d+, MEMBER: \d+/(\d+)")
MIN_SECONDS = 10
"""whole seconds between two lines from which their step time is good to a tenth"""


def is_lightning(lines: Sequence[str]) -> bool:
    return any(_BAR.search(line) for line in lines)


def read_lightning(lines: Sequence[str], source: str) -> Reading:
    steps, notes = without_warm_up(_records(lines))
    ranks = next((match for line in lines if (match := _DEVICES.search(line))), None)
    settings = {"world_size": ranks[1] or ranks[2]} if ranks else {}
    return Reading(
        source=source, kind="training", by="lightning", steps=tuple(steps), settings=settings, notes=tuple(notes)
    )


def _records(lines: Sequence[str]) -> list[Record]:
    """A record wherever the clock has moved far enough since the last one, within one epoch."""
    records: list[Record] = []
    last: tuple[int, int, float] | None = None  # epoch, batch, seconds
    stall = 0.0
    for line in lines:
        if validated := _VALIDATION.search(line):
            stall = _seconds(validated[1])
        if (bar := _BAR.search(line)) is None:
            continue
        epoch, batch, total, now = int(bar[1]), int(bar[2]), int(bar[3]), _seconds(bar[4])
        if last is None or last[0] != epoch or batch < last[1]:
            last = (epoch, batch, now)
        if now - last[2] < MIN_SECONDS or batch == last[1]:
            continue
        record: Record = {
            "step": epoch * total + batch,
            "step_s": max(0.0, now - last[2] - stall) / (batch - last[1]),
        }
        if (loss := _LOSS.search(bar[7])) and (value := number(loss[1])) is not None:
            record["loss"] = value
        if stall:
            record["validation_s"] = stall
        records.append(record)
        last, stall = (epoch, batch, now), 0.0
    return records


def _seconds(text: str) -> float:
    """'01:04' and '1:01:04'."""
    seconds = 0
    for part in text.split(":"):
        seconds = 60 * seconds + int(part)
    return float(seconds)
