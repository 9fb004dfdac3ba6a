"""A gateway's metrics page as a Reading: how evenly its replicas are used, and what its guards take.

Counts of requests per replica are of the time between two looks at the page, where there are two, else since its start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from armillary.diagnosis.readings.prometheus import Page
from armillary.diagnosis.readings.reading import Reading

GATEWAY = "gateway"
"""Reading.by"""
_NAME = "armillary_gateway_"
_COPIED = ("guard_s", "guard_limit_s")
_LEAST_REQUESTS = 100
"""of a model, before the shares of its replicas say anything"""


def is_gateway_page(page: Page) -> bool:
    return f"{_NAME}in_flight" in page


def read_gateway_page(page: Page, source: str, earlier: Page | None = None, notes: tuple[str, ...] = ()) -> Reading:
    """The worst model counts."""
    values = {name: value for name in _COPIED if (value := page.total(f"armillary_{name}")) is not None}
    values["requests_total"] = page.total(f"{_NAME}requests_total") or 0.0
    values["running"] = page.total(f"{_NAME}in_flight") or 0.0
    values["waiting"] = page.total(f"{_NAME}waiting") or 0.0
    added = page.histogram(f"{_NAME}added_seconds")
    if added is not None and added.mean is not None:
        values["gateway_added_s"] = added.mean
    requests, in_flight = _requests(page, earlier), _of_replicas(page, "replica_in_flight")
    settings: dict[str, str] = {}
    for model, counts in requests.items():
        uneven = max(counts.values()) / fmean(counts.values()) if sum(counts.values()) >= _LEAST_REQUESTS else 0.0
        if len(counts) > 1 and uneven > values.get("replica_load_max_over_mean", 0.0):
            busiest = max(counts, key=lambda url: counts[url])
            now = in_flight.get(model, {})
            mean = fmean(now.values()) if now else 0.0
            values["replica_load_max_over_mean"] = uneven
            values["replica_in_flight_mean"] = mean
            values["replica_in_flight_max_over_mean"] = now.get(busiest, 0.0) / mean if mean else 0.0
            values["replicas"] = float(len(counts))
            settings |= {"model": model, "busiest": busiest}
    return Reading(
        source=source,
        kind="serving",
        by=GATEWAY,
        values=values,
        settings=settings,
        notes=notes,
    )


def _requests(page: Page, earlier: Page | None) -> dict[str, dict[str, float]]:
    """Requests of each replica that is up, by model."""
    now = _of_replicas(page, "replica_requests_total")
    before = _of_replicas(earlier, "replica_requests_total") if earlier is not None else {}
    up = _of_replicas(page, "replica_up")
    return {
        model: counts
        for model, each in now.items()
        if (
            counts := {
                url: count - before.get(model, {}).get(url, 0.0)
                for url, count in each.items()
                if up.get(model, {}).get(url)
            }
        )
    }


def _of_replicas(page: Page, kind: str) -> Mapping[str, dict[str, float]]:
    """model -> address of a replica -> figure."""
    by_model: dict[str, dict[str, float]] = defaultdict(dict)
    for sample in page.find(f"{_NAME}{kind}"):
        by_model[sample.labels.get("model", "")][sample.labels.get("url", "")] = sample.value
    return by_model
