"""Figures of a serving plan: traffic, replicas, latencies, memory and dollars."""

from __future__ import annotations

from armillary.documents.contents.price_figures import Priced, add_prices
from armillary.documents.figures import Figures
from armillary.planning.cost.cost import device_hour
from armillary.planning.cost.ownership import HOURS_A_MONTH
from armillary.planning.serving.capacity import LIMITS
from armillary.planning.serving.serving_plan import ServingPlan

TRAFFIC, CAPACITY, MONEY, MEMORY = "Traffic", "Serving capacity", "Serving cost", "Memory per serving device"
LABELS = {
    "ttft_p50_s": "TTFT, median",
    "ttft_p99_s": "TTFT, 99th percentile",
    "itl_p50_s": "Inter-token latency, median",
    "itl_p99_s": "Inter-token latency, 99th percentile",
    "tpot_p99_s": "TPOT, 99th percentile",
    "e2e_p99_s": "End to end, 99th percentile",
}


def add_serving(figures: Figures, plan: ServingPlan) -> Priced | None:
    """All figures of the plan; the prices, or None where none is known."""
    _add_traffic(figures, plan)
    _add_replicas(figures, plan)
    _add_latencies(figures, plan)
    return _add_cost(figures, plan)


def _add_traffic(figures: Figures, plan: ServingPlan) -> None:
    """Of two streams of requests, their sum and mean lengths."""
    traffic = plan.request.traffic
    tokens_in, tokens_out, more = float(traffic.tokens_in), float(traffic.tokens_out), ""
    if traffic.long_requests_per_s:
        (tokens_in, tokens_out), more = traffic.tokens_per_request, " and traffic.long_{0}"
    for key, label, value, unit in (
        ("requests_per_s", "Requests per second", traffic.total_per_s, "requests/s"),
        ("tokens_in", "Prompt tokens per request", tokens_in, "count"),
        ("tokens_out", "Completion tokens per request", tokens_out, "count"),
    ):
        figures.put(TRAFFIC, key, label, value, unit, f"traffic.{key}{more.format(key)}")
    figures.derive(
        TRAFFIC, "served_per_s", "Tokens served per second", "tokens/s", "requests_per_s * (tokens_in + tokens_out)"
    )


def _add_replicas(figures: Figures, plan: ServingPlan) -> None:
    capacity, split = plan.capacity, plan.chosen.split
    highest = capacity.highest.requests_per_s
    figures.put(
        CAPACITY, "replica_rate", "Highest rate of a replica within the objectives", highest, "requests/s", "planner"
    )
    figures.put(CAPACITY, "replica_devices", "Devices per replica", split.num_devices, "count", "planner")
    replicas = "max(1, ceil(requests_per_s / replica_rate))"
    figures.derive(CAPACITY, "replicas", "Replicas", "count", replicas, float(capacity.replicas))
    figures.derive(
        CAPACITY,
        "serving_devices",
        "Devices for serving",
        "count",
        "replicas * replica_devices",
        float(plan.chosen.devices),
    )
    load = "requests_per_s / (replicas * replica_rate)"
    figures.derive(CAPACITY, "replica_load", "Load over the highest rate", "share", load)
    predicted = capacity.predicted()
    figures.put(
        CAPACITY,
        "concurrency",
        "Requests that the KV cache of a replica holds",
        predicted["concurrency"],
        "count",
        "planner",
    )
    figures.put(CAPACITY, "kv_used", "KV cache in use", predicted["kv_used_fraction"], "share", "planner")


def _add_latencies(figures: Figures, plan: ServingPlan) -> None:
    predicted, objective, memory = plan.capacity.predicted(), plan.request.objective, plan.capacity.memory
    for name, label in LABELS.items():
        figures.put(CAPACITY, name, label, predicted[name], "s", "planner, at the plan's load")
    for name in LIMITS:
        if (limit := getattr(objective, name)) is not None:
            figures.put(CAPACITY, f"slo_{name}", f"Objective: {LABELS[name]}", limit, "s", f"objective.{name}")
    parts = {"weights": memory.weights_bytes, "kv": memory.kv_bytes, "working": memory.working_bytes}
    for name, size in parts.items():
        label = {"weights": "Weights, serving", "kv": "KV cache", "working": "Working memory"}[name]
        figures.put(MEMORY, f"serving_{name}", label, size, "B", "planner")
    figures.put(MEMORY, "serving_memory", "Memory of a serving device", memory.device_bytes, "B", "hardware catalogue")


def _add_cost(figures: Figures, plan: ServingPlan) -> Priced | None:
    request, cost = plan.request, plan.chosen.cost
    if cost is None:
        return None
    count = plan.chosen.devices
    priced = add_prices(figures, "serving_", request.cost, request.cluster, "serving_devices", count)
    if priced is None:
        return None
    offer = device_hour(request.cost, request.cluster, count)
    useful = " / serving_spot_goodput" if offer.name == "spot" else ""
    hour = f"{priced.selected}{useful}"
    derive = figures.derive
    derive(MONEY, "serving_hour", f"Device-hour for serving, {offer.name}", "money/h", hour, cost.device_hour_usd)
    month = f"serving_devices * serving_hour * {HOURS_A_MONTH}"
    derive(MONEY, "serving_month", "Serving per month", "money", month, cost.month_usd)
    per_token = "serving_devices * serving_hour / 3600 / served_per_s * 1000000"
    derive(MONEY, "served_cost", "Million served tokens", "money/M", per_token, cost.million_tokens_usd)
    return priced
