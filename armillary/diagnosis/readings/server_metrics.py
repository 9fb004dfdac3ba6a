"""What servers call their gauges on a metrics page, and what their flags are called: facts, one table per server.

vLLM: vllm/v1/metrics/loggers.py, names of engines before it last; SGLang: its production metrics page; Text Generation
Inference: its metrics page; Triton: metrics.md of its server, and the metrics of its TensorRT-LLM backend; ours: the
gauge's name with armillary_ before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from armillary.spec.gauges import GAUGES, former_names, prometheus_name

Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Server:
    """One kind of server: which names its metrics page has for each gauge, the present name first."""

    name: str  # as in Reading.by
    prefix: str  # of all its names
    values: Names
    totals: Names  # counters
    histograms: Names
    durations: Names = field(default_factory=dict)  # gauge -> counters of microseconds and of requests, per model
    step_tokens: str = ""  # histogram of the tokens of an engine step
    info: str = ""  # metric whose labels are settings
    adapters: str = ""  # metric whose labels list LoRA adapters, and whose value is when they were so
    flags: Mapping[str, str] = field(default_factory=dict)  # key of our recipe -> its flag, with {value}
    replica: str = ""  # what a person does for one more replica


_VLLM = Server(
    name="vllm",
    prefix="vllm:",
    info="vllm:cache_config_info",
    adapters="vllm:lora_requests_info",
    step_tokens="vllm:iteration_tokens_total",
    values={
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_used_fraction": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    },
    totals={
        "preemptions_total": ("vllm:num_preemptions_total",),
        "prefix_queries_total": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        "prefix_hits_total": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "tokens_in_total": ("vllm:prompt_tokens_total",),
        "tokens_out_total": ("vllm:generation_tokens_total",),
        "requests_total": ("vllm:request_success_total",),
    },
    histograms={
        "ttft_s": ("vllm:time_to_first_token_seconds",),
        "itl_s": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "tpot_s": ("vllm:request_time_per_output_token_seconds",),
        "e2e_s": ("vllm:e2e_request_latency_seconds",),
        "queue_s": ("vllm:request_queue_time_seconds", "vllm:time_in_queue_requests"),
        "prefill_s": ("vllm:request_prefill_time_seconds",),
        "decode_s": ("vllm:request_decode_time_seconds",),
        "tokens_in": ("vllm:request_prompt_tokens",),
        "tokens_out": ("vllm:request_generation_tokens",),
    },
    flags={
        "serve.max_running": "--max-num-seqs {value}",
        "serve.max_tokens_per_step": "--max-num-batched-tokens {value}",
        "serve.kv_dtype": "--kv-cache-dtype {value}",
        "serve.prefix_cache": "--enable-prefix-caching",
        "serve.max_adapters": "--max-loras {value}",
    },
    replica="one more server behind a router, or --data-parallel-size {value}",
)

_SGLANG = Server(
    name="sglang",
    prefix="sglang:",
    values={
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_used_fraction": ("sglang:token_usage",),
        "kv_capacity_tokens": ("sglang:max_total_num_tokens",),
        "prefix_hit_fraction": ("sglang:cache_hit_rate",),
    },
    totals={
        "preemptions_total": ("sglang:num_retracted_requests_total",),
        "tokens_in_total": ("sglang:prompt_tokens_total",),
        "tokens_out_total": ("sglang:generation_tokens_total",),
        "requests_total": ("sglang:num_requests_total",),
        "prefix_hits_total": ("sglang:cached_tokens_total",),
    },
    histograms={
        "ttft_s": ("sglang:time_to_first_token_seconds",),
        "itl_s": ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        "e2e_s": ("sglang:e2e_request_latency_seconds",),
        "queue_s": ("sglang:queue_time_seconds", "sglang:request_queue_time_seconds"),
        "tokens_in": ("sglang:prompt_tokens_histogram",),
        "tokens_out": ("sglang:generation_tokens_histogram",),
    },
    flags={
        "serve.max_running": "--max-running-requests {value}",
        "serve.max_tokens_per_step": "--chunked-prefill-size {value}",
        "serve.kv_dtype": "--kv-cache-dtype {value}_e5m2",
        "serve.prefix_cache": "without --disable-radix-cache",
    },
    replica="one more server behind a router, or --dp-size {value}",
)

_TGI = Server(
    name="tgi",
    prefix="tgi_",
    values={"running": ("tgi_batch_current_size",), "waiting": ("tgi_queue_size",)},
    totals={"requests_total": ("tgi_request_success", "tgi_request_success_total", "tgi_request_count")},
    histograms={
        "tpot_s": ("tgi_request_mean_time_per_token_duration",),
        "e2e_s": ("tgi_request_duration",),
        "queue_s": ("tgi_request_queue_duration",),
        "tokens_in": ("tgi_request_input_length",),
        "tokens_out": ("tgi_request_generated_tokens",),
    },
    flags={
        "serve.max_running": "--max-batch-size {value}",
        "serve.max_tokens_per_step": "--max-batch-prefill-tokens {value}",
        "serve.kv_dtype": "--kv-cache-dtype {value}_e5m2",
        "serve.prefix_cache": "USE_PREFIX_CACHING=1",
    },
    replica="one more server behind a load balancer",
)

_REQUESTS, _BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
_TRITON = Server(
    name="triton",
    prefix="nv_",
    values={
        "running": (f"{_REQUESTS}{{request_type=scheduled}}",),
        "waiting": (f"{_REQUESTS}{{request_type=waiting}}", "nv_inference_pending_request_count"),
        "kv_used_fraction": (f"{_BLOCKS}{{kv_cache_block_type=fraction}}",),
    },
    totals={},
    histograms={"tokens_in": ("nv_llm_input_token_len",), "tokens_out": ("nv_llm_output_token_len",)},
    durations={"e2e_s": ("nv_inference_request_duration_us", "nv_inference_request_success")},
    flags={
        "serve.max_running": "--max_batch_size {value} of trtllm-build, and max_batch_size of the model's config.pbtxt",
        "serve.max_tokens_per_step": "--max_num_tokens {value} of trtllm-build",
        "serve.kv_dtype": "a checkpoint converted with --kv_cache_dtype {value}",
        "serve.prefix_cache": "enable_kv_cache_reuse of the model's config.pbtxt",
    },
    replica="one more instance of the model behind a load balancer",
)


def _ours() -> Server:
    def of_kind(kind: str) -> Names:
        names = (name for name, gauge in GAUGES.items() if gauge.kind == kind)
        return {name: tuple(map(prometheus_name, (name, *former_names(name)))) for name in names}

    return Server(
        name="armillary",
        prefix="armillary_",
        values=of_kind("value"),
        totals=of_kind("counter"),
        histograms=of_kind("histogram"),
        info="armillary_serve_info",
        replica="one more server, or a gateway over {value}",
    )


SERVERS = {server.name: server for server in (_ours(), _VLLM, _SGLANG, _TGI, _TRITON)}
