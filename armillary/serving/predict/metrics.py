"""Prometheus metrics of the predict server, and the mean latency of /health."""

from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_RECENT = 1000


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix, registry = "armillary_predict_", self.registry
        self._requests = Counter(f"{prefix}requests", "requests by status", ["code"], registry=registry)
        self._latency = Histogram(
            f"{prefix}latency_s", "body read to response ready", buckets=_SECONDS, registry=registry
        )
        self._rows = Histogram(f"{prefix}batch_rows", "rows of a batch", buckets=_ROWS, registry=registry)
        self._queued = Histogram(f"{prefix}queue_s", "wait of a batch's first row", buckets=_SECONDS, registry=registry)
        self._ran = Histogram(f"{prefix}run_s", "time of a batch in the model", buckets=_SECONDS, registry=registry)
        self._waiting = Gauge(f"{prefix}waiting_rows", "rows in the queue", registry=registry)
        self._reloads = Counter(f"{prefix}reloads", "new versions loaded", registry=registry)
        self._counted = 0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def responded(self, code: int, seconds: float | None = None) -> None:
        self._requests.labels(str(code)).inc()
        if seconds is not None:
            self._latency.observe(seconds)
            self._recent.append(seconds)

    def ran(self, rows: int, queued_s: float, run_s: float) -> None:
        """Observe a batch."""
        self._rows.observe(rows)
        self._queued.observe(queued_s)
        self._ran.observe(run_s)

    @property
    def avg_latency_ms(self) -> float:
        """Mean of the last thousand responses; 0 before the first."""
        return round(1e3 * sum(self._recent) / len(self._recent), 3) if self._recent else 0.0

    def page(self, *, waiting_rows: int, reloads: int) -> bytes:
        self._waiting.set(waiting_rows)
        self._reloads.inc(reloads - self._counted)
        self._counted = reloads
        return bytes(generate_latest(self.registry))
