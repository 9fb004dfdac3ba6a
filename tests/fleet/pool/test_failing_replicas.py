"""A replica that is killed, hangs or becomes slow in the middle of streams: no client hangs, and it is out of the
rotation at once and replaced. Killed and hung with the settings that services have, slow with a shorter grace."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from armillary.fleet.autoscale.controller import HUNG_S
from tests.fleet.autoscale.test_controller import Service, service_of
from tests.fleet.gateway.replicas import Answer, scenario, until

OUT_S = 5.0
"""time in which a failed replica is to be out of the rotation"""


async def streams(service: Service, number: int) -> list[asyncio.Task[tuple[Answer, float]]]:
    """Streams that last 30 s on their own; each task ends with the answer and how long it took."""

    async def one() -> tuple[Answer, float]:
        begin = time.monotonic()
        body = {"model": "bot", "prompt": "x", "max_tokens": 600, "stream": True}
        return await service.client.post(body), time.monotonic() - begin

    tasks = [asyncio.create_task(one()) for _ in range(number)]
    await asyncio.sleep(1.5)
    return tasks


async def failing(folder: Path, number: signal.Signals) -> None:
    async with service_of(folder, target=2, seconds=0.05, hung_s=HUNG_S, gateway={}) as service:
        await until(lambda: service.ready() == 2, 60.0)
        tasks = await streams(service, 4)
        victim = max(service.controller.routed.values(), key=lambda routed: routed.replica.in_flight)
        name = next(name for name, routed in service.controller.routed.items() if routed is victim)
        assert victim.replica.in_flight >= 1
        begin = time.monotonic()
        os.killpg(service.process(name), number)

        def out() -> bool:
            return not victim.replica.up or service.controller.routed.get(name) is not victim

        await until(out, OUT_S)
        out_s = time.monotonic() - begin
        assert await service.ask() == 200  # by the other one, or by the same soon
        await until(lambda: name not in service.controller.routed and service.ready() == 2, HUNG_S + 30)
        replaced_s = time.monotonic() - begin
        done = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        broken = [(answer, seconds) for answer, seconds in done if "error" in answer.text]
        whole = [answer for answer, _ in done if "error" not in answer.text]
        assert len(broken) >= 1 and all("[DONE]" in answer.text for answer in whole)
        freed_s = max(seconds for _, seconds in broken)
        print(
            f"{number.name}: out after {out_s:.1f} s, clients freed {freed_s - 1.5:.1f} s, replaced {replaced_s:.1f} s"
        )
        assert freed_s < 1.5 + HUNG_S + OUT_S


@pytest.mark.slow
@scenario
async def test_killed_in_the_middle_of_streams(folder: Path) -> None:
    await failing(folder, signal.SIGKILL)


@pytest.mark.slow
@scenario
async def test_hung_in_the_middle_of_streams(folder: Path) -> None:
    await failing(folder, signal.SIGSTOP)


SLOW_S, TICK_S = 2.0, 0.1
"""grace of a slow replica, and how often streams are looked at"""


@scenario
async def test_streams_that_trickle(folder: Path) -> None:
    """It passes its health checks all along. Others stream meanwhile, so it is not the load; after the grace it is
    killed, and a new one takes its place."""
    async with service_of(
        folder, target=2, seconds=0.02, slow_s=SLOW_S, slow_tick_s=TICK_S, gateway={"slow_gap_s": 0.3}
    ) as service:
        await until(lambda: service.ready() == 2, 60.0)
        before = dict(service.controller.routed)
        body = {"model": "bot", "prompt": "x", "max_tokens": 400, "stream": True}
        tasks = [asyncio.create_task(service.client.post(body)) for _ in range(4)]
        await asyncio.sleep(1.0)
        begin = time.monotonic()
        trickle = asyncio.create_task(service.client.post({**body, "prompt": "trickle"}))
        await until(lambda: any(routed.replica.slow for routed in before.values()), OUT_S)
        out_s = time.monotonic() - begin
        (victim,) = [name for name, routed in before.items() if routed.replica.slow]
        assert before[victim].replica.breaker.retry_at is None, "its health checks pass"
        picks = before[victim].replica.requests
        assert [await service.ask() for _ in range(6)] == [200] * 6 and before[victim].replica.requests == picks
        await until(lambda: victim not in service.controller.routed and service.ready() == 2, SLOW_S + 30)
        replaced_s = time.monotonic() - begin
        assert replaced_s > SLOW_S, "not before the grace"
        done = await asyncio.wait_for(asyncio.gather(trickle, *tasks), 30)
        broken = [answer for answer in done if "error" in answer.text]
        assert "error" in done[0].text and len(broken) < len(done), "those of the other replica are whole"
        assert all("[DONE]" in answer.text for answer in done if answer not in broken)
        print(f"slow: out after {out_s:.1f} s, replaced after {replaced_s:.1f} s, {len(broken)} streams ended")
