"""Gauges: the names that plans predict, runs measure and diagnoses read.

The suffix of a name is its unit: `_s` seconds, `_bytes` bytes, `_usd` dollars, `_fraction` a share from 0 to 1,
`_per_s` a rate, `_total` a monotonic counter. The `memory_…_bytes` of the categories add up to memory_peak_bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Loop = Literal["inner", "training", "product"]
GaugeKind = Literal["value", "counter", "histogram"]


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """A quantity that is predicted or measured, with its key in gauges.jsonl and in Plan.predicted. A histogram has one
    value per request or token."""

    name: str
    unit: str
    loop: Loop
    kind: GaugeKind = "value"
    meaning: str


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
"""former name -> current name of a gauge, so that older files and metric pages stay readable"""


SLO_LIMITS = {
    "guard_blocked_fraction": "guard_blocked_limit_fraction",
    "guard_refusal_fraction": "guard_refusal_limit_fraction",
    "guard_s": "guard_limit_s",
}
"""gauge of a safety SLO -> the gauge of its limit"""


def current_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with former gauge names replaced by current ones."""
    return {RENAMED.get(name, name): value for name, value in record.items()}


def prometheus_name(name: str) -> str:
    """Name of a gauge in the Prometheus export."""
    return "armillary_" + name


def former_names(name: str) -> tuple[str, ...]:
    """Former names of a gauge."""
    return tuple(old for old, new in RENAMED.items() if new == name)


def budget_gauge(part: str) -> str:
    """Name of the gauge of one part of the step budget."""
    return "kernel_inefficiency_fraction" if part == "inefficiency" else f"{part}_fraction"


_Rows = tuple[tuple[str, str, str], ...]  # name, unit, meaning

_INNER: _Rows = (
    ("useful_fraction", "fraction", "share of the step that its work takes at roofline speed (step budget)"),
    ("kernel_inefficiency_fraction", "fraction", "share of the step in kernel time beyond the roofline (step budget)"),
    (
        "unjudged_fraction",
        "fraction",
        "share of the step in device time that has no roofline to compare with (step budget)",
    ),
    ("comm_exposed_fraction", "fraction", "share of the step in communication that no computation hides (step budget)"),
    (
        "launch_gap_fraction",
        "fraction",
        "share of the step in which the device waits for a late kernel launch (step budget)",
    ),
    (
        "host_fraction",
        "fraction",
        "share of the step in which the device waits for Python or the data loader (step budget)",
    ),
    (
        "sync_fraction",
        "fraction",
        "share of the step in synchronisation and copies between host and device (step budget)",
    ),
    (
        "idle_fraction",
        "fraction",
        "share of the step in which the device is idle for another known reason (step budget)",
    ),
    ("unknown_fraction", "fraction", "share of the step that could not be attributed (step budget)"),
    (
        "host_stall_fraction",
        "fraction",
        "share of the step in which the host delayed the device by more than a millisecond at once",
    ),
    ("fusible_fraction", "fraction", "share of the step in memory-bound operations that a compiler would fuse"),
    ("launch_bound_fraction", "fraction", "share of the step in kernels that are too short for a roofline"),
    ("data_wait_s", "s", "time per step that the trainer waits for its batch"),
    ("data_wait_fraction", "fraction", "data_wait_s over step_s"),
    ("device_busy_fraction", "fraction", "share of wall time with at least one kernel running"),
    ("flops_per_s", "FLOP/s", "achieved FLOP/s per device"),
    ("bytes_per_s", "B/s", "achieved memory traffic per device"),
    ("intensity", "FLOP/B", "arithmetic intensity: FLOPs per byte of memory traffic"),
    ("roofline_fraction", "fraction", "roofline time over measured time, with ceilings measured on this machine"),
    ("gemm_flops_per_s", "FLOP/s", "measured GEMM ceiling"),
    ("kernels", "kernels", "kernel launches per step"),
    ("launch_s", "s", "host time per kernel launch"),
    (
        "host_queue_s",
        "s",
        "time per step in which the main thread was runnable but other threads had the cores (Linux)",
    ),
    ("host_cpu_s", "s", "CPU time of the main thread per step"),
    ("torch_call_s", "s", "CPU time per torch call, measured with a small layer before the first step"),
    (
        "micro_batch_overhead_fraction",
        "fraction",
        "fixed cost per micro-batch over its time, measured before the first step",
    ),
    ("power_w", "W", "power of the device during the measurement"),
)

