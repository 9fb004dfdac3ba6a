"""Carries a rollout out beside a controller: the new release is judged beside the old one, then replaces it.

How it is judged is the strategy's: canaries get a share of the requests, shadows get copies, and with blue/green a
complete set of replicas is started and then gets all requests at once, while the old set stands by. A replica of the
old release is drained only when one of the new release is ready, so that the service never has fewer replicas than its
target; a request that a new replica fails is answered by an old one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from armillary.fleet.autoscale.controller import Controller, Routed
from armillary.fleet.gateway.model_routers import Models
from armillary.fleet.gateway.routing import Router
from armillary.fleet.rollout.canary_verdict import Counts, verdict_on
from armillary.fleet.rollout.rollout_record import Rollout, State, read_rollout, replace_rollout
from armillary.stats import LogMoments

_JUDGED_EVERY_S = 1.0


@dataclass(frozen=True)
class Base:
    """Counts of a replica when its release began to be judged."""

    requests: int = 0
    failures: int = 0
    ttft: LogMoments = field(default_factory=LogMoments)
    tpot: LogMoments = field(default_factory=LogMoments)


class RolloutDriver:
    """Reads the rollout of a service's folder and moves its controller along."""

    def __init__(self, controller: Controller, models: Models, folder: Path, say: Callable[[str], None]) -> None:
        self._controller, self._models, self._folder, self._say = controller, models, folder, say
        self._bases: dict[str, Base] = {}
        self._judged: float | None = None  # the rollout that is judged, by when it was asked for
        self._judged_at = float("-inf")
        self.progress = ""  # of the judgement, for people
        controller.before_fill = self.step
        done = read_rollout(folder)
        if done is not None:
            controller.release = done.release if done.state in ("rolling", "done") else done.previous
            if done.is_judged:  # of a service that was killed: its new replicas are adopted as what they are
                controller.canary_release, controller.canary_is_shadow = done.release, done.state == "shadow"

    async def step(self) -> None:
        """One look at the rollout."""
        rollout = await asyncio.to_thread(read_rollout, self._folder)
        if rollout is None:
            return
        if rollout.is_judged:
            await self._judge(rollout)
        elif rollout.state == "rolling":
            await self._rolling(rollout)
        elif self._judged is not None:  # somebody has ended it
            self._leave()

    @property
    def _router(self) -> Router:
        return self._models.find(self._controller.model)[1]

    # --- beside the old release

    async def _judge(self, rollout: Rollout) -> None:
        if rollout.release == self._controller.release:
            return await self._end(rollout, "rolled back", "it is what serves already")
        controller = self._controller
        if self._judged != rollout.began:
            rollout = await self._begin(rollout)
        if rollout.state == "green":
            self._switch_over(rollout)
        if time.monotonic() - self._judged_at < _JUDGED_EVERY_S:
            return
        self._judged_at = time.monotonic()
        canary, stable = self._counts()
        switched = rollout.state == "green" and self._router.canary_fraction == 1.0
        verdict, reason = verdict_on(rollout, canary, stable, time.time(), switched=switched)
        if any(routed.replica.slow for routed in self._routed(member.name for member in controller.canaries())):
            verdict, reason = "roll back", "its streams are far behind those of the others"
        self.progress = reason if verdict == "wait" else ""
        if rollout.state == "shadow" and verdict != "wait":
            passed = "as good" if verdict == "promote" else "worse"
            await self._end(rollout, "shadowed", f"{passed}: {reason}")
        elif verdict == "promote":
            await self._promote(rollout, reason)
        elif verdict == "roll back":
            await self._end(rollout, "rolled back", reason)

    async def _begin(self, rollout: Rollout) -> Rollout:
        controller, router = self._controller, self._router
        self._judged, self._bases = rollout.began, {}
        controller.canary_release, controller.canary_replicas = rollout.release, rollout.replicas
        controller.canary_is_shadow = rollout.state == "shadow"
        router.canary_fraction = rollout.share if rollout.state == "canary" else 0.0
        router.shadow_fraction = rollout.share
        how = {
            "canary": f"{rollout.share:.0%} of requests go to {rollout.release}",
            "shadow": f"{rollout.release} gets copies of {rollout.share:.0%} of requests",
            "green": f"as many replicas of {rollout.release} are started as serve now, and then get all requests",
        }
        self._say(f"{controller.model}: {how[rollout.state]}")
        begun = replace(rollout, previous=controller.release)
        return begun if await self._replace(rollout, begun) else rollout

    async def _replace(self, before: Rollout, after: Rollout) -> bool:
        """False where the rollout was ended meanwhile, which the next look sees."""
        return await asyncio.to_thread(replace_rollout, self._folder, before, after)

    def _switch_over(self, rollout: Rollout) -> None:
        """Blue/green: as many new replicas as old ones, and all requests to them once all are ready."""
        controller, router = self._controller, self._router
        controller.canary_replicas = max(1, controller.target)
        ready = [each for each in controller.canaries() if each.name in controller.routed]
        if router.canary_fraction == 0.0 and len(ready) >= controller.canary_replicas:
            router.canary_fraction = 1.0
            self._say(f"{controller.model}: all requests go to {rollout.release} now; the old replicas stand by")

    def _leave(self) -> None:
        """The old release alone serves, and the new replicas are drained."""
        self._router.canary_fraction = 0.0
        self._controller.canary_replicas, self._judged, self.progress = 0, None, ""

    async def _promote(self, rollout: Rollout, reason: str) -> None:
        """The new replicas become the first of the service."""
        controller = self._controller
        if not await self._replace(
            rollout, replace(rollout, previous=controller.release, state="rolling", reason=reason)
        ):
            return
        for routed in self._routed(member.name for member in controller.canaries()):
            routed.replica.canary = False
        controller.release, controller.canary_release, self._judged = rollout.release, None, None
        self._say(f"{controller.model}: {rollout.release} is promoted: {reason}")

    async def _end(self, rollout: Rollout, state: State, reason: str) -> None:
        if state != "done":
            self._leave()
        if await self._replace(rollout, replace(rollout, state=state, reason=reason)):
            self._say(
                f"{self._controller.model}: the rollout of {rollout.release} is {state}: {reason or 'all replaced'}"
            )

    # --- instead of the old release

    async def _rolling(self, rollout: Rollout) -> None:
        controller = self._controller
        if controller.release != rollout.release:
            begun = replace(rollout, previous=controller.release)
            if not await self._replace(rollout, begun):
                return
            rollout, controller.release = begun, begun.release
        staying = controller.regular()
        if len(staying) >= controller.target and all(
            member.release == rollout.release and member.name in controller.routed for member in staying
        ):
            await self._end(rollout, "done", rollout.reason)

    # --- counts since the new release began to be judged

    def _counts(self) -> tuple[Counts, Counts]:
        """Of the new release, and of the old one; blue/green compares with all that the old one has served."""
        green = self._router.canary_fraction in (0.0, 1.0) and not self._controller.canary_is_shadow
        controller = self._controller
        new = {member.name for member in controller.canaries()} & controller.routed.keys()
        for name, routed in controller.routed.items():
            if name not in self._bases:
                self._bases[name] = Base() if name in new or green else _now(routed)
        return self._group(new), self._group(controller.routed.keys() - new)

    def _group(self, names: Iterable[str]) -> Counts:
        requests = failures = 0
        ttft, tpot = LogMoments(), LogMoments()
        for name in names:
            replica, base = self._controller.routed[name].replica, self._bases[name]
            requests += replica.requests - replica.in_flight - base.requests
            failures += replica.failures - base.failures
            ttft = ttft.plus(replica.ttft).plus(base.ttft, -1)
            tpot = tpot.plus(replica.tpot).plus(base.tpot, -1)
        return Counts(requests=max(0, requests), failures=failures, ttft=ttft, tpot=tpot)

    def _routed(self, names: Iterable[str]) -> list[Routed]:
        return [self._controller.routed[name] for name in names if name in self._controller.routed]


def _now(routed: Routed) -> Base:
    replica = routed.replica
    return Base(replica.requests, replica.failures, replace(replica.ttft), replace(replica.tpot))
