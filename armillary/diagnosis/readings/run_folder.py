"""A run folder as a Reading: training's steps without their warm-up, or an engine's steps and requests.

A step that was recorded by the profiler is slower than the others: it tells where its time went, not how long steps
take.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from armillary.diagnosis.readings.reading import Reading
from armillary.engine.scheduler.decision import StepWork
from armillary.errors import BadData, BadInput
from armillary.planning.simulation.request_stats import served_gauges
from armillary.spec.gauges import GAUGES
from armillary.spec.plan import Plan
from armillary.store import nan_safe_json
from armillary.store.gauges import Record, read_gauges
from armillary.store.goodput import account_of_run
from armillary.store.home import Home
from armillary.store.runs import Run

WARM_UP = 3
"""steps at the beginning that compile, choose and fill caches"""
FEWEST = 4
"""steps that must remain"""
DISTURBED = 0.15
"""share of a step that the main thread waits for a core, from which that is worth saying"""
_TIMES = (
    "step_s",
    "data_wait_s",
    "data_wait_fraction",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "between_steps_s",
    "optimizer_s",
    "comm_exposed_s",
    "bubble_s",
    "host_cpu_s",
    "host_queue_s",
)
"""what a recording falsifies in the step it records; who was slowest is told of the step before, and only where that
one was not recorded"""
_STARTUP = ("torch_call_s", "micro_batch_overhead_fraction", "group_machines", "group_machines_least")
"""what a run measures once, before its first step"""


def read_run(run: Run, home: Home) -> Reading:
    """What a run measured, with its plan; records of an unfinished run are read as far as they go."""
    reading = _read(run.gauges, run.plan, f"run {run.name}")
    return replace(reading, goodput=account_of_run(run, now=time.time()))


def read_gauges_file(path: Path) -> Reading:
    """gauges.jsonl alone, with the plan that may lie beside it."""
    return _read(path, path.parent / "plan.json", str(path))


def _read(gauges: Path, plan: Path, source: str) -> Reading:
    known = Plan.from_json(plan.read_text(), str(plan)) if plan.is_file() else None
    return read_records(list(read_gauges(gauges)), source=source, plan=known)


def read_records(records: Sequence[Record], *, source: str, plan: Plan | None = None) -> Reading:
    """Records of gauges.jsonl as one Reading."""
    if not records:
        raise BadInput(f"{source} has measured nothing yet; wait until it has taken some steps")
    _check_numbers(records, source)
    if _is_serving(records, plan):
        return _serving(records, source, plan)
    return _training([record for record in records if "step" in record], source, plan)


def _check_numbers(records: Sequence[Record], source: str) -> None:
    for record in records:
        wrong = next((name for name in record if name in GAUGES and not isinstance(record[name], int | float)), None)
        if wrong is not None:
            raise BadData(f"{source} has {wrong}={record[wrong]!r}, which is not a number; delete that line")


def _is_serving(records: Sequence[Record], plan: Plan | None) -> bool:
    if any(not record.keys().isdisjoint(("engine_step_s", "request", "calibration_step_s")) for record in records):
        return True
    return plan is not None and plan.serve is not None and plan.train is None


# --- training


def _training(records: Sequence[Record], source: str, plan: Plan | None) -> Reading:
    skipped = max(0, min(WARM_UP, len(records) - FEWEST))
    after_warm_up = [_cleaned(record) for record in records[skipped:]]
    early = [lasting for record in records[:skipped] if len(lasting := _lasting(record)) > 1]
    notes = [f"{skipped} steps of warm-up were left out"] if skipped else []
    if sum("step_s" in record for record in after_warm_up) < FEWEST:
        notes.append("few steps were measured: a longer run says more")
    reading = Reading(source=source, kind="training", steps=(*early, *after_warm_up), values=_last(records), plan=plan)
    if is_disturbed(reading):
        notes.append(
            f"the main thread waited for a core {_queued(reading):.0%} of the time: something else runs "
            "on this machine, and shares are rough"
        )
    return replace(reading, notes=tuple(notes))


def is_disturbed(reading: Reading) -> bool:
    """Whether other programs had the cores for a good part of the steps."""
    return _queued(reading) > DISTURBED


def _queued(reading: Reading) -> float:
    """Of a step, how long its main thread was ready to run and did not."""
    queued, step = reading.get("host_queue_s"), reading.get("step_s")
    return queued / step if queued and step else 0.0


def _cleaned(record: Record) -> Record:
    """Without what the profiler slowed."""
    return {name: value for name, value in record.items() if name not in _TIMES} if "compute_s" in record else record


def _lasting(record: Record) -> Record:
    """What a warm-up step tells all the same: memory taken apart, and what is done between steps."""
    names = ("step", "checkpoint_s", "checkpoint_stall_s", "checkpoint_bytes", "validation_s", *_STARTUP)
    return {name: value for name, value in record.items() if name in names or name.startswith("memory_")}


def _last(records: Sequence[Record]) -> dict[str, float]:
    """Totals and what holds for the run so far."""
    return {name: float(value) for record in records for name, value in record.items() if _is_total(name)}


def _is_total(name: str) -> bool:
    return name in ("goodput_fraction", "memory_peak_bytes") or (name in GAUGES and GAUGES[name].kind == "counter")


# --- serving


def _serving(records: Sequence[Record], source: str, plan: Plan | None) -> Reading:
    requests = tuple(record for record in records if "request" in record)
    steps = tuple(record for record in records if "engine_step_s" in record and "request" not in record)
    calibration = {
        nan_safe_json.dumps(_kind_of(record)): record for record in records if "calibration_step_s" in record
    }
    values = _last(records) | served_gauges(steps, requests)
    return Reading(
        source=source,
        kind="serving",
        steps=steps,
        requests=requests,
        values=values,
        plan=plan,
        calibration=tuple(calibration.values()),
    )


def _kind_of(record: Record) -> Record:
    """What a calibration step was; a server that cuts old records off writes these once more."""
    return {name: value for name, value in record.items() if name in StepWork._fields}
