"""The tables of a recipe about requests: which ones come, what their answers owe them, what they cost, and how a load
test sends them: [traffic], [objective], [cost] and [load]."""

from dataclasses import dataclass, replace
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec.tables.checks import above_zero, at_least, refuse


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Arriving requests."""

    requests_per_s: float = 1.0
    """mean arrival rate"""
    tokens_in: int = 512
    """mean prompt length"""
    tokens_out: int = 128
    """mean completion length"""
    arrival: Literal["poisson", "gamma", "constant"] = "poisson"
    """distribution of the times between arrivals"""
    burstiness: float = 1.0
    """gamma: coefficient of variation of the times between arrivals; 1 is Poisson, more is burstier"""
    shared_prefix: int = 0
    """prompt tokens that all requests share"""
    long_requests_per_s: float = 0.0
    """rate of a second stream beside those requests, with prompts and completions of lengths of its own; 0: none"""
    long_tokens_in: int = 8192
    """prompt length in the second stream, which shares no prefix"""
    long_tokens_out: int = 64
    """completion length in the second stream"""
    duration_s: float = 60.0
    """duration of a load test or simulation"""
    seed: int = 0
    """of arrivals and prompts"""

    def __post_init__(self) -> None:
        above_zero(self, "traffic", "requests_per_s", "burstiness", "duration_s")
        at_least(self, "traffic", 1, "tokens_in", "tokens_out", "long_tokens_in", "long_tokens_out")
        at_least(self, "traffic", 0, "shared_prefix", "seed", "long_requests_per_s")
        if self.shared_prefix > self.tokens_in:
            raise refuse(self, "traffic", "shared_prefix", f"at most tokens_in={self.tokens_in}")

    @property
    def streams(self) -> "tuple[Traffic, ...]":
        """Each stream as traffic of its own."""
        if not self.long_requests_per_s:
            return (self,)
        short = replace(self, long_requests_per_s=0.0)
        long = replace(
            short,
            requests_per_s=self.long_requests_per_s,
            tokens_in=self.long_tokens_in,
            tokens_out=self.long_tokens_out,
            shared_prefix=0,
        )
        return short, long

    @property
    def total_per_s(self) -> float:
        """Requests of all streams."""
        return self.requests_per_s + self.long_requests_per_s

    @property
    def tokens_in_per_s(self) -> float:
        return sum(each.requests_per_s * each.tokens_in for each in self.streams)

    @property
    def tokens_out_per_s(self) -> float:
        return sum(each.requests_per_s * each.tokens_out for each in self.streams)

    @property
    def tokens_per_request(self) -> tuple[float, float]:
        """Mean lengths of prompt and completion over all streams."""
        return self.tokens_in_per_s / self.total_per_s, self.tokens_out_per_s / self.total_per_s

    @property
    def running_tokens_in(self) -> int:
        """Mean prompt length of the requests that decode at a time: each counts for as long as it does."""
        total = sum(each.requests_per_s * each.tokens_out * each.tokens_in for each in self.streams)
        return round(total / self.tokens_out_per_s)

    @property
    def running_tokens_out(self) -> int:
        """Mean completion length of the requests that decode at a time."""
        return round(sum(each.requests_per_s * each.tokens_out**2 for each in self.streams) / self.tokens_out_per_s)

    def text(self) -> str:
        """'8 requests/s of 1,000 + 250 tokens and 1.5 of 8,192 + 64'."""
        lengths = [f"{each.tokens_in:,} + {each.tokens_out:,}" for each in self.streams]
        second = f" and {self.long_requests_per_s:g} of {lengths[1]}" if self.long_requests_per_s else ""
        return f"{self.requests_per_s:g} requests/s of {lengths[0]} tokens{second}"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Latencies that serving must meet; those left out are not limited."""

    ttft_p99_s: float | None = None
    """time to first token, 99th percentile"""
    itl_p99_s: float | None = None
    """inter-token latency, 99th percentile"""
    tpot_p99_s: float | None = None
    """(end-to-end − TTFT) / (tokens − 1), 99th percentile"""
    e2e_p99_s: float | None = None
    """time from sending a request to its last token, 99th percentile"""

    def __post_init__(self) -> None:
        above_zero(self, "objective", "ttft_p99_s", "itl_p99_s", "tpot_p99_s", "e2e_p99_s")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of devices: rented by the hour, or owned."""

    owned: bool = False
    """bought rather than rented"""
    usd_per_device_hour: float | None = None
    """rent per device and hour; none: the provider's in the catalogue"""
    provider: str = ""
    """provider of the rented devices; empty: the median of all"""
    spot: bool = False
    """interruptible offers"""
    usd_per_device: float | None = None
    """purchase price per device with its share of the node; none: the catalogue's reported price"""
    years: float = 4.0
    """owned: depreciation period"""
    utilisation: float = 0.8
    """owned: share of that time in use"""
    usd_per_kwh: float = 0.1
    """owned: price of electricity"""
    pue: float = 1.3
    """owned: power of the site over power of the machines, cooling included"""
    staff_usd_per_year: float = 0.0
    """owned: staff, for all devices together"""

    def __post_init__(self) -> None:
        at_least(self, "cost", 0, "usd_per_device_hour", "usd_per_device", "usd_per_kwh", "staff_usd_per_year")
        at_least(self, "cost", 1, "pue")
        above_zero(self, "cost", "years")
        above_zero(self, "cost", "utilisation", most=1)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Settings of a load test."""

    api: Literal["auto", "chat", "completions", "predict"] = "auto"
    """endpoint; auto: chat, completions where there is no chat, predict where there is neither"""
    model: str = ""
    """the server's name of the model; empty: the first it lists"""
    tokenizer: str = ""
    """folder with the model's tokenizer.json, for prompts of exact lengths; empty: two trial prompts calibrate the
    lengths by the server's token counts"""
    concurrency: int | None = None
    """closed loop: number of clients, each of which sends its next request when its response is complete; none: open
    loop, requests are sent at the times of the traffic, whatever the server does"""
    requests: int | None = None
    """measured requests; none: as many as traffic.duration_s allows"""
    ramp_to: float | None = None
    """open loop: the rate changes linearly from traffic.requests_per_s to this over the test; none: it is constant"""
    length_spread: float = 0.0
    """coefficient of variation of prompt and completion lengths (lognormal, around the means in traffic); 0: equal
    lengths"""
    prefixes: int = 1
    """different prefixes of traffic.shared_prefix tokens, of which each prompt has one"""
    trace: str = ""
    """file of a recorded trace, replayed instead of traffic: Azure (CSV) or Mooncake (JSONL)"""
    trace_speed: float = 1.0
    """speed-up of the replay over the recorded trace"""
    longest: int | None = None
    """most tokens of prompt and completion together in a trace's request; longer ones are truncated and counted; none:
    as recorded"""
    warmup_s: float | None = None
    """warm-up with the same traffic, left out of every figure; none: a tenth of the test, at most 10 s"""
    repeats: int = 1
    """runs of the test, each with its own seed; from 2 on figures have 95 % confidence intervals"""
    timeout_s: float = 300.0
    """time after which an incomplete response is an error"""
    temperature: float = 0.0
    """sampling temperature"""
    processes: int = 1
    """sending processes; more where one core cannot keep up, which the report says"""

    def __post_init__(self) -> None:
        at_least(self, "load", 1, "concurrency", "requests", "repeats", "processes", "prefixes")
        at_least(self, "load", 0, "length_spread", "warmup_s", "temperature")
        at_least(self, "load", 2, "longest")
        above_zero(self, "load", "ramp_to", "trace_speed", "timeout_s")
        if self.trace and self.concurrency:
            raise BadRecipe("load.trace and load.concurrency both say when requests are sent; leave one out")
        if self.ramp_to and (self.trace or self.concurrency):
            raise BadRecipe("load.ramp_to needs the open loop of [traffic]; leave load.trace and load.concurrency out")