_TRAINING: _Rows = (
    ("step_s", "s", "wall time per optimizer step"),
    ("compute_s", "s", "time per step with kernels of the model running"),
    ("comm_s", "s", "communication time per step, hidden or exposed"),
    ("comm_exposed_s", "s", "communication time per step that no computation hides"),
    ("bubble_s", "s", "pipeline bubble per step"),
    ("overhead_s", "s", "time per step for launches, optimizer, data loader and everything else"),
    ("recompute_s", "s", "part of compute_s that recomputes activations"),
    ("optimizer_s", "s", "time per step in the optimizer"),
    ("validation_s", "s", "time per validation on held-out text, between two steps"),
    (
        "between_steps_s",
        "s",
        "time from the end of a step to the start of the next, without validation and checkpoints",
    ),
    ("offload_s", "s", "time per step in copies to and from host memory or disk that nothing hides"),
    ("group_machines", "machines", "machines over which the most spread group of tp or ep ranks is, once per run"),
    (
        "group_machines_least",
        "machines",
        "machines that such a group needs with as many ranks as the largest machine has",
    ),
    ("tokens_per_s", "tokens/s", "trained tokens per second on all devices"),
    ("tokens_per_s_per_device", "tokens/s", "trained tokens per second and device"),
    ("batch_tokens", "tokens", "tokens per step"),
    ("micro_batches", "micro-batches", "micro-batches per rank and step"),
    ("mfu", "fraction", "model FLOPs (6·N, causal attention as half, no recompute) over the chip's dense peak"),
    ("hfu", "fraction", "executed FLOPs, recompute included, over the chip's dense peak"),
    ("model_flops_per_token", "FLOP", "FLOPs per token that mfu counts"),
    ("memory_bytes", "B", "device memory in use now"),
    ("memory_peak_bytes", "B", "largest device memory in use so far"),
    ("memory_reserved_bytes", "B", "device memory reserved by the allocator"),
    ("memory_used_fraction", "fraction", "reserved device memory over the memory of the device"),
    ("memory_weights_bytes", "B", "device memory of the weights"),
    ("memory_gradients_bytes", "B", "device memory of the gradients"),
    ("memory_optimizer_bytes", "B", "device memory of the optimizer states"),
    ("memory_master_bytes", "B", "device memory of the fp32 master weights"),
    ("memory_activations_bytes", "B", "device memory of the activations stored for the backward pass"),
    ("memory_loss_bytes", "B", "device memory of the logits and of what the loss stores"),
    ("memory_kv_bytes", "B", "device memory of the KV cache"),
    ("memory_buffers_bytes", "B", "device memory of all-gathered weights, gradient buckets and communication buffers"),
    ("memory_other_bytes", "B", "device memory of the framework, workspaces and fragmentation"),
    ("host_memory_bytes", "B", "host memory in use by this process"),
    ("offloaded_bytes", "B", "states and activations offloaded to host memory or disk"),
    ("loss", "nats", "mean cross-entropy over the tokens of the step"),
    ("val_loss", "nats", "mean cross-entropy over the held-out split"),
    ("aux_loss", "nats", "load-balance and router losses added to the loss"),
    ("grad_norm", "1", "L2 norm of all gradients before clipping"),
    ("lr", "1", "learning rate of the step"),
    ("loss_scale", "1", "fp16 loss scale"),
    (
        "skipped_steps_total",
        "steps",
        "steps whose update was skipped: fp16 overflow, values that are not finite, loss spikes",
    ),
    ("tokens_total", "tokens", "tokens trained so far"),
    ("batch_checksum", "1", "sum of the CRC-32 of the batch's rows over all ranks: equal for equal samples"),
    ("rank_spread_s", "s", "step time of the slowest rank minus that of the median rank"),
    ("slowest_rank", "rank", "rank with the longest step"),
    ("slowest_rank_data_s", "s", "time that the slowest rank waited for its batch beyond the median rank"),
    ("expert_load_max_over_mean", "1", "tokens of the busiest expert over the mean, in the most imbalanced layer"),
    ("expert_tail_fraction", "fraction", "share of experts with less than a tenth of the mean load"),
    ("expert_drop_fraction", "fraction", "share of token copies dropped at the capacity limit"),
    ("router_entropy", "nats", "entropy of the mean routing distribution, averaged over layers"),
    ("checkpoint_s", "s", "time from the request of a checkpoint to its commit"),
    ("checkpoint_stall_s", "s", "time that training lost to a checkpoint"),
    ("checkpoint_wait_s", "s", "part of checkpoint_stall_s in which a checkpoint waited for the one before it"),
    ("checkpoint_bytes", "B", "size of a checkpoint"),
    (
        "checkpoint_delta_saved_fraction",
        "fraction",
        "share of a full checkpoint's bytes that one stored as a delta saves",
    ),
    ("checkpoints_total", "checkpoints", "checkpoints committed"),
    ("restarts_total", "restarts", "times the run was resumed"),
    ("goodput_fraction", "fraction", "time spent on steps that were not lost to failures, over wall time"),
    ("repeated_fraction", "fraction", "share of the run's time in steps that a failure lost, when it was resumed"),
    (
        "restart_fraction",
        "fraction",
        "share of the run's time from failures to the next step, without idle time, when it was resumed",
    ),
    ("failures_total", "failures", "failures of the run when it was resumed"),
    ("run_s", "s", "time from the first step to the last"),
    ("step_usd", "USD", "cost per step"),
    ("run_usd", "USD", "cost of the run"),
    ("million_trained_tokens_usd", "USD", "cost per million trained tokens"),
)

