"""Keeps a service at its number of replicas: starts, adopts, drains and replaces them, and asks the autoscaler.

It runs beside the gateway in the same event loop; the pool's calls, which may block, run in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError
from armillary.fleet.autoscale.decision_log import AutoscalerStart, Logged, append
from armillary.fleet.autoscale.policy import Autoscaler, Decision
from armillary.fleet.autoscale.replica_metrics import ReplicaMetrics, pages_of, quantile
from armillary.fleet.autoscale.signals import Signals
from armillary.fleet.gateway.gateway_app import Gateway
from armillary.fleet.gateway.gateway_config import ReplicaSettings
from armillary.fleet.gateway.model_routers import Models
from armillary.fleet.gateway.routing import Replica
from armillary.spec.replica_pool import Member, Pool

POLL_S = 0.5
HUNG_S = 10.0
"""time without a passed health check after which a replica is killed and replaced"""
SLOW_S = 60.0
"""time for which a replica's streams may be far behind those of others, which work; then it is replaced, too"""
_FAILED_STARTS = 3
"""starts in a row that may fail; then the service ends"""
_BUSY = "busy_s_total"
_SHOWN, _HISTORY = 50, 360
"""decisions and past signals that the page shows"""
_LOOKS_EVERY_S = 5.0
"""between two looks at the signals where there is no autoscaler"""


@dataclass
class Routed:
    """A member of the pool that the gateway sends requests to."""

    replica: Replica
    url: str
    down_since: float | None = None
    draining: bool = False
    page: ReplicaMetrics | None = None


