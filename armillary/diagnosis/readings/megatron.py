"""Megatron-LM's log, or a fork's (GPT-NeoX, Megatron-LLM), as a Reading: the line of every few iterations, its timers,
its memory report and its arguments.

'iteration 10/ 500 | consumed samples: … | elapsed time per iteration (ms): 1234.5 | …' leaves out the time of
checkpoints and validations, so what the clock shows beyond it is theirs.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from armillary.diagnosis.readings.log_lines import clock, in_order, number, read_fields, without_warm_up
from armillary.diagnosis.readings.reading import Reading
from armillary.store.gauges import Record

_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+|infinity)\s*\|(.*)")
_FIELDS = {
    "step_s": (re.compile(r"elapsed time per iteration \(ms\):\s*([\d.]+)"), 1e-3),
    "flops_per_s": (
        re.compile(r"(?:throughput per GPU \(TFLOP/s/GPU\)|approx flops per GPU):\s*([\d.]+)"),
        1e12,
    ),
    "lr": (re.compile(r"learning rate:?\s*([\d.eE+-]+)"), 1.0),
    "loss": (re.compile(r"\blm[ _]loss:?\s*([\d.eE+-]+)"), 1.0),
    "grad_norm": (re.compile(r"grad norm:\s*([\d.eE+-]+)"), 1.0),
    "loss_scale": (re.compile(r"loss scale:\s*([\d.]+)"), 1.0),
    "batch": (re.compile(r"global batch size:\s*(\d+)"), 1.0),
}
_TIMER = re.compile(r"^\s*([a-z][a-z0-9-]+)\s*\.*:\s*\(?([\d.]+)(?:,\s*([\d.]+)\))?\s*$")
_OLD_TIMERS = re.compile(r"([a-z][a-z0-9-]+):\s*([\d.]+)")
_TIMERS = {
    "batch-generator": "data_wait_s",
    "optimizer": "optimizer_s",
    "all-grads-sync": "comm_exposed_s",
    "params-all-gather": "comm_exposed_s",
    "backward-params-all-reduce": "comm_exposed_s",
}
_MEMORY = {
    "memory_peak_bytes": re.compile(r"memory \(MB\).*\bmax allocated:\s*([\d.]+)"),
    "memory_reserved_bytes": re.compile(r"memory \(MB\).*\bmax reserved:\s*([\d.]+)"),
}
_ARGUMENT = re.compile(r"^\s*([a-z][a-z0-9_]+) \.{3,} (\S.*)$")
_SAVED = re.compile(r"(?:saving|saved) checkpoint", re.IGNORECASE)
_VALIDATED = re.compile(r"validation loss at iteration \d+ \|.*?lm loss value:\s*([\d.eE+-]+)")


def is_megatron(lines: Sequence[str]) -> bool:
    return any((match := _ITERATION.search(line)) and "elapsed time per iteration" in match[3] for line in lines)


def read_megatron(lines: Sequence[str], source: str) -> Reading:
    settings = {match[1]: match[2].strip() for line in lines if (match := _ARGUMENT.match(line))}
    records, notes = without_warm_up(_with_stalls(in_order(_records(lines, settings))))
    if any(record.get("comm_exposed_s") for record in records):
        notes.append("gradient exchange is what Megatron's timers show: with overlap it is not all exposed")
    steps = tuple({name: value for name, value in record.items() if name[0] != "_"} for record in records)
    return Reading(source=source, kind="training", by="megatron", steps=steps, settings=settings, notes=tuple(notes))


def _records(lines: Sequence[str], settings: dict[str, str]) -> list[Record]:
    """An iteration's line, with the timers and memory after it and the events before it."""
    records: list[Record] = []
    events: Record = {}
    for line in lines:
        if record := _iteration(line, settings):
            records.append(record | events)
            events = {}
        elif _SAVED.search(line):
            events["_saved"] = True
        elif validated := _VALIDATED.search(line):
            events |= {"_validated": True, "val_loss": float(validated[1])}
        elif records:
            _add_timer(records[-1], line)
    return records


def _iteration(line: str, settings: dict[str, str]) -> Record | None:
    matched = _ITERATION.search(line)
    if matched is None or "elapsed time per iteration" not in matched[3]:
        return None
    record: Record = {"step": int(matched[1])}
    if (when := clock(line)) is not None:
        record["time"] = when
    record |= read_fields(matched[3], _FIELDS)
    batch, sequence = record.pop("batch", None), number(settings.get("seq_length"))
    if batch and sequence and record.get("step_s"):
        record |= {"batch_tokens": batch * sequence, "tokens_per_s": batch * sequence / record["step_s"]}
        ranks = number(settings.get("world_size"))
        record |= {"tokens_per_s_per_device": record["tokens_per_s"] / ranks} if ranks else {}
    return record


def _add_timer(record: Record, line: str) -> None:
    """'    optimizer ...: (min, max)' across ranks, of which the least has no waiting in it; older ones have all timers
    in one line, 'time (ms) | optimizer: 49.42 | …'. Memory is in megabytes."""
    timers = _OLD_TIMERS.findall(line) if line.lstrip().startswith("time (ms) |") else []
    if matched := _TIMER.match(line):
        timers = [(matched[1], matched[2])]
    for name, milliseconds in timers:
        if name in _TIMERS:
            gauge = _TIMERS[name]
            record[gauge] = record.get(gauge, 0.0) + float(milliseconds) / 1e3
    for gauge, pattern in _MEMORY.items():
        if matched := pattern.search(line):
            record[gauge] = float(matched[1]) * 2**20


def _with_stalls(records: list[Record]) -> list[Record]:
    """The clock's time between two lines beyond what the iterations took, given to what was done in it."""
    for before, record in pairwise(records):
        if {"time", "step_s"} <= record.keys() and "time" in before:
            beyond = record["time"] - before["time"] - record["step_s"] * (record["step"] - before["step"])
            gauge = "checkpoint_stall_s" if "_saved" in record else "validation_s" if "_validated" in record else None
            if gauge and beyond > 0:
                record[gauge] = beyond
    return records
