"""What a throughput benchmark and its engine set by themselves, and published tables therefore leave out.

A table says "max load"; how many requests were queued, how many of them run at once, and how a step is made up follows
from the defaults of the engine:

    TensorRT-LLM   its repository at 1.0 and 1.2: docs/source/performance/perf-overview.md (requests, options) and
                   tensorrt_llm/bench/build/tuning.py (the largest batch)
    vLLM           vllm/engine/arg_utils.py: gpu_memory_utilization; max_num_seqs and max_num_batched_tokens by device
                   (from 0.9 larger on GPUs of at least 70 GiB other than A100, pull request 17885);
                   vllm/benchmarks/serve.py: 1,000 prompts
    SGLang         python/sglang/srt/server_args.py: chunked_prefill_size; running requests bounded by the KV cache

All read on 2026-11-19; nothing here was fitted.
"""

import re
from dataclasses import dataclass, replace
from math import ceil

from armillary.spec.hardware import Chip

CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
"""batch sizes with a CUDA graph; a step that only decodes is padded to the next"""
MOST_RUNNING = 4096
QUEUED = ((256, 30_000), (2500, 3000), (10_000, 1500))
"""(input and output tokens, requests): fewer the longer they are, 1,000 beyond"""
LARGE_BYTES = 70e9
"""memory of a device on which vLLM runs more requests: 70 GiB, and the vendor says 80 GB where the driver has 79 GiB"""
DRIVER = 1.06
"""bytes that the driver reports, of which engines take a share, over those that the vendor states: 85 GB where A100 and
H100 have '80 GB', 150 where H200 has 141"""


@dataclass(frozen=True, kw_only=True)
class MaxLoad:
    """How an engine runs requests that are queued all at once."""

    requests: int
    most_running: int
    """at once, per rank with a KV cache of its own"""
    usable: float
    """share of the device's memory that is filled"""
    chunk: int
    """prompt tokens of a step"""
    pads: bool = False
    """decode steps are padded to CAPTURED"""


def max_load(engine: str, note: str, tokens: int, chip: Chip) -> MaxLoad:
    """The benchmark of `engine`, whose requests have `tokens` each; what a row's note states has priority."""
    load = _usual(engine.lower(), tokens, chip)
    if queued := re.search(r"\b(\d[\d,]*) (?:requests|prompts)(?! run)", note):
        load = replace(load, requests=_count(queued))
    if running := re.search(r"at most (\d[\d,]*) requests run", note):
        load = replace(load, most_running=_count(running))
    return load


def _count(stated: re.Match[str]) -> int:
    return max(1, int(stated.group(1).replace(",", "")))


def _usual(engine: str, tokens: int, chip: Chip) -> MaxLoad:
    if engine.startswith("tensorrt"):
        queued = queued_requests(tokens)
        return MaxLoad(requests=queued, most_running=MOST_RUNNING, usable=0.95, chunk=8192, pads=True)
    if engine.startswith("vllm"):
        new = (release(engine) or (0, 9)) >= (0, 9)
        large = new and (chip.memory_bytes or 0.0) >= LARGE_BYTES and not chip.name.startswith("a100")
        most, chunk = (1024, 8192) if large else (256, 2048)
        return MaxLoad(requests=1000, most_running=most, usable=0.9 * DRIVER, chunk=chunk)
    return MaxLoad(requests=1000, most_running=MOST_RUNNING, usable=0.88 * DRIVER, chunk=8192)


def release(engine: str) -> tuple[int, int] | None:
    """'vLLM 0.10.1' -> (0, 10); None where no release is named."""
    numbers = re.search(r"(\d+)\.(\d+)", engine)
    return (int(numbers.group(1)), int(numbers.group(2))) if numbers else None


def queued_requests(tokens: int) -> int:
    """Requests of `tokens` each that TensorRT-LLM's benchmark queues at once."""
    return next((count for most, count in QUEUED if tokens <= most), 1000)


def captured_sizes(requests: int, stages: int) -> tuple[int, ...]:
    """Batch sizes with a graph where the KV cache holds so many requests: up to the largest batch of a stage, which is
    rounded up and captured too."""
    rows = min(requests, MOST_RUNNING) / stages
    step = 32 if rows < 256 else 128 if rows < 1024 else 256
    largest = max(64, step * ceil(rows / step))
    return (*(size for size in CAPTURED if size < largest), largest)
