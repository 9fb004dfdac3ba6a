"""What a cluster says of a job's attempts as a Reading: Slurm's accounting, and the events of Kubernetes.

sacct -D -P -j JOB -o JobID,State,Start,End,NodeList          every attempt of a job that was requeued
kubectl get events -o json --field-selector involvedObject.name=POD
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from armillary.diagnosis.readings.reading import Reading
from armillary.errors import BadData

SLURM, KUBERNETES = "slurm", "kubernetes"
"""Reading.by"""
_COLUMNS = {"JobID", "State", "Start", "End"}
_FAILED = ("FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REQUEUED", "TIMEOUT", "DEADLINE")
_REASONS = {
    "OOMKilling": "OUT_OF_MEMORY",
    "OOMKilled": "OUT_OF_MEMORY",
    "Evicted": "EVICTED",
    "Preempted": "PREEMPTED",
    "Preempting": "PREEMPTED",
    "NodeNotReady": "NODE_FAIL",
    "BackOff": "FAILED",
    "FailedScheduling": "UNSCHEDULABLE",
}
"""reason of an event -> state"""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a job."""

    state: str
    start: datetime
    end: datetime | None
    nodes: str


def is_sacct(head: str) -> bool:
    return set(head.lstrip().split("\n", 1)[0].strip().split("|")) >= _COLUMNS


def is_kubernetes_events(head: str) -> bool:
    return '"involvedObject"' in head and '"reason"' in head


def read_sacct(text: str, source: str) -> Reading:
    """Attempts in their order; steps of a job (JOB.batch) are left out."""
    attempts = sorted(_attempts(text), key=lambda attempt: attempt.start)
    if not attempts:
        raise BadData(f"{source} has no attempt that has started; give sacct -D -P -o JobID,State,Start,End,NodeList")
    states = Counter(attempt.state for attempt in attempts if attempt.state in _FAILED)
    last = max(attempt.end or attempt.start for attempt in attempts)
    total = (last - attempts[0].start).total_seconds()
    down = sum(max(0.0, (after.start - (at.end or after.start)).total_seconds()) for at, after in pairwise(attempts))
    values = _values(states, len(attempts)) | ({"down_fraction": down / total} if total > 0 else {})
    return Reading(
        source=source, kind="training", by=SLURM, values=values, settings=_worst(states) | _same_nodes(attempts)
    )


def _attempts(text: str) -> list[Attempt]:
    rows = csv.DictReader(io.StringIO(text.lstrip()), delimiter="|")
    attempts = []
    for row in rows:
        start, end = _when(row.get("Start")), _when(row.get("End"))
        if "." not in (row.get("JobID") or ".") and start is not None:
            state = (row.get("State") or "").split(" ")[0].rstrip("+")  # CANCELLED by 1000
            attempts.append(Attempt(state=state, start=start, end=end, nodes=row.get("NodeList") or ""))
    return attempts


def _when(text: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:  # Unknown, None
        return None


def _same_nodes(attempts: Sequence[Attempt]) -> dict[str, str]:
    """The nodes of the failed attempts, where they are always the same and another attempt had others."""
    failed = {attempt.nodes for attempt in attempts if attempt.state in _FAILED}
    nodes = {attempt.nodes for attempt in attempts if attempt.state not in _FAILED}
    return {"nodes": next(iter(failed))} if len(failed) == 1 and nodes and failed.isdisjoint(nodes) else {}


def read_kubernetes_events(text: str, source: str) -> Reading:
    """Counts of the reasons that end pods, or keep them from starting."""
    try:
        items: list[dict[str, Any]] = json.loads(text)["items"]
    except (ValueError, KeyError, TypeError):
        raise BadData(f"{source} is no list of events; give the output of kubectl get events -o json") from None
    states: Counter[str] = Counter()
    for item in items:
        state = _REASONS.get(str(item.get("reason")))
        if state is not None:
            states[state] += int(item.get("count") or 1)
    pods = {str(item.get("involvedObject", {}).get("name", "")) for item in items}
    return Reading(
        source=source, kind="training", by=KUBERNETES, values=_values(states, len(pods)), settings=_worst(states)
    )


def _values(states: Counter[str], attempts: int) -> dict[str, float]:
    waits = states.get("UNSCHEDULABLE", 0)
    return {
        "job_attempts": float(attempts),
        "job_failures": float(sum(states.values()) - waits),
        "job_out_of_memory": float(states.get("OUT_OF_MEMORY", 0)),
        "job_unschedulable": float(waits),
    }


def _worst(states: Counter[str]) -> dict[str, str]:
    return {"state": states.most_common(1)[0][0]} if states else {}
