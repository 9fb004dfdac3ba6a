"""Which replica a request goes to: four policies over the same small state, without input or output.

Ties are broken at random, a miss goes to the least loaded replica, a busy replica loses its affinity to the next
longest prefix rather than to none, and a replica whose circuit is open is passed over. These are the faults that other
routers' users report (hot spot on a miss, bias to replica 0, affinity lost under imbalance, dead backend kept).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from armillary.fleet.gateway.breaker import Breaker
from armillary.fleet.gateway.prefix_index import PrefixIndex
from armillary.stats import LogMoments

BUSIER = 1.35
"""a replica with more than this times the mean load gets no request for its cached prefix; set 2026-11-18 on simulated
shared-prefix traffic (tests/fleet/gateway/test_routing.py, seeds 0 and 1), where 1.25 costs a tenth of the hits and
1.5 gains none"""
_DECAY_REQUESTS = 64
"""requests after which one of the recent past counts 1/e"""


@dataclass(eq=False, slots=True)
class Replica:
    """A server as the router sees it; `link` is the gateway's connection pool to it."""

    name: str
    canary: bool = False
    shadow: bool = False  # it gets copies of requests, and no client its answers
    drained: bool = False  # by an admin: it gets no new requests
    slow: bool = False  # its streams are far behind those of others: it gets requests only where no other works
    breaker: Breaker = field(default_factory=Breaker)
    in_flight: int = 0
    recent: float = 0.0  # requests of the recent past, decayed
    requests: int = 0
    failures: int = 0
    last_pick: int = 0  # number of the pick that it was chosen by, for round robin
    link: Any = None
    ttft: LogMoments = field(default_factory=LogMoments)
    tpot: LogMoments = field(default_factory=LogMoments)  # of streams

    @property
    def up(self) -> bool:
        """Whether it is in the rotation, as far as its health goes."""
        return self.breaker.retry_at is None and not self.slow

    @property
    def load(self) -> float:
        """Requests in flight; those of the recent past decide between replicas that are equally idle."""
        return self.in_flight + self.recent / 1e6


class Router:
    """The replicas of one model, and the policy that picks among them."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        policy: str,
        *,
        canary_fraction: float = 0.0,
        shadow_fraction: float = 0.0,
        seed: int | None = None,
        index: PrefixIndex | None = None,
    ) -> None:
        self.replicas = tuple(replicas)
        self.index = index or PrefixIndex()
        self._pick: Callable[[list[Replica], bytes], Replica] = {
            "round-robin": self._round_robin,
            "least-load": self._least_load,
            "power-of-two": self._power_of_two,
            "prefix": self._prefix,
        }[policy]
        self.needs_prompt = policy == "prefix"
        self.canary_fraction, self._canary_share = canary_fraction, 0.0
        self.shadow_fraction, self._shadow_share = shadow_fraction, 0.0
        self._random, self.picks = random.Random(seed), 0

    def add(self, replica: Replica) -> None:
        """A replica that has just become ready."""
        self.replicas = (*self.replicas, replica)

    def remove(self, replica: Replica) -> None:
        """A replica that is no more; what it had cached is forgotten."""
        self.replicas = tuple(each for each in self.replicas if each is not replica)
        self.index.forget(replica.name)

    def pick(self, prompt: bytes, now: float, exclude: Collection[Replica] = ()) -> Replica | None:
        """The replica for a prompt; None where none is left."""
        usable = [each for each in self.replicas if each not in exclude and self._is_usable(each, now)]
        if not usable:
            return None
        usable = [each for each in usable if not each.slow] or usable
        group = self._group(usable, first=not exclude)
        replica = self._pick(group, prompt) if len(group) > 1 else group[0]
        self._assign(replica, prompt)
        return replica

    def pick_shadow(self, now: float) -> Replica | None:
        """The shadow that gets a copy of this request; None where it is not of their share."""
        shadows = [each for each in self.replicas if each.shadow and not each.drained and each.breaker.admits(now)]
        if not shadows:
            return None
        self._shadow_share += self.shadow_fraction
        if self._shadow_share < 1.0 - 1e-9:
            return None
        self._shadow_share -= 1.0
        shadow = self._least_load(shadows, b"")
        shadow.requests += 1
        return shadow

    @property
    def has_ready(self) -> bool:
        """Whether any replica gets requests."""
        return any(not each.drained and not each.shadow and each.breaker.retry_at is None for each in self.replicas)

    def _is_usable(self, replica: Replica, now: float) -> bool:
        return not replica.drained and not replica.shadow and replica.breaker.admits(now)

    def _group(self, usable: list[Replica], *, first: bool) -> list[Replica]:
        """The stable replicas or the canaries, so that canaries get exactly their share; either stands in for the
        other."""
        canaries = [each for each in usable if each.canary]
        stable = [each for each in usable if not each.canary]
        if not canaries or not stable:
            return usable
        if first:
            self._canary_share += self.canary_fraction
        if first and self._canary_share >= 1.0 - 1e-9:
            self._canary_share -= 1.0
            return canaries
        return stable

    def _assign(self, replica: Replica, prompt: bytes) -> None:
        for each in self.replicas:
            each.recent *= 1.0 - 1.0 / _DECAY_REQUESTS
        replica.recent += 1.0
        replica.requests += 1
        self.picks += 1
        replica.last_pick = self.picks
        if self.needs_prompt:
            self.index.add(prompt, replica.name)

    # --- policies

    def _round_robin(self, usable: list[Replica], prompt: bytes) -> Replica:
        return min(usable, key=lambda each: (each.last_pick, self._random.random()))

    def _least_load(self, usable: list[Replica], prompt: bytes) -> Replica:
        return min(usable, key=lambda each: (each.in_flight, self._random.random()))

    def _power_of_two(self, usable: list[Replica], prompt: bytes) -> Replica:
        return self._least_load(self._random.sample(usable, 2), prompt)

    def _prefix(self, usable: list[Replica], prompt: bytes) -> Replica:
        """The longest known prefix among replicas that are not busier than others, else the least loaded."""
        calm = self._not_busier(usable)
        matched = self.index.match(prompt, {each.name for each in calm})
        best = max(matched.values(), default=0)
        if best == 0:
            return min(usable, key=lambda each: (each.in_flight, each.recent, self._random.random()))
        longest = [each for each in calm if matched.get(each.name, 0) == best]
        return min(longest, key=lambda each: (each.load, self._random.random()))

    def _not_busier(self, usable: list[Replica]) -> list[Replica]:
        """Replicas whose requests in flight and of the recent past are near the mean, or below."""
        flight = sum(each.in_flight for each in usable) / len(usable)
        recent = sum(each.recent for each in usable) / len(usable)
        calm = [each for each in usable if each.in_flight <= BUSIER * flight + 1 and each.recent <= BUSIER * recent + 2]
        return calm or usable
