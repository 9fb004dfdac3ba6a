"""Latencies of one replica under a steady stream of requests, from step times and queueing theory.

With arrival rate λ, prompts that take p seconds of the replica each, and decode steps of d(b) seconds at batch size b:

    step       t = d(b + 1) / (1 − λ·p)                prefills between decode steps stretch them
    running    b = λ·(out − 1)·t                        Little's law (1961); the smallest b that solves it
    prompts    served at most at μ = fit / (d(b) + fit·p), fit = (step budget − b) / prompt
    waiting    W = ρ/(1 − ρ) · (cₐ² + 0)/2 / μ, ρ = λ/μ  Kingman (1961), equal prompts; tail P(W > x) = ρ·e^(−x·ρ/W)
    TTFT       rest of the current step + W + the larger of chunks·d(b) + p and a prefill alone
    gaps       99th percentile: d(b₉₉) and the prompt tokens, up to the step budget, that at least 1 % of steps have:
               the number of prompts that arrive within a step is Poisson with mean λ·t

The running batch varies like a Poisson number: b₉₉ = b + 2.33·√b, and b + 3·√b must fit the KV cache. Steps are timed
as a request sees them that runs beside b others: batches weighted by their size have mean b + 1. Requests that come at
constant intervals see b. A replica that only prefills or only decodes (disaggregated pools) has the other part at zero.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp, lgamma, log, sqrt

import numpy as np

from armillary.planning.serving.forward_ops import Group
from armillary.planning.serving.generation import decode_gap_s, prefill_share_s
from armillary.planning.serving.replica import Replica
from armillary.planning.serving.serving_memory import concurrency, serving_memory
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.traffic import Traffic

Z99, KV_HEADROOM = 2.33, 3.0
"""standard deviations to the 99th percentile, and those that must fit the KV cache, so that waiting for it is rare"""
MOST_BUSY = 0.9
"""largest share of the rate at which prompts can be served: beyond it queues grow without bound"""
_ROUNDS = 200
_MOST_PROMPTS = 1000
_DECODING = 16
"""requests that decode on each rank while the cost of a prompt chunk is computed"""


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """A replica at a sustainable rate; times in seconds."""

    requests_per_s: float
    running: float
    """mean batch size of decode steps"""
    step_s: float
    """mean inter-token latency"""
    itl_p50_s: float
    itl_p99_s: float
    tpot_p99_s: float
    """mean inter-token latency of a request in the fullest batches"""
    ttft_p50_s: float
    ttft_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    prefill_fraction: float


@dataclass(frozen=True, kw_only=True)
class Server:
    """A replica and the requests it serves."""

    replica: Replica
    serve: Serve
    traffic: Traffic
    """lengths and arrivals of requests; the rate is a parameter of `operating_point`"""
    prefills: bool = True
    """computes prompts; False: they come from another pool"""
    decodes: bool = True
    """generates; False: another pool continues after the first token"""

    @cached_property
    def cached(self) -> int:
        """Prompt tokens in the prefix cache; at least one token is always computed."""
        return min(self.traffic.shared_prefix, self.traffic.tokens_in - 1) if self.serve.prefix_cache else 0

    @cached_property
    def prompt(self) -> int:
        """Prompt tokens computed per request."""
        return self.traffic.tokens_in - self.cached

    @cached_property
    def most_running(self) -> int:
        """Largest batch of decode steps: what the KV cache holds at full length, and the engine's limit."""
        memory = serving_memory(self.replica, self.serve)
        tokens = self.traffic.tokens_in + self.traffic.tokens_out
        fits = concurrency(self.replica, memory, tokens, self.serve.block_tokens)
        limit = 1 if self.serve.batching == "none" else self.serve.max_running * self.replica.split.ep
        return min(fits, limit)

    @cached_property
    def prefill_s(self) -> float:
        """Seconds of the replica per prompt: by itself where nothing else runs, else what its chunks add to decode
        steps, which read the weights anyway."""
        budget, split = self.serve.max_tokens_per_step, self.replica.split
        if not self.prefills:
            return 0.0
        if not self.decodes:
            return prefill_share_s(self.replica, self.prompt, budget, self.cached)
        ends = [self._added_s(keys) for keys in (self.cached + self.chunk, self.cached + self.prompt)]
        return sum(ends) / 2 * self.prompt / self.chunk / (split.ep * split.pp)

    @cached_property
    def chunk(self) -> int:
        """Prompt tokens per step."""
        return min(self.serve.max_tokens_per_step, self.prompt)

    def _added_s(self, keys: int) -> float:
        """What a prompt chunk that ends at `keys` adds to a step, one chunk per ep rank."""
        ranks = self.replica.split.ep
        context = self.traffic.tokens_in + self.traffic.tokens_out // 2
        decodes = Group(count=ranks * _DECODING, queries=1, keys=context)
        prompts = Group(count=ranks, queries=self.chunk, keys=max(2, keys) if self.chunk == 1 else keys)
        return self.replica.step([decodes, prompts]).total_s - self.replica.step([decodes]).total_s

    @cached_property
    def alone_s(self) -> float:
        """Prefill of one prompt on an idle replica."""
        return self.replica.prefill(self.prompt, cached=self.cached).total_s if self.prefills else 0.0

    @cached_property
    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Decode step against batch size at the mean context, on a grid; linear between grid points."""
        context = self.traffic.tokens_in + self.traffic.tokens_out // 2
        top = max(1, self.most_running)
        sizes = sorted({1, top, *(2**i for i in range(top.bit_length()))})
        times = [decode_gap_s(self.replica, size, context) for size in sizes]
        return np.array(sizes, float), np.maximum.accumulate(np.array(times))

    def seen(self, running: float) -> float:
        """Batch size that a request is in, itself included, where `running` are on average."""
        batch = running + 1 if self.traffic.arrival != "constant" else max(1.0, running)
        return min(batch, float(max(1, self.most_running)))

    def decode_s(self, running: float) -> float:
        """One decode step with a batch of `running` (at least one)."""
        return float(np.interp(running, *self._curve)) if self.decodes else 0.0


def operating_point(server: Server, requests_per_s: float) -> OperatingPoint | None:
    """The replica at this rate, or None where it cannot keep up or the KV cache overflows."""
    busy = requests_per_s * server.prefill_s
    if busy >= 1 or server.most_running < 1:
        return None
    running = _running(server, requests_per_s, busy)
    return None if running is None else _times(server, requests_per_s, running, busy)


def _running(server: Server, rate: float, busy: float) -> float | None:
    """Smallest b = λ·(out − 1)·d(b + 1)/(1 − λp), from below; None where it does not fit with its headroom."""
    steps, running = (server.traffic.tokens_out - 1) * server.decodes, 0.0
    for _ in range(_ROUNDS):
        following = rate * steps * server.decode_s(server.seen(running)) / (1 - busy)
        if following > server.most_running:
            return None
        if following - running <= 1e-6 * max(1.0, running):
            break
        running = following
    return running if most(running, KV_HEADROOM) <= max(1, server.most_running) else None


def most(running: float, deviations: float = Z99) -> float:
    """The batch size this many standard deviations above its mean: by default the 99th percentile."""
    return running + deviations * sqrt(running) if running > 1 else running


def _times(server: Server, rate: float, running: float, busy: float) -> OperatingPoint | None:
    traffic, prompt_s = server.traffic, server.prefill_s
    full = min(most(server.seen(running)), server.most_running)
    decode, crowded = server.decode_s(server.seen(running)), server.decode_s(full)
    waits = _waiting(server, rate, running, decode)
    if waits is None:
        return None
    step = decode / (1 - busy)
    chunks = ceil(server.prompt / server.chunk) if server.prefills else 0
    own = max(server.alone_s, prompt_s + chunks * decode)
    ttft_50, ttft_99 = own + step / 2 + waits[0], own + crowded + waits[1]
    tpot_99 = crowded / (1 - busy)
    rest = (traffic.tokens_out - 1) * server.decodes
    return OperatingPoint(
        requests_per_s=rate,
        running=running,
        step_s=step,
        itl_p50_s=decode + _prefill_added_s(server, rate * step, 0.5),
        itl_p99_s=crowded + _prefill_added_s(server, rate * step, 0.99),
        tpot_p99_s=tpot_99,
        ttft_p50_s=ttft_50,
        ttft_p99_s=ttft_99,
        e2e_p50_s=ttft_50 + rest * step,
        e2e_p99_s=ttft_99 + rest * tpot_99,
        prefill_fraction=busy,
    )


def _prefill_added_s(server: Server, arrivals: float, quantile: float) -> float:
    """Seconds that prompts add to a step at a quantile of all steps: `arrivals` prompts per step on average, each of
    which takes one step per chunk; never more tokens than the step budget."""
    if not server.prefills:
        return 0.0
    prompts = _poisson_quantile(arrivals * ceil(server.prompt / server.chunk), quantile)
    tokens = min(prompts * server.chunk, server.serve.max_tokens_per_step)
    return tokens / server.prompt * server.prefill_s


def _poisson_quantile(mean: float, quantile: float) -> int:
    """Smallest n with P(N ≤ n) ≥ quantile, at most `_MOST_PROMPTS`.

    Each term e^(−mean)·meanⁿ/n! comes from its logarithm: e^(−mean) alone is 0 in double precision from a mean of 746.
    """
    if mean <= 0:
        return 0
    below = 0.0
    for count in range(_MOST_PROMPTS):
        below += exp(count * log(mean) - mean - lgamma(count + 1))
        if below >= quantile:
            return count
    return _MOST_PROMPTS


def _waiting(server: Server, rate: float, running: float, decode: float) -> tuple[float, float] | None:
    """(median, 99th percentile) of the wait for earlier prompts; None where they arrive too fast."""
    if not server.prefills:
        return 0.0, 0.0
    fit = max(1.0, server.serve.max_tokens_per_step - running / server.replica.split.ep) / server.prompt
    served = fit / (decode + fit * server.prefill_s)
    share = rate / served
    if share >= MOST_BUSY:
        return None
    arrivals = {"constant": 0.0, "poisson": 1.0, "gamma": server.traffic.burstiness}[server.traffic.arrival] ** 2
    mean = share / (1 - share) * arrivals / 2 / served
    return _tail(mean, share, 0.5), _tail(mean, share, 0.99)


def _tail(mean: float, share: float, quantile: float) -> float:
    """x with P(W > x) = 1 − quantile for P(W > x) = ρ·e^(−x·ρ/W)."""
    return max(0.0, log(share / (1 - quantile))) * mean / share if share > 0 else 0.0
