"""DeepSpeed's log as a Reading: its throughput line, and its step line with skipped steps.

'… [timer.py:260:stop] epoch=0/micro_step=80/global_step=10, RunningAvgSamplesPerSec=41.2, CurrSamplesPerSec=41.5,
MemAllocated=10.2GB, MaxMemAllocated=31.6GB' and '… [Rank 0] step=10, skipped=1, lr=[3e-05], mom=[[0.9, 0.95]]', both
every steps_per_print steps.
"""

import re
from collections.abc import Sequence

from armillary.diagnosis.readings.log_lines import clock, in_order, read_fields, with_step_times, without_warm_up
from armillary.diagnosis.readings.reading import Reading
from armillary.store.gauges import Record

_SPEED = re.compile(r"micro_step=\d+/global_step=(\d+), (.*SamplesPerSec.*)")
_STEP = re.compile(r"\[Rank 0\] step=(\d+), (skipped=.*)")
_FIELDS = {
    "memory_bytes": (re.compile(r"\bMemAllocated=([\d.]+)GB"), 2.0**30),
    "memory_peak_bytes": (re.compile(r"MaxMemAllocated=([\d.]+)GB"), 2.0**30),
    "skipped_steps_total": (re.compile(r"\bskipped=(\d+)"), 1.0),
    "lr": (re.compile(r"\blr=\[([\d.eE+-]+)"), 1.0),
}
_SETTINGS = {
    "world_size": re.compile(r"\bworld_size\s*[.=:]+\s*(\d+)"),
    "zero": re.compile(r"\bzero_optimization_stage\s*[.=:]+\s*(\d)"),
    "batch": re.compile(r"\btrain_batch_size\s*[.=:]+\s*(\d+)"),
    "micro_batch": re.compile(r"\btrain_micro_batch_size_per_gpu\s*[.=:]+\s*(\d+)"),
    "accumulation": re.compile(r"\bgradient_accumulation_steps\s*[.=:]+\s*(\d+)"),
}


def is_deepspeed(lines: Sequence[str]) -> bool:
    return any(_SPEED.search(line) or _STEP.search(line) for line in lines)


def read_deepspeed(lines: Sequence[str], source: str) -> Reading:
    """Step times from the clock; the samples per second of a line are of its last step alone."""
    merged: dict[int, Record] = {}
    for line in lines:
        if (match := _SPEED.search(line) or _STEP.search(line)) is None:
            continue
        record: Record = {"step": int(match[1])} | read_fields(match[2], _FIELDS)
        if (when := clock(line)) is not None:
            record["time"] = when
        merged[record["step"]] = merged.get(record["step"], {}) | record
    steps, notes = without_warm_up(with_step_times(in_order(merged.values())))
    settings = {
        name: match[1] for line in lines for name, pattern in _SETTINGS.items() if (match := pattern.search(line))
    }
    return Reading(
        source=source, kind="training", by="deepspeed", steps=tuple(steps), settings=settings, notes=tuple(notes)
    )
