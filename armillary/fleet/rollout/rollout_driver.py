"""Carries a rollout out beside a controller: canaries and their verdict, then replicas replaced one by one.

A replica of the old release is drained only when one of the new release is ready, so that the service never has fewer
replicas than its target; requests that a canary fails are answered by another replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from armillary.fleet.autoscale.controller import Controller, Routed
from armillary.fleet.autoscale.replica_metrics import ReplicaMetrics, pages_of, quantile
from armillary.fleet.gateway.model_routers import Models
from armillary.fleet.rollout.canary_verdict import Counts, verdict_on
from armillary.fleet.rollout.rollout_record import Rollout, State, read_rollout, write_rollout

_JUDGED_EVERY_S = 1.0
Base = tuple[int, int, ReplicaMetrics | None]
"""requests, failures and metrics of a replica when the canaries began"""


class RolloutDriver:
    """Reads the rollout of a service's folder and moves its controller along."""

    def __init__(self, controller: Controller, models: Models, folder: Path, say: Callable[[str], None]) -> None:
        self._controller, self._models, self._folder, self._say = controller, models, folder, say
        self._bases: dict[str, Base] = {}
        self._judged_at = float("-inf")
        controller.before_fill = self.step
        done = read_rollout(folder)
        if done is not None:
            controller.release = done.release if done.state in ("rolling", "done") else done.previous

    async def step(self) -> None:
        """One look at the rollout."""
        rollout = await asyncio.to_thread(read_rollout, self._folder)
        if rollout is None or not rollout.goes_on:
            return
        if rollout.state == "canary":
            await self._canary(rollout)
        else:
            await self._rolling(rollout)

    async def _canary(self, rollout: Rollout) -> None:
        controller = self._controller
        if controller.canary_release != rollout.release:
            controller.canary_release, controller.canary_replicas = rollout.release, rollout.canary_replicas
            self._models.find(controller.model)[1].canary_fraction = rollout.canary_fraction
            self._bases = {}
            self._say(f"{controller.model}: {rollout.canary_fraction:.0%} of requests go to {rollout.release}")
        if time.monotonic() - self._judged_at < _JUDGED_EVERY_S:
            return
        self._judged_at = time.monotonic()
        canary, stable = await self._counts()
        verdict, reason = verdict_on(rollout, canary, stable, time.time())
        if verdict == "promote":
            await self._promote(rollout, reason)
        elif verdict == "roll back":
            controller.canary_replicas = 0  # its canaries are drained
            await self._end(rollout, "rolled back", reason)

    async def _promote(self, rollout: Rollout, reason: str) -> None:
        """The canaries become the first replicas of the new release."""
        controller = self._controller
        for routed in self._routed(member.name for member in controller.canaries()):
            routed.replica.canary = False
        rolling = replace(rollout, previous=controller.release, state="rolling", reason=reason)
        controller.release, controller.canary_release = rollout.release, None
        await asyncio.to_thread(write_rollout, self._folder, rolling)
        self._say(f"{controller.model}: {rollout.release} is promoted: {reason}")

    async def _rolling(self, rollout: Rollout) -> None:
        controller = self._controller
        controller.release = rollout.release
        staying = controller.regular()
        if len(staying) >= controller.target and all(
            member.release == rollout.release and member.name in controller.routed for member in staying
        ):
            await self._end(rollout, "done", rollout.reason)

    async def _end(self, rollout: Rollout, state: State, reason: str) -> None:
        await asyncio.to_thread(write_rollout, self._folder, replace(rollout, state=state, reason=reason))
        self._say(f"{self._controller.model}: the rollout of {rollout.release} is {state}: {reason or 'all replaced'}")

    # --- counts since the canaries began

    async def _counts(self) -> tuple[Counts, Counts]:
        controller = self._controller
        canaries = {member.name for member in controller.canaries()} & controller.routed.keys()
        if not canaries:
            return Counts(), Counts()
        pages = await asyncio.to_thread(pages_of, {name: each.url for name, each in controller.routed.items()})
        for name, routed in controller.routed.items():
            if name not in self._bases:
                replica = routed.replica
                since_start = (
                    (0, 0, None) if name in canaries else (replica.requests, replica.failures, pages.get(name))
                )
                self._bases[name] = since_start
        return self._group(canaries, pages), self._group(controller.routed.keys() - canaries, pages)

    def _group(self, names: Iterable[str], pages: dict[str, ReplicaMetrics]) -> Counts:
        requests = failures = 0
        ttfts, gaps = [], []
        for name in names:
            routed, (first, failed, page) = self._controller.routed.get(name), self._bases.get(name, (0, 0, None))
            if routed is None:
                continue
            requests += routed.replica.requests - routed.replica.in_flight - first
            failures += routed.replica.failures - failed
            if name in pages:
                ttfts.append(pages[name].since("ttft_s", page))
                gaps.append(pages[name].since("itl_s", page))
        return Counts(
            requests=requests, failures=failures, ttft_p50_s=quantile(ttfts, 0.5), itl_p50_s=quantile(gaps, 0.5)
        )

    def _routed(self, names: Iterable[str]) -> list[Routed]:
        return [self._controller.routed[name] for name in names if name in self._controller.routed]
