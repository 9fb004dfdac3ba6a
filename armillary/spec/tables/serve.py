"""What a service is asked for: the recipe tables [serve], [traffic], [objective] and [cost].

Few dials with good defaults; what is left out is derived by the rule in its docstring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from armillary.spec.tables.checks import above_zero, at_least, refuse

MEMORY_FRACTION = {"gpu": 0.9, "cpu": 0.7}
"""of a device's memory where serve.memory_fraction is left out: vLLM's for GPUs; a CPU's memory is others' as well"""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """How the engine is set up."""

    max_model_len: int | None = None
    """longest prompt and answer together; none: the model's context, or what the KV cache can hold if less"""
    kv_bytes: int | None = None
    """size of the KV cache on a device; none: what memory_fraction leaves when weights and working memory are in"""
    memory_fraction: float | None = None
    """share of a device's memory that weights, working memory and KV cache take together; none: 0.9 of a GPU, 0.7 of
    what a CPU's process may use"""
    kv_dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """number format of the KV cache; auto: that of the activations"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """dtype in which weights are loaded and computed with; auto: 16 bits (the stored ones, else bf16) where prompts and
    decoding are measured to run at least 1.15 × as fast in them as in fp32, else fp32"""
    weights: Literal["auto", "int8", "fp8"] = "auto"
    """number format of the layers' weights; auto: as loaded; rounded when they are loaded: int8 on a CPU, fp8 on a
    GPU"""
    threads: int | None = None
    """threads that compute on a CPU; none: one for each core, in a server one fewer where decode steps spend more time
    in torch calls than in arithmetic: its own process and clients on the machine need a core"""
    block_tokens: int = 16
    """tokens of a KV block"""
    max_tokens_per_step: int = 2048
    """token budget of an engine step: decodes first, prefill chunks fill the rest"""
    max_running: int = 256
    """requests decoded together at most"""
    batching: Literal["none", "static", "dynamic", "continuous"] = "continuous"
    """how requests are put together; all but continuous are there to be compared with it"""
    prefix_cache: bool = True
    """keep the KV blocks of finished prompts for those that begin alike"""
    prefill_tokens: int | None = None
    """prompt tokens a step while others decode, at most, to keep their gaps even; none: what the step has left"""
    prefill_slowdown: float | None = None
    """with prompts in it, a step lasts at most so many times what its decodes take alone, learnt from steps before;
    none: 2.0 where answers are streamed (a server, LLM.stream) and no more requests wait for their first token than
    for their next, no limit else; none and prefill_tokens set: those alone count"""
    max_waiting: int | None = None
    """requests in the queue at most; more are refused at once; none: no limit"""
    max_wait_s: float | None = None
    """a request that has not started by then is given up; none: it waits, in a server 600 s"""
    ageing_s: float = 60.0
    """waiting time that makes up for one step of priority, so nobody starves; 0: first come, first served, and a server
    refuses requests with a priority"""
    batch_window_s: float = 0.05
    """dynamic batching: how long the first of a batch waits for others"""
    overlap: bool = True
    """decide the next step while one runs, where there is a GPU"""
    graphs: bool = True
    """steps as CUDA graphs, where there is a GPU; captured when the engine starts"""
    check_every: int = 0
    """steps between checks of every invariant of scheduler and cache; 0: never"""
    max_answer: int | None = None
    """server: tokens of an answer at most; none: what the model's length leaves"""
    max_body_bytes: int = 4_000_000
    """server: size of a request's body at most"""
    timeout_s: float | None = None
    """server: a request is given up so long after it came, however far its answer is; none: never"""
    drain_s: float = 30.0
    """server: on SIGTERM, how long requests under way may take to finish"""
    frozen_s: float = 5.0
    """server: an engine that is silent for so long is not ready, nor one whose step takes as long and 4 times what is
    expected; it beats twice a second during a step"""
    hung_s: float | None = 120.0
    """server: an engine that is silent for so long is ended and started again, and one whose step takes as long and 20
    times what is expected; none: never"""
    name: str = ""
    """server: what clients call the model; empty: its own name"""
    api_key_file: str = ""
    """server: file with one API key a line; empty: anybody may ask"""
    tools: Literal["auto", "hermes", "llama3", "mistral"] = "auto"
    """server: how tool calls are written; auto: as the chat template says"""
    generation_config: Literal["auto", "none"] = "auto"
    """sampling parameters that a request leaves out; auto: as the model's generation_config.json says; none: neutral
    ones"""
    trust_request_chat_template: bool = False
    """server: requests may bring a chat template of their own; Jinja's sandbox holds it, but it can take all the time
    and memory it likes"""
    otlp: str = ""
    """server: OpenTelemetry collector that gets a trace of every request; empty: none"""

    def decides_ahead(self, device: str) -> bool:
        """Whether the next step is decided while one runs on a device of this kind: on a CPU a step is over when its
        launch returns."""
        return self.overlap and device != "cpu"

    def __post_init__(self) -> None:
        at_least(self, "serve", 1, "max_model_len", "kv_bytes", "block_tokens", "max_tokens_per_step", "max_running")
        at_least(self, "serve", 1, "threads", "prefill_tokens", "max_answer", "max_body_bytes")
        at_least(self, "serve", 0, "max_waiting", "ageing_s", "batch_window_s", "check_every", "drain_s")
        above_zero(self, "serve", "max_wait_s", "timeout_s", "frozen_s", "hung_s")
        above_zero(self, "serve", "memory_fraction", most=1)
        if self.prefill_slowdown is not None and not 1.0 < self.prefill_slowdown < float("inf"):
            raise refuse(self, "serve", "prefill_slowdown", "above 1: prompts take some time", 2.0)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What arrives."""

    requests_per_s: float = 1.0
    """mean arrival rate"""
    tokens_in: int = 512
    """mean prompt length"""
    tokens_out: int = 128
    """mean answer length"""
    arrival: Literal["poisson", "gamma", "constant"] = "poisson"
    """how arrivals are spaced"""
    burstiness: float = 1.0
    """gamma: coefficient of variation of the gaps; 1 is Poisson, more is burstier"""
    shared_prefix: int = 0
    """prompt tokens that all requests have in common"""
    duration_s: float = 60.0
    """how long a load test or simulation lasts"""
    seed: int = 0
    """of arrivals and prompts"""

    def __post_init__(self) -> None:
        above_zero(self, "traffic", "requests_per_s", "burstiness", "duration_s")
        at_least(self, "traffic", 1, "tokens_in", "tokens_out")
        at_least(self, "traffic", 0, "shared_prefix", "seed")
        if self.shared_prefix > self.tokens_in:
            raise refuse(self, "traffic", "shared_prefix", f"at most tokens_in={self.tokens_in}")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What serving must meet; what is left out is not asked for."""

    ttft_p99_s: float | None = None
    """time to first token, 99th percentile"""
    itl_p99_s: float | None = None
    """gap between consecutive tokens, 99th percentile"""
    tpot_p99_s: float | None = None
    """(end-to-end − TTFT) / (tokens − 1), 99th percentile"""
    e2e_p99_s: float | None = None
    """request sent to last token, 99th percentile"""

    def __post_init__(self) -> None:
        above_zero(self, "objective", "ttft_p99_s", "itl_p99_s", "tpot_p99_s", "e2e_p99_s")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What devices cost: rented by the hour, or owned."""

    owned: bool = False
    """bought rather than rented"""
    usd_per_device_hour: float | None = None
    """rent of one device; none: the provider's in the catalogue"""
    provider: str = ""
    """who rents it out; empty: the median of all"""
    spot: bool = False
    """interruptible offers"""
    usd_per_device: float | None = None
    """purchase of one device with its share of the node; none: the catalogue's reported price"""
    years: float = 4.0
    """owned: time over which the purchase is written off"""
    utilisation: float = 0.8
    """owned: share of that time in use"""
    usd_per_kwh: float = 0.1
    """owned: price of electricity"""
    pue: float = 1.3
    """owned: power of the whole site over power of the machines, cooling included"""
    staff_usd_per_year: float = 0.0
    """owned: people, for all devices together"""

    def __post_init__(self) -> None:
        at_least(self, "cost", 0, "usd_per_device_hour", "usd_per_device", "usd_per_kwh", "staff_usd_per_year")
        at_least(self, "cost", 1, "pue")
        above_zero(self, "cost", "years")
        above_zero(self, "cost", "utilisation", most=1)
