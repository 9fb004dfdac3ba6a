"""The controller with a real gateway, server processes and HTTP between them: what fails is replaced, load scales."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from armillary.fleet.autoscale.controller import Controller
from armillary.fleet.autoscale.decision_log import Logged, read_log, replay
from armillary.fleet.autoscale.policy import Autoscaler
from armillary.fleet.autoscale.replica_capacity import Limits
from armillary.fleet.autoscale.replica_metrics import ReplicaMetrics, quantile
from armillary.fleet.pool.local_pool import LocalPool
from armillary.spec.tables.fleet import Autoscale
from tests.fleet.gateway.replicas import Client, gateway_of, scenario, until
from tests.fleet.pool.test_local_pool import SERVER

BODY = {"model": "bot", "prompt": "x", "max_tokens": 1}


class Service:
    """A gateway with a controller beside it."""

    def __init__(self, client: Client, controller: Controller, pool: LocalPool, folder: Path) -> None:
        self.client, self.controller, self.pool, self.folder = client, controller, pool, folder
        self.statuses: list[int] = []

    async def ask(self, prompt: str = "x") -> int:
        answer = await self.client.post({**BODY, "prompt": prompt})
        self.statuses.append(answer.status)
        return answer.status

    async def load(self, per_s: float, seconds: float) -> None:
        """An open loop of requests."""
        tasks, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            tasks.append(asyncio.create_task(self.ask()))
            await asyncio.sleep(1 / per_s)
        await asyncio.gather(*tasks)

    def ready(self) -> int:
        return sum(not routed.draining for routed in self.controller.routed.values())

    def process(self, name: str) -> int:
        """The keeper of a server, whose group has the server too."""
        record = self.pool._record(name)
        assert record is not None
        return record.pid


@asynccontextmanager
async def service_of(
    folder: Path,
    *,
    target: int = 1,
    seconds: float = 0.02,
    scaler: Autoscaler | None = None,
    stop: bool = True,
    hung_s: float = 1.0,
    slow_s: float = 60.0,
    slow_tick_s: float | None = None,
    gateway: dict[str, Any] | None = None,
) -> AsyncIterator[Service]:
    def command(port: int, release: str) -> list[str]:
        return [sys.executable, str(SERVER), str(port), str(seconds), "2"]

    pool = LocalPool(folder / "pool", command)
    settings: dict[str, Any] = {"health_interval_s": 0.3, "health_timeout_s": 0.5, "retries": 3}
    settings = settings if gateway is None else gateway
    async with gateway_of(
        folder,
        gateway=settings,
        health=True,
        slow_tick_s=slow_tick_s,
        managed=True,
        policy="least-load",
        probe="ready",
        max_park_s=60.0,
    ) as client:
        controller = Controller(
            pool,
            client.gateway,
            client.models,
            model="bot",
            served="bot",
            target=target,
            autoscaler=scaler,
            log=folder / "decisions.jsonl",
            say=lambda text: None,
            hung_s=hung_s,
            slow_s=slow_s,
            poll_s=0.1,
        )
        task = asyncio.create_task(controller.run())
        try:
            yield Service(client, controller, pool, folder)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            if stop:
                await asyncio.to_thread(pool.stop_all, 2.0)


@scenario
async def test_the_first_request_waits_for_the_first_replica(folder: Path) -> None:
    async with service_of(folder) as service:
        assert await service.ask() == 200
        assert service.ready() == 1


@scenario
async def test_a_killed_replica_is_replaced_and_no_request_fails(folder: Path) -> None:
    async with service_of(folder, target=2) as service:
        await until(lambda: service.ready() == 2, 60.0)
        victim = next(iter(service.controller.routed))
        load = asyncio.create_task(service.load(30, 3.0))
        await asyncio.sleep(0.5)
        os.killpg(service.process(victim), signal.SIGKILL)
        await until(lambda: service.ready() == 2 and victim not in service.controller.routed)
        await load
        assert len(service.statuses) > 40
        assert set(service.statuses) == {200}  # nothing had begun to answer, so the gateway asked the other one


@scenario
async def test_a_hung_replica_is_replaced(folder: Path) -> None:
    async with service_of(folder, target=2) as service:
        await until(lambda: service.ready() == 2, 60.0)
        before = set(service.controller.routed)
        stuck = asyncio.create_task(service.ask("hang"))
        await until(lambda: len(set(service.controller.routed) - before) >= 1)
        await until(lambda: service.ready() == 2, 60.0)
        stuck.cancel()
        with suppress(asyncio.CancelledError):
            await stuck
        assert await service.ask() == 200


@scenario
async def test_another_controller_adopts_the_servers(folder: Path) -> None:
    """The autoscaler was killed: its successor keeps what runs, whatever its own start size."""
    async with service_of(folder, target=2, stop=False) as service:
        await until(lambda: service.ready() == 2, 60.0)
        processes = {name: service.process(name) for name in service.controller.routed}
    async with service_of(folder, target=1) as successor:
        await until(lambda: successor.ready() == 2, 60.0)
        await asyncio.sleep(0.5)
        assert {name: successor.process(name) for name in successor.controller.routed} == processes
        assert successor.controller.target == 2
    await asyncio.to_thread(service.pool.stop_all, 2.0)  # they are children of this process


@scenario
async def test_load_starts_replicas_and_its_end_drains_them(folder: Path) -> None:
    """A replica serves 2 / 0.1 s = 20 requests/s; 30/s need two."""
    windows = {"interval_s": 0.25, "stable_window_s": 2.0, "panic_window_s": 0.75, "cooldown_s": 2.0}
    scaler = Autoscaler(Autoscale(max_replicas=3, **windows), Limits(requests_per_s=20.0, in_flight=2.0))
    async with service_of(folder, seconds=0.1, scaler=scaler) as service:
        await until(lambda: service.ready() == 1, 60.0)
        await service.load(30, 4.0)
        assert service.controller.target >= 2
        await until(lambda: service.ready() == 1, 20.0)
        assert set(service.statuses) == {200}
        lines = read_log(folder / "decisions.jsonl")
        log = [line for line in lines if isinstance(line, Logged)]
        assert any(line.decision.change > 0 for line in log)
        assert max(line.signals.arrived_per_s for line in log) > 10
        assert all(line.decision.replicas == again.replicas for line, again in replay(lines))
        state = json.loads(json.dumps(service.controller.plain()))
        assert "ready" in {each["state"] for each in state["replicas"]} and state["decisions"]


def test_latencies_are_read_from_histograms() -> None:
    def page(counts: list[int]) -> ReplicaMetrics:
        bounds = ("0.1", "0.2", "+Inf")
        lines = [f'armillary_ttft_s_bucket{{le="{bound}"}} {n}' for bound, n in zip(bounds, counts, strict=True)]
        return ReplicaMetrics("\n".join([*lines, "armillary_waiting 3"]))

    before, now = page([50, 60, 60]), page([50, 160, 160])
    assert now.gauge("waiting") == 3.0 and now.gauge("kv_used_fraction") == 0.0
    added = now.since("ttft_s", before)
    assert abs((quantile([added], 0.99) or 0) - 0.199) < 1e-6
    assert now.since("ttft_s", None)[0.1] == 50
    assert page([1, 1, 1]).since("ttft_s", before)[0.1] == 1  # a server that was restarted counts from 0
    assert quantile([], 0.5) is None and quantile([now.since("ttft_s", now)], 0.5) is None
