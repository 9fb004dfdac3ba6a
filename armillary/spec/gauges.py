"""The one gauge vocabulary: what a plan predicts, a run measures and a diagnosis reads goes by these names.

The end of a name is its unit: `_s` seconds, `_bytes` bytes, `_usd` dollars, `_fraction` a share from 0 to 1, `_per_s` a
rate, `_total` a counter that only grows. The `memory_…_bytes` of the categories add up to memory_peak_bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Loop = Literal["inner", "training", "product"]
Kind = Literal["value", "counter", "histogram"]


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """One thing that is predicted or measured."""

    name: str
    """key in gauges.jsonl and in Plan.predicted"""
    unit: str
    """what one of it is"""
    loop: Loop
    """the ring it belongs to"""
    kind: Kind = "value"
    """latest value, a total that grows, or one value a request or token whose distribution counts"""
    meaning: str
    """what is measured, from where to where"""


RENAMED = {
    "call_s": "torch_call_s",
    "engine_roof_fraction": "engine_roofline_fraction",
    "inefficiency_fraction": "kernel_inefficiency_fraction",
    "micro_batch_fraction": "micro_batch_overhead_fraction",
    "rehearsed_s": "calibration_step_s",
    "repeats_request": "prefix_source_request",
    "roof_fraction": "roofline_fraction",
    "short_kernels_fraction": "launch_bound_fraction",
}
"""former name of a gauge -> its name now: files and metric pages with the former name stay readable"""


def current_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with every former gauge name replaced by the current one."""
    return {RENAMED.get(name, name): value for name, value in record.items()}


def prometheus_name(name: str) -> str:
    """The name under which a gauge is exported."""
    return "armillary_" + name


def former_names(name: str) -> tuple[str, ...]:
    """What a gauge was called before."""
    return tuple(old for old, new in RENAMED.items() if new == name)


def budget_gauge(part: str) -> str:
    """The gauge of one part of the step budget."""
    return "kernel_inefficiency_fraction" if part == "inefficiency" else f"{part}_fraction"


_Rows = tuple[tuple[str, str, str], ...]  # name, unit, meaning

_INNER: _Rows = (
    ("useful_fraction", "fraction", "step budget: work at the speed of the roofline"),
    ("kernel_inefficiency_fraction", "fraction", "step budget: kernel time beyond what the roofline allows"),
    ("unjudged_fraction", "fraction", "step budget: device time that cannot be judged against a roofline"),
    ("comm_exposed_fraction", "fraction", "step budget: communication with no computation beside it"),
    ("launch_gap_fraction", "fraction", "step budget: device idle because the next launch came late"),
    ("host_fraction", "fraction", "step budget: device idle while Python or the loader ran"),
    ("sync_fraction", "fraction", "step budget: synchronisation and copies between host and device"),
    ("idle_fraction", "fraction", "step budget: device idle for another known reason"),
    ("unknown_fraction", "fraction", "step budget: what could not be attributed"),
    ("host_stall_fraction", "fraction", "share of a step in which the host held the device up for over a millisecond"),
    ("fusible_fraction", "fraction", "share of a step in passes over memory that a compiler would join"),
    ("launch_bound_fraction", "fraction", "share of a step in kernels too short for any roofline"),
    ("data_wait_s", "s", "time the step waited for its batch"),
    ("data_wait_fraction", "fraction", "data wait over step time"),
    ("device_busy_fraction", "fraction", "wall time with at least one kernel running"),
    ("flops_per_s", "FLOP/s", "achieved arithmetic of one device"),
    ("bytes_per_s", "B/s", "achieved memory traffic of one device"),
    ("intensity", "FLOP/B", "FLOPs a byte of memory traffic"),
    (
        "roofline_fraction",
        "fraction",
        "roofline time over time taken, with ceilings measured on this machine",
    ),
    ("gemm_flops_per_s", "FLOP/s", "measured ceiling of matrix products"),
    ("copy_bytes_per_s", "B/s", "measured ceiling of memory copies, read and write together"),
    ("kernels", "kernels", "kernel launches a step"),
    ("launch_s", "s", "time one launch costs the host"),
    ("host_queue_s", "s", "part of a step in which the main thread was ready and others had the cores (Linux)"),
    ("host_cpu_s", "s", "part of a step in which the main thread really ran, by the processor's clock"),
    ("torch_call_s", "s", "CPU time per torch call, measured with a small layer before the first step"),
    (
        "micro_batch_overhead_fraction",
        "fraction",
        "fixed cost per micro-batch as a fraction of its time, measured before the first step",
    ),
    ("loader_tokens_per_s", "tokens/s", "what the data path delivers by itself"),
    ("clock_hz", "Hz", "device clock while measured"),
    ("power_w", "W", "device power while measured"),
)

