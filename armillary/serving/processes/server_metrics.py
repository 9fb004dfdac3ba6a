"""The server's metrics, exported to Prometheus under the names of `spec/gauges.py` with the prefix `armillary_`.

An observation takes less than a microsecond, because there is one per token; prometheus_client only writes the page.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from armillary.serving.processes.request_mailbox import Mailbox
from armillary.serving.processes.vllm_metrics import vllm_families
from armillary.spec.gauges import GAUGES, prometheus_name

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16_384.0, 65_536.0, 262_144.0)
_FROM_ENGINE = ("running", "waiting", "kv_used_fraction", "kv_capacity_tokens", "prefix_hit_fraction")
_OF_SOME_ENGINES = (
    "expert_load_max_over_mean",
    "expert_tail_fraction",
    "acceptance_fraction",
    "speculation_speedup",
    "kv_host_used_fraction",
    "decode_servers",
    "prefill_connected",
    "dp_ranks",
    "dp_running_max",
    "dp_kv_used_max_fraction",
)
"""of models with experts; of speculative decoding; of KV blocks in host memory; of disaggregated prefill and decode; of
data-parallel attention"""
_ENGINE_TOTALS = (
    "busy_s_total",
    "preemptions_total",
    "recomputed_total",
    "prefix_queries_total",
    "prefix_hits_total",
    "prefix_repeated_total",
    "prefix_evicted_total",
    "tokens_in_total",
    "tokens_out_total",
    "drafted_total",
    "accepted_total",
    "expert_tokens_total",
    "kv_offloaded_total",
    "kv_loaded_total",
    "kv_swapped_in_total",
    "kv_sent_bytes_total",
    "kv_send_wait_s_total",
    "kv_received_bytes_total",
    "kv_fetched_total",
    "kv_fetch_failed_total",
    "kv_fetch_wait_s_total",
)

_FINISHES = ("stop", "length", "tool_calls", "abort", "deadline", "error")
_OF_COMPLETION, _OF_PROMPT = ("queue_s", "prefill_s", "decode_s", "tokens_out"), ("tokens_in", "cached_tokens")


class Histogram:
    """Counts of values per bucket."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound as text, number of values up to it)."""
        buckets, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class Metrics:
    """The metrics of one server."""

    def __init__(self, *, vllm: bool = False) -> None:
        """`vllm`: export vLLM's names beside ours."""
        self._vllm = vllm
        seconds = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s", "prefill_s", "decode_s")
        self.histograms = {name: Histogram() for name in seconds}
        self.histograms |= {name: Histogram(_TOKENS) for name in ("tokens_in", "tokens_out", "cached_tokens")}
        self.finished: Counter[str] = Counter()  # choices by the finish_reason that clients see
        self.responses: Counter[tuple[str, int]] = Counter()
        self.rejected = self.restarts = 0
        self.inflight = 0
        self.ready = False
        self.started_at = time.time()
        self.info: Mapping[str, str] = {}
        self.engine_state: Mapping[str, Any] = {}
        self._earlier_totals: Counter[str] = Counter()

    def engine_lost(self) -> None:
        """Add the totals of an engine that has ended: the next one counts from zero."""
        self._earlier_totals.update({name: int(self.engine_state.get(name, 0)) for name in _ENGINE_TOTALS})
        self.engine_state = {}

    def ended(self, box: Mailbox, choice: int, gauges: Mapping[str, float], now: float, *, first: bool) -> None:
        """A completion has ended: observe its times, by this process's clock where tokens are streamed. Gauges of the
        prompt are observed with its `first` completion."""
        times = box.times[choice]
        for name in (*_OF_COMPLETION, *(_OF_PROMPT if first else ())):
            if name in gauges:
                self.histograms[name].observe(gauges[name])
        if times.first is not None and times.last is not None:
            self.histograms["ttft_s"].observe(times.first - box.begin)
            self.histograms["e2e_s"].observe(now - box.begin)
            if times.count > 1:
                self.histograms["tpot_s"].observe((times.last - times.first) / (times.count - 1))

    # --- export

    def collect(self) -> Iterable[Any]:
        """Metric families, for prometheus_client's registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for name, histogram in self.histograms.items():
            family = HistogramMetricFamily(prometheus_name(name), GAUGES[name].meaning)
            family.add_metric([], histogram.buckets(), histogram.sum)
            yield family
        name = "requests_total"
        requests = CounterMetricFamily(prometheus_name(name), GAUGES[name].meaning, labels=["finish"])
        for finish in _FINISHES:
            requests.add_metric([finish], self.finished[finish])
        yield requests
        http = CounterMetricFamily("armillary_http_responses_total", "HTTP responses", labels=["path", "status"])
        for (path, status), count in sorted(self.responses.items()):
            http.add_metric([path, str(status)], count)
        yield http
        for name, value in self._totals().items():
            about = GAUGES[name].meaning if name in GAUGES else "engine restarts"
            yield CounterMetricFamily(prometheus_name(name), about, value=value)
        for name in _FROM_ENGINE:
            yield GaugeMetricFamily(prometheus_name(name), GAUGES[name].meaning, value=self.engine_state.get(name, 0.0))
        yield from self._expert_families()
        if self.info:
            info = GaugeMetricFamily("armillary_serve_info", "model, run and keys of [serve]", labels=list(self.info))
            info.add_metric(list(self.info.values()), 1.0)
            yield info
        yield GaugeMetricFamily("armillary_inflight", "HTTP requests in flight", value=self.inflight)
        yield GaugeMetricFamily("armillary_ready", "1 while /ready is 200", value=float(self.ready))
        yield GaugeMetricFamily("armillary_start_time_seconds", "start time of the server", value=self.started_at)
        if self._vllm:
            yield from vllm_families(self, self._totals())

    def _expert_families(self) -> Iterable[Any]:
        """None for a model without experts."""
        from prometheus_client.core import GaugeMetricFamily

        for name in _OF_SOME_ENGINES:
            if name in self.engine_state:
                yield GaugeMetricFamily(prometheus_name(name), GAUGES[name].meaning, value=self.engine_state[name])
        name = "expert_tokens"
        tokens = GaugeMetricFamily(prometheus_name(name), GAUGES[name].meaning, labels=["layer", "expert"])
        for layer, counts in self.engine_state.get(name, {}).items():
            for expert, count in enumerate(counts):
                tokens.add_metric([str(layer), str(expert)], count)
        if tokens.samples:
            yield tokens

    def _totals(self) -> dict[str, float]:
        totals = {name: self._earlier_totals[name] + self.engine_state.get(name, 0.0) for name in _ENGINE_TOTALS}
        return totals | {
            "aborted_total": self.finished["abort"] + self.finished["deadline"],
            "errors_total": self.finished["error"],
            "rejected_total": self.rejected,
            "restarts_total": self.restarts,
        }

    def page(self) -> bytes:
        """The page of /metrics."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return bytes(generate_latest(registry))
