"""Latencies of one replica under a steady stream of requests, from step times and queueing theory.

With arrival rate λ, prompts that take p seconds of the replica each, and decode steps of d(b) seconds at batch size b:

    step       t = d(b + 1) / (1 − λ·p)                prefills between decode steps stretch them
    running    b = λ·(out − 1)·t                        Little's law (1961); the smallest b that solves it
    prompts    a prompt of n chunks takes S = n·d(b) + p seconds; a step has tokens for several short ones
    waiting    W = ρ/(1 − ρ) · (cₐ² + cₛ²)/2 · S, ρ = λ·S  Kingman (1961); tail P(W > x) = ρ·e^(−x·ρ/W)
    TTFT       rest of the current step + W + the larger of n·d(b) + p and a prefill alone
    gaps       99th percentile: d(b₉₉) and the prompt tokens, up to the step budget, that at least 1 % of steps have:
               the number of prompts that arrive within a step is Poisson with mean λ·t

Where serve.prefill_slowdown limits steps, prompts add at most A = (slowdown − 1)·d(b) to one, so a prompt has at least
p/A chunks. The default limit is lifted while more requests wait than decode: a prompt never waits for longer than
without it and b/λ, and gaps are unlimited where P(W > b/λ) says so.

The running batch varies like a Poisson number: b₉₉ = b + 2.33·√b, and b + 3·√b must fit the KV cache. Steps are timed
as a request sees them that runs beside b others: batches weighted by their size have mean b + 1. Requests that come at
constant intervals see b. A replica that only prefills or only decodes (disaggregated pools) has the other part at zero.
Of two streams of requests each has its own p, n and S; λ, b and W are those of both, and a percentile of the TTFT that
of the stream that makes it.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, inf, lgamma, log, sqrt

import numpy as np

from armillary.engine.scheduler.settings import STREAMED_SLOWDOWN
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
    def streams(self) -> tuple[tuple[float, "Server"], ...]:
        """(share of the requests, the same server with that stream alone)"""
        if len(self.traffic.streams) == 1:
            return ((1.0, self),)
        total = self.traffic.total_per_s
        return tuple((each.requests_per_s / total, replace(self, traffic=each)) for each in self.traffic.streams)

    @cached_property
    def context(self) -> int:
        """Mean tokens of a request that decodes."""
        return self.traffic.running_tokens_in + self.traffic.running_tokens_out // 2

    @cached_property
    def later_tokens(self) -> float:
        """Tokens after the first, per request."""
        return (self.traffic.tokens_per_request[1] - 1) * self.decodes

    @cached_property
    def cached(self) -> int:
        """Prompt tokens in the prefix cache; at least one token is always computed."""
        return min(self.traffic.shared_prefix, self.traffic.tokens_in - 1) if self.serve.prefix_cache else 0

    @cached_property
    def prompt(self) -> int:
        """Prompt tokens computed per request; of two streams, the mean."""
        return round(sum(share * (each.traffic.tokens_in - each.cached) for share, each in self.streams))

    @cached_property
    def most_running(self) -> int:
        """Largest batch of decode steps: what the KV cache holds at full length, and the engine's limit."""
        memory = serving_memory(self.replica, self.serve)
        tokens = self.traffic.running_tokens_in + self.traffic.running_tokens_out
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
        if len(self.streams) > 1:
            return sum(share * each.prefill_s for share, each in self.streams)
        if not self.decodes:
            return prefill_share_s(self.replica, self.prompt, budget, self.cached)
        ends = [self._added_s(keys) for keys in (self.cached + self.chunk, self.cached + self.prompt)]
        return sum(ends) / 2 * self.prompt / self.chunk / (split.ep * split.pp)

    @cached_property
    def chunk(self) -> int:
        """Prompt tokens per step, where no time limits them."""
        return min(self.serve.max_tokens_per_step, self.serve.prefill_tokens or self.prompt, self.prompt)

    def _added_s(self, keys: int) -> float:
        """What a prompt chunk that ends at `keys` adds to a step, one chunk per ep rank."""
        ranks = self.replica.split.ep
        decodes = Group(count=ranks * _DECODING, queries=1, keys=self.context)
        prompts = Group(count=ranks, queries=self.chunk, keys=max(2, keys) if self.chunk == 1 else keys)
        return self.replica.step([decodes, prompts]).total_s - self.replica.step([decodes]).total_s

    @cached_property
    def alone_s(self) -> float:
        """Prefill of one prompt on an idle replica; of two streams, the mean."""
        if len(self.streams) > 1:
            return sum(share * each.alone_s for share, each in self.streams)
        return self.replica.prefill(self.prompt, cached=self.cached).total_s if self.prefills else 0.0

    @cached_property
    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Decode step against batch size at the mean context, on a grid; linear between grid points."""
        top = max(1, self.most_running)
        sizes = sorted({1, top, *(2**i for i in range(top.bit_length()))})
        times = [decode_gap_s(self.replica, size, self.context) for size in sizes]
        return np.array(sizes, float), np.maximum.accumulate(np.array(times))

    def seen(self, running: float) -> float:
        """Batch size that a request is in, itself included, where `running` are on average."""
        batch = running + 1 if self.traffic.arrival != "constant" else max(1.0, running)
        return min(batch, float(max(1, self.most_running)))

    def decode_s(self, running: float) -> float:
        """One decode step with a batch of `running` (at least one)."""
        return float(np.interp(running, *self._curve)) if self.decodes else 0.0

    @property
    def is_paced(self) -> bool:
        """Whether the time that prompts add to a step is limited."""
        serve = self.serve
        limited = serve.prefill_slowdown is not None or serve.prefill_tokens is None
        return self.prefills and self.decodes and limited and serve.batching == "continuous"

    def most_added_s(self, decode_s: float) -> float:
        """Seconds that prompts may add to a step whose decodes take `decode_s`."""
        return ((self.serve.prefill_slowdown or STREAMED_SLOWDOWN) - 1) * decode_s if self.is_paced else inf

    def chunks(self, added_s: float = inf) -> float:
        """Steps of a prompt where each is lengthened by at most so much."""
        return max(ceil(self.prompt / self.chunk), self.prefill_s / added_s) if self.prefills else 0.0


def operating_point(server: Server, requests_per_s: float) -> OperatingPoint | None:
    """The replica at this rate, or None where it cannot keep up or the KV cache overflows."""
    busy = requests_per_s * server.prefill_s
    if busy >= 1 or server.most_running < 1:
        return None
    running = _running(server, requests_per_s, busy)
    return None if running is None else _times(server, requests_per_s, running, busy)


def _running(server: Server, rate: float, busy: float) -> float | None:
    """Smallest b = λ·(out − 1)·d(b + 1)/(1 − λp), from below; None where it does not fit with its headroom."""
    running = 0.0
    for _ in range(_ROUNDS):
        following = rate * server.later_tokens * server.decode_s(server.seen(running)) / (1 - busy)
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
    full = min(most(server.seen(running)), server.most_running)
    decode, crowded = server.decode_s(server.seen(running)), server.decode_s(full)
    queue = prompt_queue(server, rate, running, decode)
    if queue is None:
        return None
    step = decode / (1 - busy)
    ttft_50, ttft_99 = step / 2 + queue.ttft_s(0.5), crowded + queue.ttft_s(0.99)
    tpot_99 = crowded / (1 - busy)
    return OperatingPoint(
        requests_per_s=rate,
        running=running,
        step_s=step,
        itl_p50_s=decode + queue.added_s(step, 0.5),
        itl_p99_s=crowded + queue.added_s(step, 0.99),
        tpot_p99_s=tpot_99,
        ttft_p50_s=ttft_50,
        ttft_p99_s=ttft_99,
        e2e_p50_s=ttft_50 + server.later_tokens * step,
        e2e_p99_s=ttft_99 + server.later_tokens * tpot_99,
        prefill_fraction=busy,
    )


@dataclass(frozen=True, kw_only=True)
class PromptQueue:
    """Prompts of a replica at some rate: how long they wait, and what they add to steps."""

    server: Server
    rate: float
    decode_s: float
    running: float
    share: float
    """ρ without a limit of steps, and the mean wait"""
    mean_s: float
    paced_share: float
    """the same where prompts are as slow as the limit makes them; `paced_mean_s` is inf where they would queue up"""
    paced_mean_s: float

    def ttft_s(self, quantile: float) -> float:
        """Wait and prefill at a quantile of all requests."""
        limit_s = self.server.most_added_s(self.decode_s)
        ends = [0.0]
        for share, each in self.server.streams:
            own_quantile = 1 - (1 - quantile) / share
            if own_quantile >= 0:
                paced = each.prefill_s + each.chunks(limit_s) * self.decode_s * min(1.0, self.running)
                own = max(each.alone_s, each.prefill_s + each.chunks() * self.decode_s, paced)
                ends.append(own + self.wait_s(own_quantile))
        return max(ends)

    def wait_s(self, quantile: float) -> float:
        """The limit is lifted after running / rate seconds, when as many wait as decode."""
        free_s = _tail(self.mean_s, self.share, quantile)
        if not self.server.is_paced:
            return free_s
        paced_s = _tail(self.paced_mean_s, self.paced_share, quantile) if self.paced_mean_s < inf else inf
        return min(paced_s, free_s + self.running / self.rate)

    def added_s(self, step_s: float, quantile: float) -> float:
        """Seconds that prompts add to a step at a quantile of all steps."""
        if not self.server.prefills:
            return 0.0
        limit_s = self.server.most_added_s(self.decode_s)
        free_s = self._arrived_s(step_s, quantile)
        if limit_s == inf or self._lifted(step_s, limit_s) >= 1 - quantile:
            return free_s
        split = sum(share * each.prefill_s for share, each in self.server.streams if each.prefill_s > limit_s)
        filled = self.rate * split * step_s / limit_s
        return limit_s if filled > 1 - quantile else min(free_s, limit_s)

    def _arrived_s(self, step_s: float, quantile: float) -> float:
        """Without a limit: each prompt takes a step per chunk, and the number that arrive within a step is Poisson;
        never more tokens than the step budget."""
        budget, added = self.server.serve.max_tokens_per_step, 0.0
        for share, each in self.server.streams:
            prompts = _poisson_quantile(self.rate * share * step_s * each.chunks(), quantile)
            tokens = min(prompts * each.chunk, budget)
            added = max(added, tokens / each.prompt * each.prefill_s)
        return added

    def _lifted(self, step_s: float, limit_s: float) -> float:
        """Share of the steps in which more requests wait than decode, so that the default limit does not hold: as many
        as what the others leave needs, or those in which the queue happens to be so long."""
        server = self.server
        if server.serve.prefill_slowdown is not None:
            return 0.0
        full_s = max(limit_s, server.serve.max_tokens_per_step / server.prompt * server.prefill_s)
        needed_s = self.rate * server.prefill_s * step_s
        needed = (needed_s - limit_s) / (full_s - limit_s) if full_s > needed_s > limit_s else float(needed_s > limit_s)
        if self.paced_mean_s == inf:
            return needed
        waited_s = self.running / self.rate * self.paced_share / max(self.paced_mean_s, 1e-12)
        return max(needed, self.paced_share * exp(-waited_s) * limit_s / full_s)


def prompt_queue(server: Server, rate: float, running: float, decode_s: float) -> PromptQueue | None:
    """None where prompts arrive too fast."""
    free = _queue(server, rate, running, decode_s, inf)
    paced = free
    if server.is_paced:
        paced = _queue(server, rate, running, decode_s, server.most_added_s(decode_s))
    if free is None or (paced is None and server.serve.prefill_slowdown is not None):
        return None
    share, mean_s = paced or (1.0, inf)
    return PromptQueue(
        server=server,
        rate=rate,
        decode_s=decode_s,
        running=running,
        share=free[0],
        mean_s=free[1],
        paced_share=share,
        paced_mean_s=mean_s,
    )


def _queue(server: Server, rate: float, running: float, decode_s: float, limit_s: float) -> tuple[float, float] | None:
    """(ρ, mean wait) where prompts lengthen a step by at most `limit_s`; None where ρ is too near 1."""
    if not server.prefills:
        return 0.0, 0.0
    seconds = [(share, _service_s(each, running, decode_s, limit_s)) for share, each in server.streams]
    mean_s = sum(share * each_s for share, each_s in seconds)
    busy = rate * mean_s
    if busy >= MOST_BUSY:
        return None
    arrivals = {"constant": 0.0, "poisson": 1.0, "gamma": server.traffic.burstiness}[server.traffic.arrival] ** 2
    spread = sum(share * each_s**2 for share, each_s in seconds) / mean_s**2 - 1
    return busy, busy / (1 - busy) * (arrivals + spread) / 2 * mean_s


def _service_s(server: Server, running: float, decode_s: float, limit_s: float) -> float:
    """Seconds for which a prompt occupies the steps: all of each of its chunks, or its share of one."""
    fit = max(1.0, server.serve.max_tokens_per_step - running / server.replica.split.ep) / server.prompt
    if limit_s < server.prefill_s:
        fit = min(fit, limit_s / server.prefill_s)
    return decode_s / fit + server.prefill_s


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


def _tail(mean: float, share: float, quantile: float) -> float:
    """x with P(W > x) = 1 − quantile for P(W > x) = ρ·e^(−x·ρ/W)."""
    return max(0.0, log(share / (1 - quantile))) * mean / share if share > 0 and quantile < 1 else 0.0