class Controller:
    """One model's replicas."""

    def __init__(
        self,
        pool: Pool,
        gateway: Gateway,
        models: Models,
        *,
        model: str,
        served: str,
        target: int,
        autoscaler: Autoscaler | None = None,
        log: Path,
        say: Callable[[str], None],
        hung_s: float = HUNG_S,
        slow_s: float = SLOW_S,
        poll_s: float = POLL_S,
    ) -> None:
        """`model` is its name for clients, `served` its name at the replicas; `target` replicas at the start."""
        self._pool, self._gateway, self._models, self._say = pool, gateway, models, say
        self.model, self._served, self.target, self.autoscaler = model, served, target, autoscaler
        self._log, self._hung_s, self._slow_s, self._poll_s = log, hung_s, slow_s, poll_s
        self.routed: dict[str, Routed] = {}
        self.members: Sequence[Member] = ()
        self.release = ""  # that replicas are started with; others are replaced one by one
        self.canary_release: str | None = None
        self.canary_replicas = 0
        self.canary_is_shadow = False  # they get copies of requests instead of a share
        self.before_fill: Callable[[], Awaitable[None]] | None = None
        self.decisions: deque[Decision] = deque(maxlen=_SHOWN)
        self.signals: Signals | None = None
        self.history: deque[Signals] = deque(maxlen=_HISTORY)
        self._picked, self._looked_at = 0, time.monotonic()
        self._decided_at = time.monotonic()
        self._known_ready: set[str] = set()
        self._failed_starts = 0
        self._started_s: float | None = None

    async def adopt(self) -> None:
        """Take over the servers of an earlier service, as many as there are."""
        members = await asyncio.to_thread(self._pool.members)
        present = [member for member in members if member.state != "stopping"]
        regular = [member for member in present if member.release != self.canary_release]
        if regular:
            self.target = len(regular)
        if present:
            self._known_ready = {member.name for member in present if member.state == "ready"}
            self._say(f"{len(present)} replicas of {self.model} run already and are adopted")

    async def run(self) -> None:
        """Until cancelled."""
        if self.autoscaler is not None:
            scaler = self.autoscaler
            begun = AutoscalerStart(
                settings=scaler.settings, limits=scaler.capacity.limits, start_s=scaler.given_start_s
            )
            await asyncio.to_thread(append, self._log, begun)
        await self.adopt()
        while True:
            await self._refresh()
            await self._replace_hung()
            if time.monotonic() - self._decided_at >= self._interval_s:
                self._decided_at = time.monotonic()
                self.signals = await self._look()
                self.history.append(self.signals)
                if self.autoscaler is not None:
                    await self._decide(self.autoscaler, self.signals)
            if self.before_fill is not None:
                await self.before_fill()
            await self._fill()
            await asyncio.sleep(self._poll_s)

    @property
    def _interval_s(self) -> float:
        return self.autoscaler.settings.interval_s if self.autoscaler is not None else _LOOKS_EVERY_S

    # --- the pool and the router

    async def _refresh(self) -> None:
        """Route to what is ready, and to nothing else."""
        before = {member.name: member for member in self.members}
        self.members = await asyncio.to_thread(self._pool.members)
        present = {member.name: member for member in self.members}
        for name, member in before.items():
            if name not in present and member.state == "starting":
                self._start_failed(name)
        for member in self.members:
            if member.state == "ready" and member.name not in self.routed:
                self._route(member)
        for name in [name for name, routed in self.routed.items() if not self._is_at(present.get(name), routed)]:
            gone = self.routed.pop(name)
            if not gone.draining:
                self._say(f"{name} of {self.model} has ended")
            self._models.remove_replica(self.model, gone.replica)

    def _is_at(self, member: Member | None, routed: Routed) -> bool:
        """Whether a member still is the server that requests are sent to: Kubernetes and Ray restart one elsewhere."""
        return member is not None and member.url == routed.url and member.state != "starting"

    def _route(self, member: Member) -> None:
        is_new = member.release == self.canary_release
        shadow = is_new and self.canary_is_shadow
        settings = ReplicaSettings(url=member.url, model=self._served, canary=is_new and not shadow, shadow=shadow)
        replica = self._models.add_replica(self.model, member.name, settings)
        self.routed[member.name] = Routed(replica, member.url)
        self._failed_starts = 0
        if member.name not in self._known_ready and member.start_s is not None:
            self._known_ready.add(member.name)
            self._started_s = member.start_s
            if self.autoscaler is not None:
                self.autoscaler.started(member.start_s)
            self._say(f"{member.name} of {self.model} is ready after {member.start_s:.1f} s")

    def _start_failed(self, name: str) -> None:
        self._failed_starts += 1
        self._say(f"{name} of {self.model} ended before it was ready; its log: {self._pool.log(name)}")
        if self._failed_starts >= _FAILED_STARTS:
            raise ArmillaryError(
                f"{self._failed_starts} replicas in a row did not start; read {self._pool.log(name)} and correct it"
            )

    async def _replace_hung(self) -> None:
        """Kill what has failed its health checks for too long, or was slow for too long while another was not: a new
        one takes its place."""
        now, works = time.monotonic(), any(routed.replica.up for routed in self.routed.values())
        for name, routed in list(self.routed.items()):
            hung = routed.replica.breaker.retry_at is not None and routed.replica.breaker.by_probe
            limit_s = self._hung_s if hung else self._slow_s
            if not hung and not (routed.replica.slow and works):
                routed.down_since = None
            elif routed.down_since is None:
                routed.down_since = now
            elif now - routed.down_since > limit_s:
                how = "healthy" if hung else "as fast as others"
                self._say(f"{name} of {self.model} has not been {how} for {limit_s:g} s and is replaced")
                await asyncio.to_thread(self._pool.kill, name)

    # --- the number of replicas

    async def _fill(self) -> None:
        """Start or drain, so that `target` replicas stay."""
        for name, routed in self.routed.items():
            if routed.draining and not routed.replica.in_flight:
                await asyncio.to_thread(self._pool.stop, name)
        changed = await self._fill_group(self.regular(), self.target, self.release)
        if self.canary_release is not None:
            changed |= await self._fill_group(self.canaries(), self.canary_replicas, self.canary_release)
        if changed:
            self.members = await asyncio.to_thread(self._pool.members)

    async def _fill_group(self, staying: list[Member], target: int, release: str) -> bool:
        """Towards `target` members of one release: those of others go one by one, each once a new one is ready. Whether
        anything was started or drained."""
        outdated = [member for member in staying if member.release != release]
        missing = target - len(staying)
        if outdated and missing <= 0 and target:
            starting = any(member.state == "starting" for member in staying if member not in outdated)
            if missing < 0 and not starting:
                await self.drain(min(outdated, key=lambda member: self._in_flight(member.name)).name)
                return True
            missing = 1 if missing == 0 else 0
        for _ in range(missing):
            await asyncio.to_thread(self._pool.start, release)
        excess = [] if outdated and target else sorted(staying, key=self._drain_order)[: max(0, -missing)]
        for member in excess:
            await self.drain(member.name)
        return missing > 0 or bool(excess)

    def _drain_order(self, member: Member) -> tuple[bool, int]:
        return member.state == "ready", self._in_flight(member.name)

    def regular(self) -> list[Member]:
        """Members that stay, without canaries."""
        return [each for each in self.members if self._stays(each) and each.release != self.canary_release]

    def canaries(self) -> list[Member]:
        return [each for each in self.members if self._stays(each) and each.release == self.canary_release]

    def _role(self, member: Member) -> str:
        """What it is in a rollout; empty: an ordinary replica."""
        if self.canary_release is None or member.release != self.canary_release:
            return ""
        return "shadow" if self.canary_is_shadow else "canary"

    def _stays(self, member: Member) -> bool:
        routed = self.routed.get(member.name)
        return member.state != "stopping" and not (routed is not None and routed.draining)

    def _in_flight(self, name: str) -> int:
        return self.routed[name].replica.in_flight if name in self.routed else 0

    async def drain(self, name: str) -> None:
        """No new requests; it is stopped when it has none left."""
        routed = self.routed.get(name)
        if routed is None:
            await asyncio.to_thread(self._pool.stop, name)
        else:
            routed.draining = routed.replica.drained = True

    # --- decisions

    async def _decide(self, autoscaler: Autoscaler, signals: Signals) -> None:
        decision = autoscaler.decide(signals)
        line, self._started_s = Logged(signals=signals, decision=decision, started_s=self._started_s), None
        await asyncio.to_thread(append, self._log, line)
        if decision.change:
            self.decisions.appendleft(decision)
            self._say(f"{self.model}: {decision.before} → {decision.replicas} replicas: {decision.reason}")
        self.target = decision.replicas

    async def _look(self) -> Signals:
        """The signals now; latencies are of the time since the last look."""
        urls = {name: routed.url for name, routed in self.routed.items()}
        pages = await asyncio.to_thread(pages_of, urls)
        latencies: dict[str, list[dict[float, float]]] = {"ttft_s": [], "itl_s": []}
        now, busy = time.monotonic(), list[float]()
        since = max(1e-6, now - self._looked_at)
        for name, page in pages.items():
            routed = self.routed[name]
            if routed.page is not None:
                busy.append(min(1.0, max(0.0, page.gauge(_BUSY) - routed.page.gauge(_BUSY)) / since))
            for key, histograms in latencies.items():
                histograms.append(page.since(key, routed.page or page))
            routed.page = page
        parked = self._gateway.parked[self.model]
        arrived = self._arrived() + parked
        per_s, self._picked, self._looked_at = (arrived - self._picked) / since, arrived, now
        queue = self._models.queue(self.model)
        staying = self.regular()
        return Signals(
            now=now,
            ready=sum(member.state == "ready" for member in staying),
            starting=sum(member.state == "starting" for member in staying),
            arrived_per_s=max(0.0, per_s),
            in_flight=sum(each.replica.in_flight for each in self.routed.values() if not each.replica.shadow),
            waiting=round(sum(page.gauge("waiting") for page in pages.values()))
            + parked
            + (queue.num_waiting if queue is not None else 0),
            kv_used=sum(page.gauge("kv_used_fraction") for page in pages.values()) / len(pages) if pages else 0.0,
            ttft_p99_s=quantile(latencies["ttft_s"], 0.99),
            itl_p99_s=quantile(latencies["itl_s"], 0.99),
            gpu_used=sum(busy) / len(busy) if busy else None,
        )

    def _arrived(self) -> int:
        """Requests that were sent to replicas, those of former ones included."""
        return self._models.find(self.model)[1].picks

    # --- for the page

    def plain(self) -> dict[str, Any]:
        """The service now."""
        replicas = [
            {
                "name": member.name,
                "url": member.url,
                "state": "draining" if not self._stays(member) else member.state,
                "healthy": name_up(self.routed.get(member.name)),
                "in_flight": self._in_flight(member.name),
                "requests": self.routed[member.name].replica.requests if member.name in self.routed else 0,
                "release": member.release or self.release,
                "role": self._role(member),
                "start_s": member.start_s,
            }
            for member in self.members
        ]
        return {
            "model": self.model,
            "target": self.target,
            "replicas": replicas,
            "parked": self._gateway.parked[self.model],
            "signals": None if self.signals is None else asdict(self.signals),
            "history": [asdict(signals) for signals in self.history],
            "capacity_requests_per_s": None if self.autoscaler is None else self.autoscaler.capacity.requests_per_s,
            "decisions": [decision.plain() for decision in self.decisions],
        }


def name_up(routed: Routed | None) -> bool:
    """Whether a replica gets requests."""
    return routed is not None and routed.replica.up
