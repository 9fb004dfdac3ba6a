"""Replicas that trickle in the middle of a stream: out of the rotation, an error for who waits, and back when quick."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadRecipe
from armillary.fleet.gateway.gateway_config import GatewaySettings
from armillary.fleet.gateway.routing import Replica, Router
from tests.fleet.gateway.replicas import Client, FakeReplica, gateway_of, scenario, until

STREAM: dict[str, Any] = {"model": "bot", "prompt": "hello", "stream": True}
QUICK_S, TRICKLE_S, TICK_S = 0.01, 0.3, 0.05
SETTINGS = {"slow_gap_s": 0.05, "slow_grace_s": 0.3}
SLOW = "it has become far slower than other replicas"


def replicas(count: int, **more: Any) -> list[FakeReplica]:
    return [FakeReplica(tokens=2000, gap_s=QUICK_S, **more) for _ in range(count)]


def stream(client: Client) -> asyncio.Task[Any]:
    """One that lasts until its replica fails it, or the test ends."""
    return asyncio.create_task(client.post(STREAM))


async def settle(client: Client) -> list[Replica]:
    """Until every replica has a pace of its own to be compared with."""
    await asyncio.sleep(8 * TICK_S)
    return [replica for _, replica in client.models.replicas()]


async def end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@scenario
async def test_a_replica_that_trickles_leaves_the_rotation_and_comes_back(tmp_path: Path) -> None:
    one, two = replicas(2)
    async with gateway_of(tmp_path, one, two, gateway=SETTINGS, slow_tick_s=TICK_S) as client:
        streams = [stream(client), stream(client)]
        slow, quick = await settle(client)
        one.gap_s = TRICKLE_S
        await until(lambda: slow.slow, 3)
        assert "gets no requests while others work: it is slow" in client.said[-1]
        ready = await client.get("/ready")
        assert (ready.status, ready.json["replicas_up"]) == (200, {"bot": 1})
        assert '_replica_up{model="bot",url="' + one.url + '"} 0' in (await client.get("/metrics")).text
        picked = quick.requests
        more = [stream(client) for _ in range(3)]
        await until(lambda: quick.requests == picked + 3, 1)
        done, _ = await asyncio.wait(streams, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        (ended,) = done
        assert f"the replica failed in the middle of its answer: {SLOW}" in ended.result().text
        assert ended.result().text.startswith("data:") and "[DONE]" not in ended.result().text
        assert slow.slow and not quick.slow, "it is tried, and still slow"
        one.gap_s = QUICK_S
        await until(lambda: slow.up, 5)
        picked = slow.requests
        await until(lambda: slow.breaker.admits(1e9), 1)
        more += [stream(client) for _ in range(2)]
        await until(lambda: slow.requests > picked, 1)
        await end(*streams, *more)


@scenario
async def test_a_request_that_waits_at_a_slow_replica_is_answered_by_another(tmp_path: Path) -> None:
    """Before the first token; `idle_timeout_s` and `first_token_timeout_s` are far away."""
    one, two = replicas(2)
    async with gateway_of(tmp_path, one, two, gateway=SETTINGS, slow_tick_s=TICK_S, probe="ready") as client:
        streams = [stream(client), stream(client)]
        slow, quick = await settle(client)
        one.hangs, quick.last_pick = True, slow.last_pick + 1
        waiting = asyncio.create_task(client.post({"model": "bot", "prompt": "hello"}))
        await until(lambda: slow.in_flight == 2, 1)
        one.hangs, one.gap_s = False, TRICKLE_S
        answer = await asyncio.wait_for(waiting, 5)
        assert answer.status == 200 and client.lines()[-1]["attempts"] == 2
        await end(*streams)


@scenario
async def test_a_pause_of_one_stream_is_no_fault_of_its_replica(tmp_path: Path) -> None:
    """As while a server collects the arguments of a call: a stream of the gateway's own shows that it is quick."""
    one, two = replicas(2, hangs_after=60)
    async with gateway_of(tmp_path, one, two, gateway=SETTINGS, slow_tick_s=TICK_S) as client:
        paused = stream(client)
        paused_at = await settle(client)
        await until(lambda: any("it is slow" in line for line in client.said), 3)
        await until(lambda: all(replica.up for replica in paused_at), 3)
        await asyncio.sleep(3 * SETTINGS["slow_grace_s"])
        assert not paused.done()
        await end(paused)


@pytest.mark.parametrize("count", [1, 2])
def test_no_replica_is_slow_where_all_are_or_where_it_is_alone(tmp_path: Path, count: int) -> None:
    asyncio.run(slow_alike(tmp_path, replicas(count)))


async def slow_alike(folder: Path, several: list[FakeReplica]) -> None:
    async with gateway_of(folder, *several, gateway=SETTINGS, slow_tick_s=TICK_S) as client:
        streams = [stream(client) for _ in several]
        links = await settle(client)
        for replica in several:
            replica.gap_s = TRICKLE_S
        await asyncio.sleep(12 * TICK_S)
        assert not any(replica.slow for replica in links) and client.said == []
        await end(*streams)


@scenario
async def test_a_replica_that_has_far_more_to_do_keeps_its_streams(tmp_path: Path) -> None:
    """It gets no more requests, and those that it has get through."""
    one, two = replicas(2)
    async with gateway_of(tmp_path, one, two, gateway=SETTINGS, slow_tick_s=TICK_S) as client:
        streams = [stream(client), stream(client)]
        slow, _ = await settle(client)
        slow.in_flight += 50
        one.gap_s = TRICKLE_S
        await until(lambda: slow.slow, 3)
        await asyncio.sleep(2 * SETTINGS["slow_grace_s"])
        assert not any(each.done() for each in streams) and slow.slow
        await end(*streams)


@scenario
async def test_a_replica_that_may_not_be_asked_is_back_after_a_pause(tmp_path: Path) -> None:
    one, two = replicas(2)
    async with gateway_of(tmp_path, one, two, gateway=SETTINGS, slow_tick_s=TICK_S, probe="none") as client:
        streams = [stream(client), stream(client)]
        slow, _ = await settle(client)
        one.gap_s = TRICKLE_S
        await until(lambda: slow.slow, 3)
        await asyncio.sleep(0.5)
        assert slow.slow, "its own streams still trickle"
        assert len(one.bodies) == 1, "the gateway sends it none"
        await end(*streams)
        await until(lambda: slow.up, 5)


def test_a_slow_replica_gets_requests_only_where_no_other_works() -> None:
    made = Router([Replica(name="a", slow=True), Replica(name="b")], "round-robin")
    assert {made.pick(b"", 0.0).name for _ in range(4)} == {"b"}  # type: ignore[union-attr]
    made.replicas[1].breaker.retry_at = 1e9
    assert made.pick(b"", 0.0) is made.replicas[0] and made.has_ready


def test_the_factor_is_off_or_at_least_two() -> None:
    GatewaySettings(slow_factor=0)
    with pytest.raises(BadRecipe, match="at least 2; 0 turns it off"):
        GatewaySettings(slow_factor=1.5)
