"""What TensorRT-LLM's throughput benchmark sets by itself, and its published tables therefore leave out.

All from its repository at 1.0 and 1.2: docs/source/performance/perf-overview.md (requests, options) and
tensorrt_llm/bench/build/tuning.py (the largest batch). Nothing here was fitted.
"""

from math import ceil

CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
"""batch sizes with a CUDA graph; a step that only decodes is padded to the next"""
MOST_RUNNING = 4096
QUEUED = ((256, 30_000), (2500, 3000), (10_000, 1500))
"""(input and output tokens, requests): fewer the longer they are, 1,000 beyond"""


def queued_requests(tokens: int) -> int:
    """Requests of `tokens` each that are queued at once."""
    return next((count for most, count in QUEUED if tokens <= most), 1000)


def captured_sizes(requests: int, stages: int) -> tuple[int, ...]:
    """Batch sizes with a graph where the KV cache holds so many requests: up to the largest batch of a stage, which is
    rounded up and captured too."""
    rows = min(requests, MOST_RUNNING) / stages
    step = 32 if rows < 256 else 128 if rows < 1024 else 256
    largest = max(64, step * ceil(rows / step))
    return (*(size for size in CAPTURED if size < largest), largest)
