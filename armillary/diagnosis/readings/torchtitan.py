"""torchtitan's log as a Reading: the metrics line of every few steps, and what it said of its settings before.

The line is 'step: 10  loss: 5.1  grad_norm: 2.3  memory: 26.1GiB(32.9%)  tps: 3,113  tflops: 149.2  mfu: 15.1%'; tps
(wps before 2025) is tokens a second of one device, memory what the allocator has reserved at most.
"""

import re
from collections.abc import Sequence

from armillary.diagnosis.readings.log_lines import (
    clock,
    in_order,
    number,
    read_fields,
    with_step_times,
    without_warm_up,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.store.gauges import Record

_STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:\s*(\S+)(.*)")
_FIELDS = {
    "grad_norm": (re.compile(r"grad_norm:\s*([\d.eE+-]+)"), 1.0),
    "tokens_per_s_per_device": (re.compile(r"\b[tw]ps:\s*([\d,.]+)"), 1.0),
    "flops_per_s": (re.compile(r"\btflops:\s*([\d,.]+)"), 1e12),
    "mfu": (re.compile(r"\bmfu:\s*([\d.]+)%"), 0.01),
}
_MEMORY = re.compile(r"memory:\s*([\d.]+)GiB\(([\d.]+)%\)")
_SAVED = re.compile(r"saving the checkpoint.*?in ([\d.]+) seconds", re.IGNORECASE)
_VALIDATED = re.compile(r"validate step:\s*(\d+)\s+loss:\s*([\d.]+)", re.IGNORECASE)
_SETTINGS = {
    "device": re.compile(r"CUDA capacity: (.+?) with [\d.]+GiB memory"),
    "device_gib": re.compile(r"CUDA capacity: .+? with ([\d.]+)GiB memory"),
    "peak_flops": re.compile(r"Peak FLOPS used for computing MFU: ([\d.e+]+)"),
    "parameters": re.compile(r"size: ([\d,]+) total parameters"),
    "recompute": re.compile(r"Applied (\w+?)(?:AC)? activation checkpointing"),
    "compile": re.compile(r"Compiling each (\w+) with torch.compile"),
    "mesh": re.compile(r"mesh with parallelism: (.+)"),
    "mesh_sizes": re.compile(r"device mesh with \[.*?\], \[([\d, ]+)\]"),
    "local_batch": re.compile(r"local batch size (\d+)"),
    "global_batch": re.compile(r"global batch size (\d+)"),
    "sequence": re.compile(r"sequence length (\d+)"),
    "retries": re.compile(r"(\d+) CUDA memory allocation retries"),
}


def is_torchtitan(lines: Sequence[str]) -> bool:
    return any((match := _STEP.search(line)) and ("ps:" in match[3] or "[titan]" in line) for line in lines)


def read_torchtitan(lines: Sequence[str], source: str) -> Reading:
    records = in_order(record for line in lines if (record := _record(line)) is not None)
    steps, notes = without_warm_up(with_step_times(records))
    return Reading(
        source=source,
        kind="training",
        by="torchtitan",
        steps=tuple(_with_events(lines, steps)),
        settings={
            name: match[1].strip()
            for line in lines
            if not _STEP.search(line)
            for name, pattern in _SETTINGS.items()
            if (match := pattern.search(line))
        },
        notes=tuple(notes),
    )


def _record(line: str) -> Record | None:
    matched = None if "validate" in line else _STEP.search(line)
    loss = number(matched[2]) if matched else None
    if matched is None or loss is None:
        return None
    record: Record = {"step": int(matched[1]), "loss": loss}
    if (when := clock(line)) is not None:
        record["time"] = when
    record |= read_fields(matched[3], _FIELDS)
    if memory := _MEMORY.search(matched[3]):
        record |= {"memory_reserved_bytes": float(memory[1]) * 2**30, "memory_used_fraction": float(memory[2]) / 100}
    return record


def _with_events(lines: Sequence[str], records: Sequence[Record]) -> list[Record]:
    """What was saved or validated between two lines belongs to the step whose line comes next."""
    pending: Record = {}
    by_step = {record["step"]: dict(record) for record in records}
    for line in lines:
        if saved := _SAVED.search(line):
            pending["checkpoint_stall_s"] = float(saved[1])
        if validated := _VALIDATED.search(line):
            pending["val_loss"] = float(validated[2])
        record = _record(line)
        if record is not None and pending and record["step"] in by_step:
            by_step[record["step"]] |= pending
            pending = {}
    return list(by_step.values())