_TRAINING: _Rows = (
    ("step_s", "s", "one optimiser step, wall time"),
    ("compute_s", "s", "part of the step with kernels of the model running"),
    ("comm_s", "s", "communication, hidden or not"),
    ("comm_exposed_s", "s", "communication with no computation beside it"),
    ("bubble_s", "s", "pipeline idle time"),
    ("overhead_s", "s", "launches, optimiser, loader and the rest of the step"),
    ("recompute_s", "s", "part of compute that makes activations again"),
    ("optimizer_s", "s", "part of the step spent in the optimiser"),
    ("validation_s", "s", "one validation on held-out text, between two steps"),
    ("between_steps_s", "s", "from a step's end to the next one's begin, validation and checkpoints left out"),
    ("offload_s", "s", "copies to and from host memory or disk that nothing hides"),
    ("tokens_per_s", "tokens/s", "tokens trained, all devices"),
    ("tokens_per_s_per_device", "tokens/s", "tokens trained a device"),
    ("batch_tokens", "tokens", "tokens of one step"),
    ("micro_batches", "micro-batches", "micro-batches a rank runs in one step"),
    ("mfu", "fraction", "model FLOPs (6·N, causal attention as half, no recompute) over the chip's dense peak"),
    ("hfu", "fraction", "FLOPs done, recompute included, over the chip's dense peak"),
    ("model_flops_per_token", "FLOP", "the FLOPs a token that mfu counts"),
    ("memory_bytes", "B", "device memory in use now"),
    ("memory_peak_bytes", "B", "most device memory in use so far"),
    ("memory_reserved_bytes", "B", "device memory the allocator holds"),
    ("memory_used_fraction", "fraction", "device memory held over what the device has"),
    ("memory_weights_bytes", "B", "weights"),
    ("memory_gradients_bytes", "B", "gradients"),
    ("memory_optimizer_bytes", "B", "optimiser states"),
    ("memory_master_bytes", "B", "fp32 copies of lower-precision weights"),
    ("memory_activations_bytes", "B", "activations kept for the backward pass"),
    ("memory_loss_bytes", "B", "logits and what the loss keeps"),
    ("memory_kv_bytes", "B", "KV cache"),
    ("memory_buffers_bytes", "B", "gathered weights, gradient buckets, communication buffers"),
    ("memory_other_bytes", "B", "framework, workspaces, fragmentation"),
    ("host_memory_bytes", "B", "memory of the host in use by this process"),
    ("offloaded_bytes", "B", "states and activations that wait in host memory or on disk"),
    ("loss", "nats", "mean cross-entropy of the step's tokens"),
    ("val_loss", "nats", "mean cross-entropy of the held-out split"),
    ("aux_loss", "nats", "load-balance and router losses added to the loss"),
    ("grad_norm", "1", "L2 norm of all gradients before clipping"),
    ("lr", "1", "learning rate of the step"),
    ("loss_scale", "1", "fp16 loss scale"),
    ("skipped_steps_total", "steps", "steps the loss scaler skipped"),
    ("tokens_total", "tokens", "tokens trained so far"),
    ("rank_spread_s", "s", "slowest rank's step minus the median rank's"),
    ("slowest_rank", "rank", "rank that took longest"),
    ("expert_load_max_over_mean", "1", "tokens of the busiest expert over the mean, in the layer where that is worst"),
    ("expert_tail_fraction", "fraction", "share of experts with less than a tenth of the mean load"),
    ("expert_drop_fraction", "fraction", "token copies dropped for lack of capacity"),
    ("router_entropy", "nats", "entropy of the mean routing distribution, a mean over layers"),
    ("checkpoint_s", "s", "from asking for a checkpoint to its commit"),
    ("checkpoint_stall_s", "s", "part of it during which no step ran"),
    ("checkpoint_bytes", "B", "size of one checkpoint"),
    ("checkpoints_total", "checkpoints", "checkpoints committed"),
    ("restarts_total", "restarts", "times the run was resumed"),
    ("goodput_fraction", "fraction", "time spent on steps that were kept, over wall time"),
    ("run_s", "s", "from the first step to the last"),
    ("step_usd", "USD", "what one step costs"),
    ("run_usd", "USD", "what the whole run costs"),
    ("million_trained_tokens_usd", "USD", "what training on a million tokens costs"),
)