_PRODUCT: _Rows = (
    ("ttft_s", "s", "time to first token: from sending a request to its first streamed token"),
    ("itl_s", "s", "inter-token latency: time between consecutive streamed tokens of a request"),
    ("itl_max_s", "s", "largest inter-token latency of a request"),
    ("tpot_s", "s", "time per output token: (e2e_s − ttft_s) / (tokens_out − 1)"),
    ("e2e_s", "s", "time from sending a request to its last token"),
    ("queue_s", "s", "time from receiving a request to scheduling it for the first time"),
    ("prefill_s", "s", "time from first scheduling a request to its first token"),
    ("decode_s", "s", "time from the first to the last token of a request"),
    ("tokens_in", "tokens", "prompt tokens per request"),
    ("tokens_out", "tokens", "generated tokens per request"),
    ("cached_tokens", "tokens", "prompt tokens per request found in the prefix cache"),
    (
        "repeated_tokens",
        "tokens",
        "prompt tokens per request that share a prefix with an earlier request, cached or not",
    ),
    ("prefix_source_request", "number", "request_number of the earlier request that shares this prefix"),
    ("request_number", "number", "sequence number of a request in order of arrival"),
    ("arrived_s", "s", "arrival time of a request on the engine's clock"),
    ("tokens_limit", "tokens", "most tokens that the completion of a request may have"),
    ("requests_total", "requests", "requests finished"),
    ("busy_s_total", "s", "time in which an engine step was running"),
    ("aborted_total", "requests", "requests whose client disconnected or whose deadline passed"),
    ("rejected_total", "requests", "requests rejected because the queue was full"),
    ("errors_total", "requests", "requests that ended in an error"),
    ("tokens_in_total", "tokens", "prompt tokens computed or found in the prefix cache"),
    ("tokens_out_total", "tokens", "tokens generated"),
    ("prefix_queries_total", "tokens", "prompt tokens looked up in the prefix cache"),
    ("prefix_hits_total", "tokens", "prompt tokens found in the prefix cache"),
    ("prefix_hit_fraction", "fraction", "prompt tokens found in the prefix cache over those looked up"),
    ("prefix_repeated_total", "tokens", "prompt tokens that share a prefix with an earlier request, cached or not"),
    ("prefix_evicted_total", "requests", "requests with a shorter prefix hit because blocks had been evicted"),
    ("preemptions_total", "requests", "preemptions of running requests"),
    ("recomputed_total", "tokens", "tokens dropped from the KV cache by preemption, which are recomputed"),
    ("adapters", "adapters", "different LoRA adapters in a step"),
    ("adapter_rows", "rows", "rows of a step that have a LoRA adapter, draft tokens included"),
    ("adapters_running", "adapters", "LoRA adapters of the running requests of a server"),
    ("adapters_waiting", "adapters", "LoRA adapters that only waiting requests have"),
    ("adapter_slots", "adapters", "LoRA adapters that a step may have at most"),
    ("drafted_total", "tokens", "draft tokens verified by speculative decoding"),
    ("accepted_total", "tokens", "draft tokens that became output"),
    ("acceptance_fraction", "fraction", "accepted_total over drafted_total"),
    (
        "speculation_speedup",
        "ratio",
        "measured time of plain decode steps for as many tokens, over that with drafts",
    ),
    ("running", "requests", "requests in the running batch"),
    ("waiting", "requests", "requests in the queue"),
    ("guard_blocked_fraction", "fraction", "share of the last 1,000 checked requests that a gateway's guards blocked"),
    ("guard_blocked_limit_fraction", "fraction", "most that the safety SLO allows of guard_blocked_fraction"),
    ("guard_refusal_fraction", "fraction", "share of the last 1,000 checked answers in which the model refuses"),
    ("guard_refusal_limit_fraction", "fraction", "most that the safety SLO allows of guard_refusal_fraction"),
    ("guard_s", "s", "mean time of a check by guards"),
    ("guard_limit_s", "s", "most that the safety SLO allows of guard_s"),
    ("engine_step_s", "s", "wall time per engine step"),
    ("engine_schedule_s", "s", "part of engine_step_s in the scheduler"),
    ("engine_launch_s", "s", "part of engine_step_s in which the host prepares and launches the step"),
    ("engine_wait_s", "s", "part of engine_step_s in which the host waits for the device"),
    ("engine_roofline_fraction", "fraction", "roofline time of an engine step over its measured time"),
    ("prefill_tokens", "tokens", "prompt tokens computed per engine step"),
    ("prefill_rows", "requests", "prompts with tokens in the engine step"),
    ("decode_tokens", "tokens", "tokens generated per engine step"),
    ("context_tokens", "tokens", "keys that the decodes of an engine step read"),
    ("prefill_pairs", "pairs", "pairs of query and key in the prompts of an engine step"),
    ("prefill_past", "tokens", "tokens of these prompts that were computed or cached before the engine step"),
    ("temperature", "", "sampling temperature of a request, where it is above 0"),
    ("drawn_tokens", "tokens", "tokens of the engine step that are drawn at a temperature above 0"),
    ("recorded_steps", "steps", "engine steps that this record stands for: the earlier ones of them were not recorded"),
    ("calibration_step_s", "s", "time of an engine step of a given shape, run before the first request"),
    ("expert_tokens_total", "tokens", "choices of an expert for a token in serving, over all layers and experts"),
    (
        "expert_tokens",
        "tokens",
        "tokens per expert over the last 10 to 20 s of serving, in the most imbalanced layer (labels layer, expert)",
    ),
    ("kv_used_fraction", "fraction", "share of the KV-cache blocks in use"),
    ("kv_capacity_tokens", "tokens", "tokens that the KV cache can hold"),
    ("dp_ranks", "count", "copies of attention, each with a KV cache and requests of its own (serve.dp_attention)"),
    ("dp_running_max", "count", "running sequences of the dp rank that has most"),
    ("dp_kv_used_max_fraction", "fraction", "share of the KV-cache blocks in use on the dp rank where it is largest"),
    ("kv_host_capacity_tokens", "tokens", "tokens of evicted KV blocks that host memory can hold"),
    ("kv_host_used_fraction", "fraction", "share of the KV blocks in host memory that hold something"),
    ("kv_offloaded_total", "blocks", "KV blocks copied to host memory when the device evicted them"),
    ("kv_loaded_total", "blocks", "KV blocks copied back from host memory"),
    ("kv_swapped_in_total", "tokens", "tokens of preempted requests loaded from host memory, not recomputed"),
    ("kv_load_declined_total", "tokens", "tokens in host memory that were cheaper to recompute than to load"),
    ("kv_sent_bytes_total", "B", "bytes of KV blocks that a prefill server sent to decode servers"),
    ("kv_send_wait_s_total", "s", "time that a prefill server's connections spent sending, slow readers included"),
    ("decode_servers", "servers", "decode servers connected to a prefill server"),
    ("kv_received_bytes_total", "B", "bytes of KV blocks that a decode server received"),
    ("kv_fetched_total", "requests", "requests whose KV blocks came from the prefill server"),
    (
        "kv_fetch_failed_total",
        "requests",
        "requests that a decode server computed, as their blocks did not come",
    ),
    ("kv_fetch_wait_s_total", "s", "time from the arrival of requests to that of their KV blocks, summed"),
    ("prefill_connected", "flag", "1 while a decode server is connected to its prefill server"),
    ("concurrency", "requests", "requests of the given lengths that the KV cache can hold"),
    ("requests_per_s", "requests/s", "requests finished per second"),
    ("tokens_in_per_s", "tokens/s", "prompt tokens per second"),
    ("tokens_out_per_s", "tokens/s", "generated tokens per second"),
    ("goodput_requests_per_s", "requests/s", "requests per second that meet every objective"),
    ("slo_met_fraction", "fraction", "share of requests that meet every objective"),
    ("replicas", "replicas", "copies of the model that serve"),
    ("devices", "devices", "devices in use"),
    ("million_tokens_usd", "USD", "cost per million served tokens"),
    ("device_hour_usd", "USD", "cost per device and hour"),
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


def _kind(name: str) -> GaugeKind:
    return "counter" if name.endswith("_total") else "histogram" if name in _PER_REQUEST else "value"


GAUGES: dict[str, Gauge] = (
    _gauges("inner", _INNER) | _gauges("training", _TRAINING) | _gauges("product", _PRODUCT + _PERCENTILES)
)
