"""Busy means: batch, queue and cache by a page's totals, for it may be looked at when everybody has just left.

A page saved after a load test says that nobody runs and nobody waits; what its steps and requests took is still there.
"""

from __future__ import annotations

from collections.abc import Mapping

from armillary.diagnosis.readings.scrapes import Looks

NOTE = "nobody is there now: batch, queue and cache are means over the steps that were taken"


def busy_means(looks: Looks, values: Mapping[str, float]) -> dict[str, float]:
    """Nothing where requests are there now, or where the page does not tell."""
    running = _running(looks, values) if not values.get("running") and not values.get("waiting") else None
    if not running:
        return {}
    found = {"running": running, "unanswered": 0.0}
    served, queue = _served_s(values), values.get("queue_s")
    if served and queue is not None:
        found["waiting"] = running * queue / served
    capacity = values.get("kv_capacity_tokens")
    if capacity:
        found["kv_used_fraction"] = min(1.0, running * _kept_tokens(values) / capacity)
    return found


def _running(looks: Looks, values: Mapping[str, float]) -> float | None:
    """The mean step's batch; where steps are not counted, by Little's law over the time between two looks."""
    if looks.batch is not None:
        return looks.batch
    rate, served = values.get("requests_per_s"), _served_s(values)
    return rate * served if rate and served else None


def _served_s(values: Mapping[str, float]) -> float:
    """A request's time in the batch."""
    if "decode_s" in values:
        return values.get("prefill_s", 0.0) + values["decode_s"]
    return max(0.0, values.get("e2e_s", 0.0) - values.get("queue_s", 0.0))


def _kept_tokens(values: Mapping[str, float]) -> float:
    """Of the cache, by a request on average: what is not shared of its prompt, and half its answer."""
    own = values.get("tokens_in", 0.0) * (1 - values.get("prefix_hit_fraction", 0.0))
    return own + values.get("tokens_out", 0.0) / 2
