"""The node of a straggler is left out of an elastic run when its nodes meet again (`train.exclude_stragglers`).

Nothing is restarted for it. A node that is left out ends, and is refused when it comes back; another one may take its
place.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from armillary.errors import ArmillaryError
from armillary.spec.plan import Plan
from armillary.store.gauges import read_gauges
from armillary.store.hang_verdict import read_verdict
from armillary.store.runs import Run
from armillary.store.writer_process import machine
from armillary.units import seconds_text

if TYPE_CHECKING:
    from armillary.diagnosis.evidence.stragglers import Straggler
    from armillary.diagnosis.readings.reading import Reading


class NodeExcluded(ArmillaryError):
    """This node has no part in the run any more; the others go on."""


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A node that is left out, and why."""

    launcher: str
    machine: str  # empty: other nodes of that machine stay
    host: str
    rank: int  # that it had
    why: str

    @property
    def text(self) -> str:
        return f"the node on {self.host} is left out: {self.why}"


def node_facts(devices: int, *, is_host: bool) -> dict[str, Any]:
    """What this node tells the others about itself."""
    launcher = f"{machine()}/{os.getpid()}"
    return {
        "devices": devices,
        "machine": machine(),
        "launcher": launcher,
        "host": socket.gethostname(),
        "is_host": is_host,
    }


def round_facts(posted: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """For the next leader: which ranks were on which node, since when."""
    return {"time": time.time(), "nodes": [{**node, "ranks": n} for node, n in zip(posted, counts, strict=True)]}


def refuse_excluded(excluded: Sequence[Mapping[str, Any]] | None, facts: Mapping[str, Any]) -> None:
    for each in (Exclusion(**entry) for entry in excluded or ()):
        if each.launcher == facts["launcher"] or (each.machine and each.machine == facts["machine"]):
            raise NodeExcluded(f"{each.text}; start it again with a new run, when it is as fast as the others")


def excluded_node(run: Run, last: Mapping[str, Any], *, others_wait: bool) -> Exclusion | None:
    """The node of the last round whose rank the others waited for. None where there is none, where fewer nodes without
    it would be slower, or where it is the one that the nodes meet at."""
    straggler = _straggler(run, since=float(last["time"]), num_nodes=0 if others_wait else len(last["nodes"]))
    if straggler is None:
        return None
    rank, why = straggler
    nodes, first = list(last["nodes"]), 0
    for node in nodes:
        first += node["ranks"]
        if rank < first:
            if node["is_host"]:
                return None
            shared = sum(other["machine"] == node["machine"] for other in nodes) > 1
            place = "" if shared else str(node["machine"])
            return Exclusion(launcher=node["launcher"], machine=place, host=node["host"], rank=rank, why=why)
    return None


def _straggler(run: Run, *, since: float, num_nodes: int) -> tuple[int, str] | None:
    """A rank of the starts since then, and what is said of it: it stood still, or was late step after step."""
    from armillary.diagnosis.evidence.stragglers import recent_straggler
    from armillary.diagnosis.readings.run_folder import read_records

    verdict = read_verdict(run.folder)
    if verdict is not None and not verdict.resolved and verdict.time >= since and verdict.cause == "slow_rank":
        return verdict.rank, verdict.text.partition(";")[0]
    try:
        records = [record for record in read_gauges(run.gauges) if record["time"] >= since]
        plan = Plan.from_json(run.plan.read_text(), str(run.plan)) if run.plan.is_file() else None
        reading = read_records(records, source=f"run {run.name}", plan=plan)
    except ArmillaryError:
        return None
    slow = recent_straggler(reading, reading.plan) if reading.kind == "training" else None
    if slow is None or not _is_worth_it(slow, reading, num_nodes):
        return None
    cause = "waiting for its data" if slow.cause == "data" else "in its own work"
    delay = f"{seconds_text(slow.seconds)} per step later than the others since step {slow.since:,}"
    return slow.rank, f"rank {slow.rank} was {delay}, {cause}"


def _is_worth_it(slow: Straggler, reading: Reading, num_nodes: int) -> bool:
    """N − 1 nodes without the wait are faster than N with it: (T − t)·N/(N − 1) < T, or t > T/N. With 0 nodes: others
    wait to take its place, and the wait need only be one that a diagnosis would name."""
    from armillary.diagnosis.evidence.thresholds import STRAGGLER_SHARE

    step_s = reading.get("step_s")
    return step_s is not None and slow.seconds > step_s * (1 / num_nodes if num_nodes else float(STRAGGLER_SHARE))
