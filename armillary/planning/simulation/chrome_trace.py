"""A simulated service in Chrome's trace format, for chrome://tracing and Perfetto: a process per replica.

Requests are asynchronous slices (queue, prefill, decode), counters have requests and replicas, and decisions are marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from armillary.planning.simulation.fleet_run import FleetRun
from armillary.planning.simulation.simulated_replica import Served

MOST_REQUESTS = 20_000
"""requests that are drawn; viewers get slow beyond"""
_US = 1e6


def chrome_trace(run: FleetRun) -> dict[str, Any]:
    """The document, to be written as JSON."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(run))}


def _events(run: FleetRun) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "fleet"}}
    for pid, life in enumerate(run.lives, start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": life.name}}
        yield _slice("starting", pid, life.began_s, min(life.ready_s, run.end_s))
        yield _slice("ready", pid, life.ready_s, run.end_s if life.ended_s == inf else life.ended_s)
    pids = {life.name: pid for pid, life in enumerate(run.lives, start=1)}
    for served in run.served[:MOST_REQUESTS]:
        yield from _request(served, pids[served.replica])
    for look in run.timeline:
        counts = {"in flight": look.in_flight, "waiting": look.waiting}
        yield {"ph": "C", "name": "requests", "pid": 0, "ts": look.now * _US, "args": counts}
        both = {"ready": look.ready, "starting": look.starting}
        yield {"ph": "C", "name": "replicas", "pid": 0, "ts": look.now * _US, "args": both}
    for _, decision in run.decisions:
        if decision.change:
            name = f"{decision.before} → {decision.replicas}: {decision.reason}"
            yield {"ph": "i", "s": "g", "name": name, "pid": 0, "tid": 0, "ts": decision.now * _US}


def _slice(name: str, pid: int, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": 0, "ts": begin * _US, "dur": max(0.0, end - begin) * _US}


def _request(served: Served, pid: int) -> Iterator[dict[str, Any]]:
    parts = (
        ("queue", served.arrived_s, served.started_s),
        ("prefill", served.started_s, served.first_s),
        ("decode", served.first_s, served.end_s),
    )
    sizes = {"in": served.tokens_in, "out": served.tokens_out, "cached": served.cached}
    for name, begin, end in parts:
        event = {"cat": "request", "id": served.number, "name": name, "pid": pid, "tid": 0}
        yield {**event, "ph": "b", "ts": begin * _US, "args": sizes}
        yield {**event, "ph": "e", "ts": end * _US}
