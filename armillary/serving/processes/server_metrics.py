"""What the server counts, exported for Prometheus under the names of `spec/gauges.py` with `armillary_` before them.

Observing costs less than a microsecond, because it happens for every token; prometheus_client only writes the page.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from armillary.serving.processes.mailbox import Mailbox
from armillary.spec.gauges import GAUGES, prometheus_name

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16_384.0, 65_536.0, 262_144.0)
_FROM_ENGINE = ("running", "waiting", "kv_used_fraction", "kv_capacity_tokens", "prefix_hit_fraction")
_ENGINE_TOTALS = (
    "preemptions_total",
    "recomputed_total",
    "prefix_queries_total",
    "prefix_hits_total",
    "prefix_repeated_total",
    "prefix_evicted_total",
    "tokens_in_total",
    "tokens_out_total",
)

_OF_ANSWER, _OF_PROMPT = ("queue_s", "prefill_s", "decode_s", "tokens_out"), ("tokens_in", "cached_tokens")


class Histogram:
    """Counts by bounds."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound as text, how many are not above it)."""
        found, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Metrics:
    """Everything that is counted about one server."""

    def __init__(self) -> None:
        seconds = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s", "prefill_s", "decode_s")
        self.histograms = {name: Histogram() for name in seconds}
        self.histograms |= {name: Histogram(_TOKENS) for name in ("tokens_in", "tokens_out", "cached_tokens")}
        self.finished: Counter[str] = Counter()
        """answers by why they ended, as their clients were told"""
        self.responses: Counter[tuple[str, int]] = Counter()
        """by path and status"""
        self.rejected = self.restarts = 0
        self.inflight = 0
        self.ready = False
        self.started_at = time.time()
        self.info: Mapping[str, str] = {}
        """what the server is set to, for whoever has only this page"""
        self._state: Mapping[str, float] = {}
        self._before: Counter[str] = Counter()
        """totals of engines that are no more"""

    def state(self, found: Mapping[str, float]) -> None:
        """How the engine is doing."""
        self._state = found

    def engine_lost(self) -> None:
        """Another engine begins to count at zero."""
        self._before.update({name: int(self._state.get(name, 0)) for name in _ENGINE_TOTALS})
        self._state = {}

    def ended(self, box: Mailbox, choice: int, gauges: Mapping[str, float], now: float, *, first: bool) -> None:
        """An answer is over: its times, as seen from this process where tokens are streamed. What is the prompt's is
        counted with the `first` of its answers."""
        times, observe = box.times[choice], self._observe
        for name in (*_OF_ANSWER, *(_OF_PROMPT if first else ())):
            if name in gauges:
                observe(name, gauges[name])
        if times.first is not None and times.last is not None:
            observe("ttft_s", times.first - box.begin)
            observe("e2e_s", now - box.begin)
            if times.count > 1:
                observe("tpot_s", (times.last - times.first) / (times.count - 1))

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    # --- for prometheus_client

    def collect(self) -> Iterable[Any]:
        """Families of samples, as a registry asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, histogram in self.histograms.items():
            family = HistogramMetricFamily(prometheus_name(name), GAUGES[name].meaning)
            family.add_metric([], histogram.buckets(), histogram.sum)
            yield family
        yield self._by_label(CounterMetricFamily, "requests_total", "finish", self.finished)
        http = CounterMetricFamily("armillary_http_responses_total", "HTTP responses", labels=["path", "status"])
        for (path, status), count in sorted(self.responses.items()):
            http.add_metric([path, str(status)], count)
        yield http
        for name, value in self._totals().items():
            about = GAUGES[name].meaning if name in GAUGES else "engines started again"
            yield CounterMetricFamily(prometheus_name(name), about, value=value)
        for name in _FROM_ENGINE:
            yield GaugeMetricFamily(prometheus_name(name), GAUGES[name].meaning, value=self._state.get(name, 0.0))
        if self.info:
            told = GaugeMetricFamily("armillary_serve_info", "model, run and keys of [serve]", labels=list(self.info))
            told.add_metric(list(self.info.values()), 1.0)
            yield told
        yield GaugeMetricFamily("armillary_inflight", "HTTP requests under way", value=self.inflight)
        yield GaugeMetricFamily("armillary_ready", "1 where /ready is 200", value=float(self.ready))
        yield GaugeMetricFamily("armillary_start_time_seconds", "when the server started", value=self.started_at)

    def _totals(self) -> dict[str, float]:
        found = {name: self._before[name] + self._state.get(name, 0.0) for name in _ENGINE_TOTALS}
        aborted = self.finished["abort"] + self.finished["deadline"]
        return found | {
            "aborted_total": aborted,
            "errors_total": self.finished["error"],
            "rejected_total": self.rejected,
            "restarts_total": self.restarts,
        }

    def _by_label(self, family: Any, name: str, label: str, counts: Counter[str]) -> Any:
        made = family(prometheus_name(name), GAUGES[name].meaning, labels=[label])
        for value in ("stop", "length", "tool_calls", "abort", "deadline", "error"):
            made.add_metric([value], counts[value])
        return made

    def page(self) -> bytes:
        """The page that Prometheus reads."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return bytes(generate_latest(registry))
