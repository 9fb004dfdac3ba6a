"""Rollouts under load, with a real gateway and server processes: no request is dropped."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from armillary.fleet.rollout.rollout_driver import RolloutDriver
from armillary.fleet.rollout.rollout_record import Rollout, begin_rollout, read_rollout
from tests.fleet.autoscale.test_controller import Service, service_of
from tests.fleet.gateway.replicas import scenario, until
from tests.fleet.pool.test_local_pool import SERVER


def releases(service: Service) -> set[str]:
    return {member.release for member in service.controller.regular()}


def state(folder: Path) -> str:
    rollout = read_rollout(folder)
    return "" if rollout is None else rollout.state


async def rolled(folder: Path, service: Service, rollout: Rollout, *ends: str) -> None:
    """Load until the rollout has ended."""
    RolloutDriver(service.controller, service.client.models, folder, lambda text: None)
    await until(lambda: service.ready() == 2, 60.0)
    least = [2]

    async def watch() -> None:
        while state(folder) not in ends:
            least[0] = min(least[0], service.ready())
            await asyncio.sleep(0.02)

    begin_rollout(folder, rollout)
    watcher = asyncio.create_task(watch())
    while not watcher.done():
        await service.load(40, 0.5)
    await watcher
    assert least[0] >= 2 and set(service.statuses) == {200}


@scenario
async def test_a_rolling_update(folder: Path) -> None:
    async with service_of(folder, target=2) as service:
        await rolled(folder, service, Rollout(release="registry:bot:2", canary_fraction=0.0), "done")
        assert releases(service) == {"registry:bot:2"} and len(service.controller.regular()) == 2


@scenario
async def test_a_good_canary_is_promoted(folder: Path) -> None:
    async with service_of(folder, target=2) as service:
        wanted = Rollout(release="registry:bot:2", canary_fraction=0.3, min_requests=10)
        await rolled(folder, service, wanted, "done")
        assert releases(service) == {"registry:bot:2"} and service.controller.canary_release is None


@scenario
async def test_a_canary_that_fails_is_rolled_back(folder: Path) -> None:
    """Its requests are answered by the others."""
    async with service_of(folder, target=2) as service:
        service.pool._command = lambda port, release: [
            sys.executable, str(SERVER), str(port), "-1" if release else "0.02", "2",
        ]  # fmt: skip
        wanted = Rollout(release="registry:bot:2", canary_fraction=0.3, min_requests=10)
        await rolled(folder, service, wanted, "rolled back")
        await until(lambda: not service.controller.canaries())
        assert releases(service) == {""} and service.controller.target == 2


@pytest.mark.slow
@scenario
async def test_ten_thousand_requests_through_a_rollback_a_promotion_and_a_rolling_update(folder: Path) -> None:
    async with service_of(folder, target=2, seconds=0.002) as service:
        working = service.pool._command

        def command(port: int, release: str) -> list[str]:
            failing = [sys.executable, str(SERVER), str(port), "-1", "2"]
            return failing if release == "registry:bot:2" else working(port, release)

        service.pool._command = command
        many: dict[str, Any] = {"min_requests": 200}
        await rolled(folder, service, Rollout(release="registry:bot:2", canary_fraction=0.2, **many), "rolled back")
        await rolled(folder, service, Rollout(release="registry:bot:3", canary_fraction=0.2, **many), "done")
        await rolled(folder, service, Rollout(release="registry:bot:4", canary_fraction=0.0), "done")
        while len(service.statuses) < 9_000:
            await service.load(300, 5.0)
        begin_rollout(folder, Rollout(release="registry:bot:5", canary_fraction=0.0))
        while len(service.statuses) < 10_000 or state(folder) != "done":
            await service.load(300, 1.0)
        assert set(service.statuses) == {200} and releases(service) == {"registry:bot:5"}
