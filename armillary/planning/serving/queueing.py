"""One replica under a steady stream of requests: batch, gaps, time to first token, from step times and queueing.

With rate λ, prompts that take p seconds of the replica each, and decode steps of d(b) seconds for b running requests:

    step       t = d(b) / (1 − λ·p)                    decode steps are stretched by the prefills between them
    running    b = λ·(out − 1)·t                        Little's law (1961); the smallest b that solves it
    prompts    served at most at μ = room / (d(b) + room·p), room = (step budget − b) / prompt
    waiting    W = ρ/(1 − ρ) · (cₐ² + 0)/2 / μ, ρ = λ/μ  Kingman (1961), equal prompts; tail P(W > x) = ρ·e^(−x·ρ/W)
    TTFT       wait for the current step + W + the larger of chunks·d(b) + p and a prefill alone
    gaps       99th percentile: d(b₉₉) and the prompts' tokens, up to the step budget, that 1 % of steps or more hold:
               prompts that come within a step are a Poisson number of mean λ·t

The number running varies as a Poisson number does: b₉₉ = b + 2.33·√b, and b + 3·√b must find room. A replica that only
prefills or only decodes (split pools) has the other part at zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, log, sqrt

import numpy as np

from armillary.planning.serving.forward_ops import Group
from armillary.planning.serving.generation import decode_gap_s, prefill_share_s
from armillary.planning.serving.replica import Replica
from armillary.planning.serving.serving_memory import concurrency, serving_memory
from armillary.spec.tables.serve import Serve, Traffic

Z99, ROOM = 2.33, 3.0
"""standard deviations to the 99th percentile, and those that must find room, so that waiting for it is rare"""
MOST_BUSY = 0.9
"""share of the rate at which prompts could be served that they may come at: beyond it queues grow without measure"""
_ROUNDS = 200
_MOST_PROMPTS = 1000
_COMPANY = 16
"""requests a rank decodes while the cost of a chunk of prompt is taken"""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A replica at a rate it can bear; times in seconds."""

    requests_per_s: float
    """arrivals a second, all finished"""
    running: float
    """requests decoded together, on average"""
    step_s: float
    """mean gap between tokens"""
    itl_p50_s: float
    """median gap"""
    itl_p99_s: float
    """gap at the 99th percentile"""
    tpot_p99_s: float
    """mean gap of a request in the fullest batches"""
    ttft_p50_s: float
    """median time to first token"""
    ttft_p99_s: float
    """time to first token at the 99th percentile"""
    e2e_p50_s: float
    """median time to last token"""
    e2e_p99_s: float
    """time to last token at the 99th percentile"""
    prefill_fraction: float
    """share of the replica's time that goes into prompts"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A replica with the requests it serves."""

    replica: Replica
    """the model on its devices"""
    serve: Serve
    """how the engine is set up"""
    traffic: Traffic
    """lengths and spacing of requests; the rate is asked for apart"""
    prefills: bool = True
    """computes prompts here; False: they come from another pool"""
    decodes: bool = True
    """generates here; False: after the first token another pool goes on"""

    @cached_property
    def cached(self) -> int:
        """Prompt tokens found in the prefix cache; at least one token is always computed."""
        return min(self.traffic.shared_prefix, self.traffic.tokens_in - 1) if self.serve.prefix_cache else 0

    @cached_property
    def prompt(self) -> int:
        """Prompt tokens computed a request."""
        return self.traffic.tokens_in - self.cached

    @cached_property
    def most_running(self) -> int:
        """Requests decoded together at most: what the KV cache holds at full length, and the engine's limit."""
        memory = serving_memory(self.replica, self.serve)
        tokens = self.traffic.tokens_in + self.traffic.tokens_out
        fits = concurrency(self.replica, memory, tokens, self.serve.block_tokens)
        limit = 1 if self.serve.batching == "none" else self.serve.max_running * self.replica.split.ep
        return min(fits, limit)

    @cached_property
    def prefill_s(self) -> float:
        """Time of the replica that one prompt takes: by itself where nothing else runs, else what its chunks add to
        decode steps, which read the weights anyway."""
        budget, split = self.serve.max_tokens_per_step, self.replica.split
        if not self.prefills:
            return 0.0
        if not self.decodes:
            return prefill_share_s(self.replica, self.prompt, budget, self.cached)
        ends = [self._added_s(keys) for keys in (self.cached + self.chunk, self.cached + self.prompt)]
        return sum(ends) / 2 * self.prompt / self.chunk / (split.ep * split.pp)

    @cached_property
    def chunk(self) -> int:
        """Prompt tokens that go into a step together."""
        return min(self.serve.max_tokens_per_step, self.prompt)

    def _added_s(self, keys: int) -> float:
        """What a chunk that ends at `keys` adds to a step, one on every ep rank."""
        ranks = self.replica.split.ep
        others = Group(count=ranks * _COMPANY, queries=1, keys=self.traffic.tokens_in + self.traffic.tokens_out // 2)
        mine = Group(count=ranks, queries=self.chunk, keys=keys)
        if self.chunk == 1:
            mine = Group(count=ranks, queries=1, keys=max(2, keys))
        return self.replica.step([others, mine]).total_s - self.replica.step([others]).total_s

    @cached_property
    def alone_s(self) -> float:
        """Prefill of one prompt with the replica to itself."""
        return self.replica.prefill(self.prompt, cached=self.cached).total_s if self.prefills else 0.0

    @cached_property
    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Decode step against batch at the mean context, on a grid; between grid points a step is linear."""
        context = self.traffic.tokens_in + self.traffic.tokens_out // 2
        top = max(1, self.most_running)
        sizes = sorted({1, top, *(2**i for i in range(top.bit_length()))})
        times = [decode_gap_s(self.replica, size, context) for size in sizes]
        return np.array(sizes, float), np.maximum.accumulate(np.array(times))

    def decode_s(self, running: float) -> float:
        """One decode step of `running` requests (at least one)."""
        return float(np.interp(running, *self._curve)) if self.decodes else 0.0


def load(server: Server, requests_per_s: float) -> Load | None:
    """The replica at this rate, or None where it cannot keep up or the KV cache overflows."""
    busy = requests_per_s * server.prefill_s
    if busy >= 1 or server.most_running < 1:
        return None
    running = _running(server, requests_per_s, busy)
    if running is None:
        return None
    return _times(server, requests_per_s, running, busy)


def _running(server: Server, rate: float, busy: float) -> float | None:
    """Smallest b = λ·(out − 1)·d(b)/(1 − λp), from below; None where its 99th percentile has no room."""
    steps, running = (server.traffic.tokens_out - 1) * server.decodes, 0.0
    for _ in range(_ROUNDS):
        following = rate * steps * server.decode_s(max(1.0, running)) / (1 - busy)
        if following > server.most_running:
            return None
        if following - running <= 1e-6 * max(1.0, running):
            break
        running = following
    return running if most(running, ROOM) <= max(1, server.most_running) else None


def most(running: float, deviations: float = Z99) -> float:
    """The number running at so many deviations above its mean: the 99th percentile, unless said otherwise."""
    return running + deviations * sqrt(running) if running > 1 else running


def _times(server: Server, rate: float, running: float, busy: float) -> Load | None:
    traffic, prompt_s = server.traffic, server.prefill_s
    full = min(most(max(1.0, running)), server.most_running)
    decode, crowded = server.decode_s(max(1.0, running)), server.decode_s(full)
    waits = _waiting(server, rate, running, decode)
    if waits is None:
        return None
    step = decode / (1 - busy)
    chunks = ceil(server.prompt / server.chunk) if server.prefills else 0
    own = max(server.alone_s, prompt_s + chunks * decode)
    ttft_50, ttft_99 = own + step / 2 + waits[0], own + crowded + waits[1]
    tpot_99 = crowded / (1 - busy)
    rest = (traffic.tokens_out - 1) * server.decodes
    return Load(
        requests_per_s=rate,
        running=running,
        step_s=step,
        itl_p50_s=decode + _beside_s(server, rate * step, 0.5),
        itl_p99_s=crowded + _beside_s(server, rate * step, 0.99),
        tpot_p99_s=tpot_99,
        ttft_p50_s=ttft_50,
        ttft_p99_s=ttft_99,
        e2e_p50_s=ttft_50 + rest * step,
        e2e_p99_s=ttft_99 + rest * tpot_99,
        prefill_fraction=busy,
    )


def _beside_s(server: Server, arrivals: float, quantile: float) -> float:
    """Time that prompts add to a step at a quantile of all steps: `arrivals` prompts a step on average, each of which
    takes as many steps as it has chunks; never more tokens than the step budget."""
    if not server.prefills:
        return 0.0
    prompts = _poisson_quantile(arrivals * ceil(server.prompt / server.chunk), quantile)
    tokens = min(prompts * server.chunk, server.serve.max_tokens_per_step)
    return tokens / server.prompt * server.prefill_s


def _poisson_quantile(mean: float, quantile: float) -> int:
    """Smallest n with P(N ≤ n) ≥ quantile, at most `_MOST_PROMPTS`."""
    from scipy.special import pdtr  # slow to import

    return int(np.searchsorted(pdtr(np.arange(_MOST_PROMPTS), mean), quantile))


def _waiting(server: Server, rate: float, running: float, decode: float) -> tuple[float, float] | None:
    """(median, 99th percentile) of the wait for earlier prompts; None where they come too fast."""
    if not server.prefills:
        return 0.0, 0.0
    room = max(1.0, server.serve.max_tokens_per_step - running / server.replica.split.ep) / server.prompt
    served = room / (decode + room * server.prefill_s)
    share = rate / served
    if share >= MOST_BUSY:
        return None
    arrivals = {"constant": 0.0, "poisson": 1.0, "gamma": server.traffic.burstiness}[server.traffic.arrival] ** 2
    mean = share / (1 - share) * arrivals / 2 / served
    return _tail(mean, share, 0.5), _tail(mean, share, 0.99)


def _tail(mean: float, share: float, quantile: float) -> float:
    """x with P(W > x) = 1 − quantile for P(W > x) = ρ·e^(−x·ρ/W)."""
    return max(0.0, log(share / (1 - quantile))) * mean / share if share > 0 else 0.0
