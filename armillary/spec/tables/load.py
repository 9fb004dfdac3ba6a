"""The recipe's [load] table: a load test of a running server with the [traffic] of the same recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec.tables.checks import above_zero, at_least


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
        self._check_together()

    def _check_together(self) -> None:
        if self.trace and self.concurrency:
            raise BadRecipe("load.trace and load.concurrency both say when requests are sent; leave one out")
        if self.ramp_to and (self.trace or self.concurrency):
            raise BadRecipe("load.ramp_to needs the open loop of [traffic]; leave load.trace and load.concurrency out")
