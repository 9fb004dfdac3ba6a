"""Makes the synthetic vLLM metrics pages beside it (synthetic_vllm_*.prom): names, labels, buckets and HELP lines are
those of vLLM 0.10.1 (V1 engine), the figures are simulated.

vLLM itself needs a GPU, so the figures come from a small model of its scheduler: every request in the batch decodes a
token a step, prompts are computed in chunks up to the step's budget, a full KV cache throws the newest request out.
`python tests/diagnosis/data/make_vllm_pages.py` writes the files again, byte for byte.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
LATENCY = [
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
]
TTFT = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
]
TPOT = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0]
STEP = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A server and what arrives at it."""

    clients: int = 64
    """each asks again as soon as it has its answer"""
    rate: float = 0.0
    """requests a second besides, whatever happens"""
    tokens_in: int = 600
    tokens_out: int = 200
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_gpu_blocks: int = 27_000
    fixed_s: float = 0.011
    """of a step: reading the weights"""
    token_s: float = 24e-6
    """of a token in it"""
    cache_dtype: str = "auto"
    prefix_caching: bool = True
    seconds: float = 120.0
    seed: int = 7


@dataclass
class Request:
    """One on its way."""

    tokens_in: int
    tokens_out: int
    arrived: float
    scheduled: float | None = None
    first: float | None = None
    last: float = 0.0
    computed: int = 0
    produced: int = 0
    counted: bool = False
    done: bool = False

    @property
    def blocks(self) -> int:
        return -(-(self.computed + 1) // 16)


@dataclass
class Model:
    """The server."""

    case: Case
    page: Page
    now: float = 0.0
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)

    def run(self, until: float) -> None:
        draw = random.Random(self.case.seed + int(self.now * 1e3))
        if not self.now:
            self.waiting.extend(self._request(draw) for _ in range(self.case.clients))
        coming = self.now + draw.expovariate(self.case.rate) if self.case.rate else float("inf")
        while self.now < until:
            while coming <= self.now:
                self.waiting.append(replace(self._request(draw), arrived=coming))
                coming += draw.expovariate(self.case.rate)
            if not self._step(draw):
                self.now = min(coming, until)
        self.page.state(len(self.running), len(self.waiting), self._used() / self.case.num_gpu_blocks)

    def _request(self, draw: random.Random) -> Request:
        lengths = (
            max(4, int(draw.lognormvariate(0, 0.5) * mean / 1.13))
            for mean in (self.case.tokens_in, self.case.tokens_out)
        )
        tokens_in, tokens_out = (min(length, 8000) for length in lengths)
        return Request(tokens_in, tokens_out, self.now)

    def _used(self) -> int:
        return sum(one.blocks for one in self.running)

    def _step(self, draw: random.Random) -> bool:
        """One engine step; False where there is nothing to do."""
        budget, work = self.case.max_num_batched_tokens, []
        for one in self.running:
            need = one.tokens_in + one.produced - one.computed
            take = min(need, budget)
            budget -= take
            work.append((one, take))
        used = self._used()
        while self.waiting and budget and len(self.running) < self.case.max_num_seqs:
            one = self.waiting[0]
            used += -(-(one.tokens_in + one.produced) // 16)
            if used > self.case.num_gpu_blocks:
                break
            self.waiting.popleft()
            if one.scheduled is None:
                one.scheduled = self.now
            take = min(one.tokens_in + one.produced - one.computed, budget)
            budget -= take
            self.running.append(one)
            work.append((one, take))
        if not work:
            return False
        self.now += self.case.fixed_s + self.case.token_s * sum(take for _, take in work)
        self._after(work, draw)
        return True

    def _after(self, work: list[tuple[Request, int]], draw: random.Random) -> None:
        prompts = answers = 0
        for one, take in work:
            one.computed += take
            if not take or one.computed < one.tokens_in + one.produced:
                continue
            prompts += 0 if one.counted else one.tokens_in
            one.counted = True
            answers += 1
            self._token(one)
            if one.produced >= one.tokens_out:
                one.done = True
                self.page.ended(one, self.now)
                if self.case.clients:
                    self.waiting.append(self._request(draw))
        self.page.step(prompts, answers)
        self.running = [one for one in self.running if not one.done]
        while self._used() > self.case.num_gpu_blocks:
            thrown = self.running.pop()
            thrown.computed = 0
            self.waiting.appendleft(thrown)
            self.page.preempted()

    def _token(self, one: Request) -> None:
        one.produced += 1
        if one.first is None:
            one.first = self.now
            self.page.first(self.now - one.arrived)
        else:
            self.page.gap(self.now - one.last)
        one.last = self.now


class Page:
    """The metrics of vLLM 0.10.1."""

    def __init__(self, case: Case) -> None:
        self.registry, self.labels = CollectorRegistry(), {"model_name": MODEL, "engine": "0"}
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self.running = gauge("num_requests_running", "Number of requests in model execution batches.")
        self.waiting = gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        self.kv = gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self.queries = counter("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.")
        self.hits = counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.")
        self.preemptions = counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self.prompts = counter("prompt_tokens", "Number of prefill tokens processed.")
        self.answers = counter("generation_tokens", "Number of generation tokens processed.")
        self.success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            [*self.labels, "finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort"):
            self.success.labels(**self.labels, finished_reason=reason)
        self.prompt = histogram("request_prompt_tokens", "Number of prefill tokens processed.", LENGTHS)
        self.answer = histogram("request_generation_tokens", "Number of generation tokens processed.", LENGTHS)
        self.iteration = histogram("iteration_tokens_total", "Histogram of number of tokens per engine_step.", STEP)
        self.ttft = histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", TTFT)
        self.tpot = histogram("time_per_output_token_seconds", "Histogram of time per output token in seconds.", TPOT)
        self.e2e = histogram("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", LATENCY)
        phase = "Histogram of time spent in {} phase for request."
        self.queue = histogram("request_queue_time_seconds", phase.format("WAITING"), LATENCY)
        self.inference = histogram("request_inference_time_seconds", phase.format("RUNNING"), LATENCY)
        self.prefill = histogram("request_prefill_time_seconds", phase.format("PREFILL"), LATENCY)
        self.decode = histogram("request_decode_time_seconds", phase.format("DECODE"), LATENCY)
        self._info(case)

    def _info(self, case: Case) -> None:
        told = {
            "block_size": 16,
            "cache_dtype": case.cache_dtype,
            "calculate_kv_scales": False,
            "cpu_offload_gb": 0,
            "enable_prefix_caching": case.prefix_caching,
            "engine": 0,
            "gpu_memory_utilization": 0.9,
            "is_attention_free": False,
            "num_cpu_blocks": None,
            "num_gpu_blocks": case.num_gpu_blocks,
            "num_gpu_blocks_override": None,
            "sliding_window": None,
            "swap_space": 4,
        }
        info = Gauge(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", list(told), registry=self.registry
        )
        info.labels(**{name: str(value) for name, value in told.items()}).set(1)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"vllm:{name}", about, list(self.labels), registry=self.registry).labels(**self.labels)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"vllm:{name}", about, list(self.labels), registry=self.registry).labels(**self.labels)

    def _histogram(self, name: str, about: str, buckets: list[float]) -> Histogram:
        made = Histogram(f"vllm:{name}", about, list(self.labels), buckets=buckets, registry=self.registry)
        return made.labels(**self.labels)

    def state(self, running: int, waiting: int, kv: float) -> None:
        self.running.set(running)
        self.waiting.set(waiting)
        self.kv.set(kv)

    def step(self, prompts: int, answers: int) -> None:
        self.iteration.observe(prompts + answers)
        self.prompts.inc(prompts)
        self.queries.inc(prompts)
        self.answers.inc(answers)

    def preempted(self) -> None:
        self.preemptions.inc()

    def first(self, seconds: float) -> None:
        self.ttft.observe(seconds)

    def gap(self, seconds: float) -> None:
        self.tpot.observe(seconds)

    def ended(self, one: Request, now: float) -> None:
        assert one.scheduled is not None and one.first is not None
        self.success.labels(**self.labels, finished_reason="length").inc()
        self.e2e.observe(now - one.arrived)
        self.queue.observe(one.scheduled - one.arrived)
        self.prefill.observe(one.first - one.scheduled)
        self.decode.observe(now - one.first)
        self.inference.observe(now - one.scheduled)
        self.prompt.observe(one.tokens_in)
        self.answer.observe(one.produced)

    def text(self) -> str:
        return bytes(generate_latest(self.registry)).decode()


def pages(case: Case, *until: float) -> Iterator[str]:
    """The page at some moments."""
    disable_created_metrics()
    model = Model(case, Page(case))
    for moment in until or (case.seconds,):
        model.run(moment)
        yield model.page.text()


CASES = {
    "batch_limited": Case(clients=192, max_num_seqs=32),
    "kv_full": Case(clients=256, num_gpu_blocks=3000, tokens_out=400),
    "saturated": Case(clients=0, rate=40.0, tokens_in=2400, tokens_out=40),
    "interference": Case(clients=24, tokens_in=5000, tokens_out=400, max_num_batched_tokens=8192),
    "healthy": Case(clients=24),
}

if __name__ == "__main__":
    for name, case in CASES.items():
        path = Path(__file__).parent / f"synthetic_vllm_{name}.prom"
        path.write_text(next(pages(case)))
        print(path, path.stat().st_size)
