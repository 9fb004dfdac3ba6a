"""Several servers as one service: the recipe's tables [fleet] and [autoscale]."""

from dataclasses import dataclass
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec.tables.checks import above_zero, at_least


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The replicas of a service."""

    replicas: int = 1
    """replicas at the start; without [autoscale] this many all along"""
    pool: Literal["local", "kubernetes", "ray"] = "local"
    """where armillary up runs them: processes here, Deployments on Kubernetes, or applications of Ray Serve"""
    policy: Literal["prefix", "least-load", "power-of-two", "round-robin"] = "prefix"
    """routing: prefix: the replica that has seen the longest part of the prompt, unless it is busier than others"""
    start_s: float | None = None
    """time from starting a replica until it is ready; none: the mean of those measured so far, at first 60 s"""
    simulate: Literal["each", "curve"] = "each"
    """simulation: each: every replica; curve: a few replicas at rates from nearly idle to full, from which a fleet of
    any size is computed (without shared prefixes)"""
    prefill_replicas: int = 0
    """simulation: so many replicas more that only prefill; the others decode, once a prompt's KV cache has moved"""
    acceptance: float = 0.7
    """simulation: probability that a draft token is accepted, where serve.speculate is on"""
    failures_per_hour: float = 0.0
    """simulation: failures of each replica per hour; a failed one is replaced after fleet.detect_s and start_s"""
    detect_s: float = 5.0
    """simulation: time until a failed replica gets no more requests"""
    max_wait_s: float = 120.0
    """time for which a request waits for a replica where there is none (scaled to zero, all failed)"""
    redis: bool = False
    """armillary up starts a Redis of the service's own, which keeps limits and budgets; gateway.redis names another"""
    nginx_port: int | None = None
    """armillary up starts an nginx in front of the gateway, on this port of every address"""

    def __post_init__(self) -> None:
        at_least(self, "fleet", 0, "replicas", "prefill_replicas", "start_s", "failures_per_hour", "detect_s")
        above_zero(self, "fleet", "max_wait_s")
        above_zero(self, "fleet", "acceptance", most=1)
        above_zero(self, "fleet", "nginx_port", most=65_535)


@dataclass(frozen=True, kw_only=True)
class Autoscale:
    """Policy of the autoscaler; it is off unless max_replicas is given."""

    max_replicas: int | None = None
    """most replicas; none: the fleet keeps its size"""
    min_replicas: int = 1
    """least replicas; 0: none after autoscale.idle_s without requests, and the next request waits for a start"""
    target: float = 0.9
    """share of a replica's capacity at which it is meant to run, moved by 5 % with the error budget: up while no
    request misses an objective, down where 2 % do (benchmarks/simulator.md)"""
    interval_s: float = 5.0
    """time between two decisions"""
    stable_window_s: float = 60.0
    """signals are averaged over this time"""
    panic_window_s: float = 10.0
    """where demand over this time is at least autoscale.panic times what is running, it counts instead, and nothing is
    scaled down for a stable window"""
    panic: float = 1.5
    """demand over running replicas that starts panic mode"""
    cooldown_s: float = 120.0
    """the direction changes at most once in this time: none is stopped within it of a start, and none is started within
    it of the first stop of several"""
    max_rate_up: float = 2.0
    """most replicas after a decision, as a multiple of those before (at least one more)"""
    max_kv_used: float = 0.9
    """KV cache usage at which a replica is full"""
    max_waiting: float = 2.0
    """requests per replica that wait for their first step at which it is full"""
    max_gpu_used: float | None = None
    """GPU utilisation at which a replica is full; none: it does not count, as decoding keeps a GPU busy at any load"""
    idle_s: float = 600.0
    """time without requests after which min_replicas=0 stops the last replica"""
    max_usd_per_hour: float | None = None
    """most that running replicas may cost together; none: no limit"""

    @property
    def is_on(self) -> bool:
        return self.max_replicas is not None

    def __post_init__(self) -> None:
        at_least(self, "autoscale", 0, "min_replicas", "cooldown_s")
        at_least(self, "autoscale", 1, "max_replicas", "panic", "max_rate_up")
        above_zero(self, "autoscale", "interval_s", "stable_window_s", "panic_window_s", "max_waiting", "idle_s")
        above_zero(self, "autoscale", "target", "max_kv_used", "max_gpu_used", most=1)
        above_zero(self, "autoscale", "max_usd_per_hour")
        if self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise BadRecipe(
                f"autoscale.min_replicas={self.min_replicas} is above max_replicas={self.max_replicas}; "
                f"try --set autoscale.max_replicas={self.min_replicas}"
            )
