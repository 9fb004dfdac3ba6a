"""The recipe's [load] table: how a running server is tested with the [traffic] of the same recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec.tables.checks import above_zero, at_least


@dataclass(frozen=True, kw_only=True)
class Load:
    """How a load test is run."""

    api: Literal["auto", "chat", "completions", "predict"] = "auto"
    """which form of request is sent; auto: chat, completions where there is no chat, predict where there is neither"""
    model: str = ""
    """name the server knows the model by; empty: the first it lists"""
    tokenizer: str = ""
    """folder with the model's tokenizer.json, for prompts of exact lengths; empty: lengths are set by the server's own
    counts of two trial prompts"""
    concurrency: int | None = None
    """closed loop: so many clients, each of which sends again when its answer is complete; none: open loop, requests
    are sent when traffic says so, whatever the server does"""
    requests: int | None = None
    """measured requests; none: as many as traffic.duration_s holds"""
    ramp_to: float | None = None
    """open loop: the rate rises (or falls) evenly from traffic.requests_per_s to this over the test; none: it stays"""
    length_spread: float = 0.0
    """coefficient of variation of prompt and answer lengths (lognormal, of the means in traffic); 0: all alike"""
    prefixes: int = 1
    """different beginnings of traffic.shared_prefix tokens, of which each prompt has one"""
    trace: str = ""
    """file of a recorded day, replayed instead of traffic: Azure (CSV) or Mooncake (JSONL)"""
    trace_speed: float = 1.0
    """how much faster than recorded a trace is replayed"""
    longest: int | None = None
    """prompt and answer of a trace's request together at most; longer ones are cut and counted; none: as recorded"""
    warmup_s: float | None = None
    """the same traffic before measuring begins, left out of every figure; none: a tenth of the test, at most 10 s"""
    repeats: int = 1
    """times the test is run, each with a seed of its own; from 2 on figures have 95 % confidence intervals"""
    timeout_s: float = 300.0
    """an answer that is not complete by then is an error"""
    temperature: float = 0.0
    """of sampling"""
    processes: int = 1
    """processes that send; more where one core cannot keep up, which the report says"""

    def __post_init__(self) -> None:
        at_least(self, "load", 1, "concurrency", "requests", "repeats", "processes", "prefixes")
        at_least(self, "load", 0, "length_spread", "warmup_s", "temperature")
        at_least(self, "load", 2, "longest")
        above_zero(self, "load", "ramp_to", "trace_speed", "timeout_s")
        self._check_together()

    def _check_together(self) -> None:
        if self.trace and self.concurrency:
            raise BadRecipe("load.trace says when requests are sent, load.concurrency too; leave one out")
        if self.ramp_to and (self.trace or self.concurrency):
            raise BadRecipe("load.ramp_to needs the open loop of [traffic]; leave load.trace and load.concurrency out")
