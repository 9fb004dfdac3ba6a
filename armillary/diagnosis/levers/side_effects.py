"""What a change of a server does beside what it is made for: requests that still wait, others that lose by it, memory.

Each is read off the same requests played again with the change.
"""

from __future__ import annotations

from typing import Any

from armillary.diagnosis.evidence.serving_run import OBJECTIVES
from armillary.diagnosis.evidence.thresholds import (
    MAX_E2E_LOSS,
    MAX_THROUGHPUT_LOSS,
    MAX_TTFT_LOSS,
    SPARED_QUEUE_SHARE,
    UNNOTICED_TTFT_S,
)
from armillary.diagnosis.levers.serving_replay import Replay
from armillary.units import bytes_text, seconds_text

Change = dict[str, Any]
"""key of the recipe -> value"""


def waits(replay: Replay, change: Change) -> bool:
    """Whether requests still wait for a good part of their time, or an objective is still missed."""
    gauges, objective = replay.simulated(change).gauges, replay.service.objective
    late = any(gauges.get(name, 0.0) > getattr(objective, name) for name in replay.service.missed)
    return late or gauges.get("queue_p50_s", 0.0) > SPARED_QUEUE_SHARE * gauges.get("e2e_p50_s", 0.0)


def harms(replay: Replay, change: Change) -> bool:
    """Whether others lose more than they should. Where gaps are longer than was asked for, times of which nothing was
    asked may pay for them: only answers a second count, and what was asked for and is kept so far."""
    service, then = replay.service, replay.simulated(change).gauges
    kept = {
        name: limit
        for name in OBJECTIVES
        if (limit := getattr(service.objective, name)) is not None and name not in service.missed
    }
    if any(then.get(name, 0.0) > limit for name, limit in kept.items()):
        return True
    rate, shorter = (replay.speedup(gauge, change) or 1.0 for gauge in ("tokens_out_per_s", "itl_p99_s"))
    if rate * MAX_THROUGHPUT_LOSS < 1 or "itl_p99_s" in service.missed:
        return rate * MAX_THROUGHPUT_LOSS < 1
    first, limit = replay.speedup("ttft_p50_s", change) or 1.0, max(MAX_TTFT_LOSS, shorter)
    late = then.get("ttft_p50_s", 0.0) > UNNOTICED_TTFT_S and first * limit < 1
    return late or _mean_e2e(replay, change) > MAX_E2E_LOSS * _mean_e2e(replay)


def _mean_e2e(replay: Replay, change: Change | None = None) -> float:
    found = [float(one["e2e_s"]) for one in replay.simulated(change).requests if "e2e_s" in one]
    return sum(found) / len(found) if found else 0.0


def risk_of(replay: Replay, change: Change) -> str:
    """What it costs: memory, and times of others that get longer."""
    said = []
    if "serve.kv_bytes" in change:
        said.append(f"+ {bytes_text(change['serve.kv_bytes'] - replay.kv_bytes)} of memory")
    now, then = replay.simulated().gauges, replay.simulated(change).gauges
    for name, what in (("ttft_p99_s", "TTFT p99"), ("itl_p99_s", "ITL p99")):
        before, after = now.get(name), then.get(name)
        if before and after and after > 1.05 * before:
            said.append(f"{what} {seconds_text(before)} → {seconds_text(after)}")
    return ", ".join(said) or "none"
