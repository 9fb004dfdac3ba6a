"""Latencies, rates and totals of a run from its step and request records: the same for measured and simulated runs.

latencies    percentiles over requests; of gaps (ITL) over tokens: every token of a step has the step's time as its gap;
             a recorded step stands for those before it that were not
rates        tokens and requests over the time from the first arrival to the last token
totals       from the last record
"""

from collections.abc import Mapping, Sequence
from typing import Any

from armillary.stats import percentile

Records = Sequence[Mapping[str, Any]]
PERCENTS = (50, 90, 99)


def served_gauges(steps: Records, requests: Records) -> dict[str, float]:
    """Gauge -> value; unknown ones are left out."""
    gauges: dict[str, float] = {}
    for base in ("ttft", "tpot", "e2e", "queue"):
        values = [float(record[f"{base}_s"]) for record in requests if f"{base}_s" in record]
        gauges |= {f"{base}_p{percent}_s": percentile(values, percent) for percent in PERCENTS if values}
    gaps = _gaps(steps, requests)
    if gaps:
        seconds, tokens = zip(*gaps, strict=True)
        gauges |= {f"itl_p{percent}_s": percentile(seconds, percent, tokens) for percent in PERCENTS}
    return gauges | _rates(requests) | _totals(steps)


def _gaps(steps: Records, requests: Records) -> list[tuple[float, float]]:
    """(gap, number of tokens with that gap): record per step, and those of preempted sequences, which are longer than
    any step."""
    gaps = [
        (float(record["engine_step_s"]), float(record["decode_tokens"]) * float(record.get("recorded_steps", 1.0)))
        for record in steps
        if record.get("decode_tokens") and "engine_step_s" in record
    ]
    longest = max((gap for gap, _ in gaps), default=float("inf"))
    gaps += [(float(record["itl_max_s"]), 1.0) for record in requests if record.get("itl_max_s", 0.0) > 1.5 * longest]
    return gaps


def _rates(requests: Records) -> dict[str, float]:
    timed = [record for record in requests if "arrived_s" in record and "e2e_s" in record]
    if not timed:
        return {}
    seconds = max(record["arrived_s"] + record["e2e_s"] for record in timed) - min(
        record["arrived_s"] for record in timed
    )
    if seconds <= 0:
        return {}
    return {
        "tokens_out_per_s": sum(record.get("tokens_out", 0) for record in timed) / seconds,
        "tokens_in_per_s": sum(record.get("tokens_in", 0) for record in timed) / seconds,
        "requests_per_s": len(timed) / seconds,
    }


def _totals(steps: Records) -> dict[str, float]:
    last = steps[-1] if steps else {}
    return {
        name: float(value)
        for name, value in last.items()
        if name.endswith("_total") or name in ("prefix_hit_fraction", "kv_capacity_tokens")
    }
