"""What a run of requests came to, from the records of its steps and requests: the same sums for measured and simulated.

latencies    percentiles over requests; of gaps (ITL) over tokens: every token of a step waited as long as it took
rates        tokens and requests over the time from the first arrival to the last token
totals       as the last record has them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from armillary.stats import percentile

Records = Sequence[Mapping[str, Any]]
PERCENTS = (50, 90, 99)


def served_gauges(steps: Records, requests: Records) -> dict[str, float]:
    """Gauge -> value; what cannot be said is left out."""
    found: dict[str, float] = {}
    for base in ("ttft", "tpot", "e2e", "queue"):
        values = [float(one[f"{base}_s"]) for one in requests if f"{base}_s" in one]
        found |= {f"{base}_p{percent}_s": percentile(values, percent) for percent in PERCENTS if values}
    gaps = _gaps(steps, requests)
    if gaps:
        seconds, tokens = zip(*gaps, strict=True)
        found |= {f"itl_p{percent}_s": percentile(seconds, percent, tokens) for percent in PERCENTS}
    return found | _rates(requests) | _totals(steps)


def _gaps(steps: Records, requests: Records) -> list[tuple[float, float]]:
    """(gap, number of tokens with that gap): one per step, and those of preempted sequences, which are longer than any
    step."""
    found = [
        (float(one["engine_step_s"]), float(one["decode_tokens"]))
        for one in steps
        if one.get("decode_tokens") and "engine_step_s" in one
    ]
    longest = max((gap for gap, _ in found), default=float("inf"))
    found += [(float(one["itl_max_s"]), 1.0) for one in requests if one.get("itl_max_s", 0.0) > 1.5 * longest]
    return found


def _rates(requests: Records) -> dict[str, float]:
    timed = [one for one in requests if "arrived_s" in one and "e2e_s" in one]
    if not timed:
        return {}
    seconds = max(one["arrived_s"] + one["e2e_s"] for one in timed) - min(one["arrived_s"] for one in timed)
    if seconds <= 0:
        return {}
    return {
        "tokens_out_per_s": sum(one.get("tokens_out", 0) for one in timed) / seconds,
        "tokens_in_per_s": sum(one.get("tokens_in", 0) for one in timed) / seconds,
        "requests_per_s": len(timed) / seconds,
    }


def _totals(steps: Records) -> dict[str, float]:
    if not steps:
        return {}
    last = steps[-1]
    kept = [name for name in last if name.endswith("_total") or name in ("prefix_hit_fraction", "kv_capacity_tokens")]
    return {name: float(last[name]) for name in kept}