_PRODUCT: _Rows = (
    ("ttft_s", "s", "time to first token: request sent to first streamed token"),
    ("itl_s", "s", "inter-token latency: gap between consecutive streamed tokens of a request"),
    ("itl_max_s", "s", "largest of those gaps of a request"),
    ("tpot_s", "s", "time per output token: (end-to-end − TTFT) / (tokens − 1)"),
    ("e2e_s", "s", "request sent to last token"),
    ("queue_s", "s", "request received to first scheduled"),
    ("prefill_s", "s", "first scheduled to first token"),
    ("decode_s", "s", "first token to last token"),
    ("tokens_in", "tokens", "prompt tokens of a request"),
    ("tokens_out", "tokens", "generated tokens of a request"),
    ("cached_tokens", "tokens", "prompt tokens of a request found in the prefix cache"),
    ("repeated_tokens", "tokens", "prompt tokens of a request that an earlier one began with too, cached or not"),
    (
        "prefix_source_request",
        "number",
        "request_number of the earlier request that shares this prefix",
    ),
    ("request_number", "number", "which request it was, counted as they came"),
    ("arrived_s", "s", "when a request came, by the engine's clock"),
    ("tokens_limit", "tokens", "tokens the answer to a request might have had"),
    ("requests_total", "requests", "requests finished"),
    ("aborted_total", "requests", "requests whose client went away or whose deadline passed"),
    ("rejected_total", "requests", "requests refused for lack of room"),
    ("errors_total", "requests", "requests that ended in an error"),
    ("tokens_in_total", "tokens", "prompt tokens computed or found"),
    ("tokens_out_total", "tokens", "tokens generated"),
    ("prefix_queries_total", "tokens", "prompt tokens looked up in the prefix cache"),
    ("prefix_hits_total", "tokens", "prompt tokens found there"),
    ("prefix_hit_fraction", "fraction", "prompt tokens found over looked up"),
    ("prefix_repeated_total", "tokens", "prompt tokens that an earlier request began with too, cached or not"),
    ("prefix_evicted_total", "requests", "requests of which more would have been found, had it not been evicted"),
    ("preemptions_total", "requests", "running requests put back to waiting"),
    ("recomputed_total", "tokens", "tokens in the KV cache that were given up by that, and are computed again"),
    ("running", "requests", "requests in the batch"),
    ("waiting", "requests", "requests in the queue"),
    ("engine_step_s", "s", "one engine step, wall time"),
    ("engine_schedule_s", "s", "part of it spent deciding what to run"),
    ("engine_launch_s", "s", "part of it in which the host encoded and launched it"),
    ("engine_wait_s", "s", "part of it spent waiting for the device"),
    ("engine_roofline_fraction", "fraction", "time the roofline of that engine step needs over time taken"),
    ("prefill_tokens", "tokens", "prompt tokens computed in one engine step"),
    ("prefill_rows", "requests", "prompts that these are of"),
    ("decode_tokens", "tokens", "tokens generated in one engine step"),
    ("context_tokens", "tokens", "keys that the decodes of one engine step read"),
    ("prefill_pairs", "pairs", "pairs of query and key in the prompts of one engine step"),
    ("prefill_past", "tokens", "tokens of these prompts that were computed, or found, before"),
    ("calibration_step_s", "s", "time of an engine step of a given shape, run before the first request"),
    ("kv_used_fraction", "fraction", "KV blocks in use"),
    ("kv_capacity_tokens", "tokens", "tokens the KV cache holds"),
    ("concurrency", "requests", "requests the KV cache holds at the given lengths"),
    ("requests_per_s", "requests/s", "requests finished a second"),
    ("tokens_in_per_s", "tokens/s", "prompt tokens a second"),
    ("tokens_out_per_s", "tokens/s", "generated tokens a second"),
    ("goodput_requests_per_s", "requests/s", "requests a second that meet every objective"),
    ("slo_met_fraction", "fraction", "requests that meet every objective"),
    ("replicas", "replicas", "copies of the model serving"),
    ("devices", "devices", "devices in use"),
    ("load_s", "s", "process start to ready"),
    ("million_tokens_usd", "USD", "what serving a million tokens costs"),
    ("device_hour_usd", "USD", "what an hour of one device costs"),
)

_PERCENTILES: _Rows = tuple(
    (f"{base}_p{percent}_s", "s", f"{percent}th percentile of {base}_s over a run")
    for base in ("ttft", "itl", "tpot", "e2e", "queue")
    for percent in (50, 90, 99)
)

_PER_REQUEST = frozenset(
    {
        "ttft_s",
        "itl_s",
        "tpot_s",
        "e2e_s",
        "queue_s",
        "prefill_s",
        "decode_s",
        "tokens_in",
        "tokens_out",
        "cached_tokens",
        "repeated_tokens",
        "itl_max_s",
    }
)


def _gauges(loop: Loop, rows: _Rows) -> dict[str, Gauge]:
    return {
        name: Gauge(name=name, unit=unit, loop=loop, kind=_kind(name), meaning=meaning) for name, unit, meaning in rows
    }


def _kind(name: str) -> Kind:
    if name.endswith("_total"):
        return "counter"
    return "histogram" if name in _PER_REQUEST else "value"


GAUGES: dict[str, Gauge] = (
    _gauges("inner", _INNER) | _gauges("training", _TRAINING) | _gauges("product", _PRODUCT + _PERCENTILES)
)
