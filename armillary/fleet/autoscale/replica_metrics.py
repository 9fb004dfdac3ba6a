"""What a replica's /metrics page says of its queue, KV cache and latencies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.error import URLError
from urllib.request import urlopen

from armillary.spec.gauges import prometheus_name

_TIMEOUT_S = 1.0
_LINE = re.compile(r"^([a-zA-Z_:]\w*)(?:\{([^}]*)\})? (\S+)$")
_BOUND = re.compile(r'le="([^"]+)"')
Buckets = dict[float, float]
"""upper bound -> number of values up to it"""


class ReplicaMetrics:
    """One page: gauges, and histograms by their buckets."""

    def __init__(self, page: str) -> None:
        self.values: dict[str, float] = {}
        self.buckets: dict[str, Buckets] = {}
        for line in page.splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            name, labels, value = match.groups()
            bound = _BOUND.search(labels or "")
            if bound is not None and name.endswith("_bucket"):
                self.buckets.setdefault(name.removesuffix("_bucket"), {})[float(bound.group(1))] = float(value)
            elif labels is None:
                self.values[name] = float(value)

    def gauge(self, name: str) -> float:
        return self.values.get(prometheus_name(name), 0.0)

    def since(self, name: str, before: ReplicaMetrics | None) -> Buckets:
        """The counts of a histogram that were added since another page of the same server."""
        now, then = self.buckets.get(prometheus_name(name), {}), {}
        if before is not None:
            then = before.buckets.get(prometheus_name(name), {})
        added = {bound: count - then.get(bound, 0.0) for bound, count in now.items()}
        return now if any(count < 0 for count in added.values()) else added  # it was restarted


def read_metrics(url: str) -> ReplicaMetrics | None:
    """The page of a server; None where it does not answer."""
    try:
        with urlopen(f"{url}/metrics", timeout=_TIMEOUT_S) as response:
            return ReplicaMetrics(response.read().decode())
    except (URLError, OSError, ValueError):
        return None


def quantile(histograms: list[Buckets], share: float) -> float | None:
    """The quantile of several histograms together, interpolated within its bucket; None where they are empty."""
    total: Buckets = {}
    for buckets in histograms:
        for bound, count in buckets.items():
            total[bound] = total.get(bound, 0.0) + count
    bounds = sorted(total)
    if not bounds or total[bounds[-1]] <= 0:
        return None
    wanted, low, below = share * total[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if total[bound] >= wanted:
            if bound == float("inf"):
                return low
            inside = total[bound] - below
            return low + (bound - low) * ((wanted - below) / inside if inside else 1.0)
        low, below = bound, total[bound]
    return low


def pages_of(urls: Mapping[str, str]) -> dict[str, ReplicaMetrics]:
    """Name -> page of the servers that answer."""
    pages = {name: read_metrics(url) for name, url in urls.items()}
    return {name: page for name, page in pages.items() if page is not None}
