"""The server's metrics under vLLM's names, beside ours: dashboards, KEDA scalers and the inference extension of the
Gateway API then work as with vLLM.

Names of vllm/v1/metrics/loggers.py; for KV use and inter-token latency the older names too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armillary.serving.processes.server_metrics import Metrics

_LABELS = ("model_name", "engine")
_GAUGES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_used_fraction",
    "gpu_cache_usage_perc": "kv_used_fraction",
}
_COUNTERS = {
    "num_preemptions": "preemptions_total",
    "prefix_cache_queries": "prefix_queries_total",
    "prefix_cache_hits": "prefix_hits_total",
    "prompt_tokens": "tokens_in_total",
    "generation_tokens": "tokens_out_total",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "ttft_s",
    "inter_token_latency_seconds": "itl_s",
    "time_per_output_token_seconds": "itl_s",
    "request_time_per_output_token_seconds": "tpot_s",
    "e2e_request_latency_seconds": "e2e_s",
    "request_queue_time_seconds": "queue_s",
    "request_prefill_time_seconds": "prefill_s",
    "request_decode_time_seconds": "decode_s",
    "request_prompt_tokens": "tokens_in",
    "request_generation_tokens": "tokens_out",
}
_FINISHES = {"stop": ("stop", "tool_calls"), "length": ("length",), "abort": ("abort", "deadline"), "error": ("error",)}
"""vLLM's reasons, and ours that they stand for"""


def vllm_families(metrics: Metrics, totals: Mapping[str, float]) -> Iterable[Any]:
    """Metric families, for prometheus_client's registry; `totals` are the engine's counters."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    values = [metrics.info.get("model", ""), "0"]
    for name, ours in _GAUGES.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", f"vLLM's name of {ours}", labels=_LABELS)
        gauge.add_metric(values, metrics.engine_state.get(ours, 0.0))
        yield gauge
    for name, ours in _COUNTERS.items():
        counter = CounterMetricFamily(f"vllm:{name}", f"vLLM's name of {ours}", labels=_LABELS)
        counter.add_metric(values, totals[ours])
        yield counter
    success = CounterMetricFamily("vllm:request_success", "finished requests", labels=[*_LABELS, "finished_reason"])
    for reason, finishes in _FINISHES.items():
        success.add_metric([*values, reason], sum(metrics.finished[finish] for finish in finishes))
    yield success
    for name, ours in _HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"vllm:{name}", f"vLLM's name of {ours}", labels=_LABELS)
        histogram.add_metric(values, metrics.histograms[ours].buckets(), metrics.histograms[ours].sum)
        yield histogram
    yield _cache_config(metrics)


def _cache_config(metrics: Metrics) -> Any:
    """vLLM's cache_config_info: the size of the KV cache as labels."""
    from prometheus_client.core import GaugeMetricFamily

    block_tokens = metrics.info.get("block_tokens", "16")
    blocks = int(metrics.engine_state.get("kv_capacity_tokens", 0.0)) // int(block_tokens)
    labels = {"block_size": block_tokens, "num_gpu_blocks": str(blocks), "engine": "0"}
    info = GaugeMetricFamily("vllm:cache_config_info", "size of the KV cache", labels=list(labels))
    info.add_metric(list(labels.values()), 1.0)
    return info
