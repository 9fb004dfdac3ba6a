"""Rollouts under load, with a real gateway and server processes: no request is dropped."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from armillary.fleet.rollout.rollout_driver import RolloutDriver
from armillary.fleet.rollout.rollout_record import Rollout, begin_rollout, read_rollout, roll_back
from tests.fleet.autoscale.test_controller import Service, service_of
from tests.fleet.gateway.replicas import scenario, until
from tests.fleet.pool.test_local_pool import SERVER


def releases(service: Service) -> set[str]:
    return {member.release for member in service.controller.regular()}


def state(folder: Path) -> str:
    rollout = read_rollout(folder)
    return "" if rollout is None else rollout.state


LENIENT: dict[str, Any] = {"share": 0.3, "min_requests": 10, "max_error_fraction": 0.2, "max_slowdown": 50.0}
"""decided after some twenty requests, by errors alone: processes that share two cores differ in speed at random;
verdicts on speed are tested in test_canary_verdict"""
ENDED = ("done", "rolled back", "shadowed")


async def rolled(folder: Path, service: Service, rollout: Rollout, end: str) -> None:
    """Load until the rollout has ended."""
    RolloutDriver(service.controller, service.client.models, folder, lambda text: None)
    await until(lambda: service.ready() == 2, 60.0)
    least = [2]

    async def watch() -> None:
        async with asyncio.timeout(90):
            while state(folder) not in ENDED:
                least[0] = min(least[0], service.ready())
                await asyncio.sleep(0.02)

    begin_rollout(folder, rollout)
    watcher = asyncio.create_task(watch())
    while not watcher.done():
        await service.load(40, 0.5)
    await watcher
    ended = read_rollout(folder)
    assert ended is not None and ended.state == end, ended
    assert least[0] >= 2 and set(service.statuses) == {200}


def failing_releases(service: Service, *names: str) -> None:
    """Replicas of these releases answer every request with 500."""
    working = service.pool._command

    def command(port: int, release: str) -> list[str]:
        failing = [sys.executable, str(SERVER), str(port), "-1", "2"]
        return failing if release in names else working(port, release)

    service.pool._command = command


@pytest.mark.slow
@scenario
async def test_a_rolling_update(folder: Path) -> None:
    async with service_of(folder, target=2) as service:
        await rolled(folder, service, Rollout(release="registry:bot:2", strategy="rolling"), "done")
        assert releases(service) == {"registry:bot:2"} and len(service.controller.regular()) == 2


@scenario
async def test_a_good_canary_is_promoted(folder: Path) -> None:
    async with service_of(folder, target=2) as service:
        await rolled(folder, service, Rollout(release="registry:bot:2", **LENIENT), "done")
        assert releases(service) == {"registry:bot:2"} and service.controller.canary_release is None


@scenario
async def test_a_canary_that_fails_is_rolled_back(folder: Path) -> None:
    """Its requests are answered by the others."""
    async with service_of(folder, target=2) as service:
        failing_releases(service, "registry:bot:2")
        await rolled(folder, service, Rollout(release="registry:bot:2", **LENIENT), "rolled back")
        await until(lambda: not service.controller.canaries())
        assert releases(service) == {""} and service.controller.target == 2


@scenario
async def test_blue_green_turns_to_a_complete_set(folder: Path) -> None:
    """All requests go to the new set at once, and none before all of it is ready."""
    async with service_of(folder, target=2) as service:
        green = Rollout(release="registry:bot:2", strategy="blue-green", **LENIENT)
        await rolled(folder, service, green, "done")
        assert releases(service) == {"registry:bot:2"} and len(service.controller.regular()) == 2


@pytest.mark.slow
@scenario
async def test_blue_green_turns_back(folder: Path) -> None:
    async with service_of(folder, target=2) as service:
        failing_releases(service, "registry:bot:2")
        green = Rollout(release="registry:bot:2", strategy="blue-green", **LENIENT)
        await rolled(folder, service, green, "rolled back")
        await until(lambda: not service.controller.canaries())
        assert releases(service) == {""} and await service.ask() == 200


@scenario
async def test_a_shadow_that_fails_is_noticed_by_no_client(folder: Path) -> None:
    """Clients are answered by the others at the first attempt, and nothing is replaced."""
    async with service_of(folder, target=2) as service:
        failing_releases(service, "registry:bot:2")
        shadow = Rollout(release="registry:bot:2", strategy="shadow", **LENIENT)
        await rolled(folder, service, shadow, "shadowed")
        judged = read_rollout(folder)
        assert judged is not None and judged.reason.startswith("worse: ")
        await until(lambda: not service.controller.canaries())
        assert releases(service) == {""}
        assert {line["attempts"] for line in service.client.lines()} == {1}


@scenario
async def test_a_service_that_is_started_again_continues_its_canary(folder: Path) -> None:
    """The canary is adopted as a canary, so that the target is not one more."""
    waits = Rollout(release="registry:bot:2", share=0.1, min_requests=10_000)
    async with service_of(folder, target=1, stop=False) as service:
        RolloutDriver(service.controller, service.client.models, folder, lambda text: None)
        begin_rollout(folder, waits)
        await until(lambda: len(service.controller.routed) == 2, 60.0)
    async with service_of(folder, target=1) as successor:
        RolloutDriver(successor.controller, successor.client.models, folder, lambda text: None)
        await until(lambda: len(successor.controller.routed) == 2, 60.0)
        assert successor.controller.target == 1 and len(successor.controller.canaries()) == 1
        roll_back(folder)
        await until(lambda: not successor.controller.canaries() and len(successor.controller.routed) == 1, 60.0)
    await asyncio.to_thread(service.pool.stop_all, 2.0)  # they are children of this process


KINDS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "rolling update": ({"strategy": "rolling"}, True, "done"),
    "canary promoted": ({}, True, "done"),
    "canary rolled back": ({}, False, "rolled back"),
    "blue/green": ({"strategy": "blue-green"}, True, "done"),
    "blue/green back": ({"strategy": "blue-green"}, False, "rolled back"),
}
EACH = 2_500
"""requests during and after a rollout: 12,500 together"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_requests(tmp_path: Path, kind: str) -> None:
    """None of them fails, with the tolerances that services have but for latency: processes here share two cores."""
    settings, is_good, end = KINDS[kind]

    async def run() -> None:
        async with service_of(tmp_path, target=2, seconds=0.002) as service:
            if not is_good:
                failing_releases(service, "registry:bot:2")
            driver = RolloutDriver(service.controller, service.client.models, tmp_path, lambda text: None)
            await until(lambda: service.ready() == 2, 120.0)
            await service.load(100, 2.0)
            begin_rollout(tmp_path, Rollout(release="registry:bot:2", share=0.3, max_slowdown=4.0, **settings))
            while len(service.statuses) < EACH or state(tmp_path) != end:
                assert state(tmp_path) in ("canary", "green", "rolling", end), read_rollout(tmp_path)
                await service.load(100, 1.0)
            ended = read_rollout(tmp_path)
            assert ended is not None
            print(f"{kind}: {len(service.statuses)} requests, {ended.reason or driver.progress or 'all replaced'}")
            assert set(service.statuses) == {200} and releases(service) == {"registry:bot:2" if is_good else ""}

    asyncio.run(run())
